"""What tokens look like between devices: moves over the expert axis, in the dtype of the wire.

A row travels as it was computed, as bfloat16, or as 8-bit floats with one float32 scale a row
(float8_e4m3fn forward, whose fraction is finer, and float8_e5m2 backward, whose range is wider).
Narrow rows are only moved: every sum is made after they have arrived, in float32. Integers travel
as they are. P is the number of peers, the devices of the expert axis. Inside `shard_map`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from switchjax.axes import EXPERT
from switchjax.config import Wire

Move = Callable[[Array, Any], Array]
"""Moves rows [..., D] between devices; the second argument holds integers that say how."""


def swap(x_P: Array, wire: Wire) -> Array:
    """Entry i of device j becomes entry j of device i [P, ..., D]."""
    if wire == "compute" or not _is_float(x_P):
        return _swap(x_P)
    return move(_swap, _swap, x_P, None, wire)


def gather(x: Array, wire: Wire) -> Array:
    """The arrays [..., D] of all devices [P, ..., D]."""
    if wire == "compute" or not _is_float(x):
        return _gather(x)
    return move(_gather, _swap, x, None, wire)


def scatter_sum(y_P: Array, wire: Wire) -> Array:
    """On device i, the sum of all devices' entries i: [P, ..., D] to [..., D]."""
    if wire == "compute":
        return lax.psum_scatter(y_P, EXPERT)
    return swap(y_P, wire).astype(jnp.float32).sum(axis=0).astype(y_P.dtype)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _swap(x_P: Array, how: None = None) -> Array:
    return lax.all_to_all(x_P, EXPERT, split_axis=0, concat_axis=0, tiled=True)


def _gather(x: Array, how: None = None) -> Array:
    return lax.all_gather(x, EXPERT)


def move(there: Move, back: Move, x: Array, how: Any, wire: Wire) -> Array:
    """`there(x, how)`; the gradient goes by `back`.

    Args:
        back: brings each row of a gradient to where the row of x came from. Where it brings
            several copies of x's rows, as after a gather, they are in a leading dim and are added.
        how: integers that both need.
    """
    y: Any = _move(there, back, x, how, wire)
    return y


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 4))
def _move(there: Move, back: Move, x: Array, how: Any, wire: Wire) -> Array:
    return _decode(there(_encode(x, wire, jnp.float8_e4m3fn), how), jnp.float8_e4m3fn, x.dtype)


def _move_forward(there: Move, back: Move, x: Array, how: Any, wire: Wire) -> tuple[Array, Any]:
    return _move(there, back, x, how, wire), (how, jnp.zeros((x.ndim, 0), x.dtype))


def _move_backward(there: Move, back: Move, wire: Wire, kept: Any, dy: Array) -> tuple[Array, Any]:
    how, like_x = kept
    dx = _decode(back(_encode(dy, wire, jnp.float8_e5m2), how), jnp.float8_e5m2, like_x.dtype)
    if dx.ndim > like_x.shape[0]:
        dx = dx.astype(jnp.float32).sum(axis=0).astype(like_x.dtype)
    return dx, jax.tree.map(lambda i: np.zeros(i.shape, jax.dtypes.float0), how)


_move.defvjp(_move_forward, _move_backward)


def _encode(x: Array, wire: Wire, narrow: Any) -> Array:
    """As the wire has it; narrow rows as bytes [..., D + 4]: x over the scale, and the scale."""
    if wire == "compute" or not _is_float(x):
        return x
    if wire == "bfloat16":
        return x.astype(jnp.bfloat16)
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = largest / float(jnp.finfo(narrow).max)
    scale = jnp.where(scale == 0, 1, scale)  # a row of zeros, or of what is as good as that
    values = lax.bitcast_convert_type((x / scale).astype(narrow), jnp.uint8)
    return jnp.concatenate([values, lax.bitcast_convert_type(scale[..., 0], jnp.uint8)], axis=-1)


def _decode(coded: Array, narrow: Any, dtype: Any) -> Array:
    if coded.dtype != jnp.uint8:
        return coded.astype(dtype)
    values = lax.bitcast_convert_type(coded[..., :-4], narrow).astype(jnp.float32)
    scale = lax.bitcast_convert_type(coded[..., -4:], jnp.float32)
    return (values * scale[..., None]).astype(dtype)
