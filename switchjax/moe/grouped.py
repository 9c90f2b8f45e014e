"""The experts' feed-forward over rows sorted by expert: any number of rows each, none dropped.

The rows of one expert are its *run*. A run begins at a multiple of `block` rows and is read in
whole blocks; the rows between runs are zeros, and stay so. There are two ways to compute it, and
the platform compiled for decides: on CPU a loop over the blocks in use, since XLA's ragged product
there applies every expert to every row; elsewhere ragged products, which XLA may or may not expand
in the same way (see `products.AllExperts`).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from switchjax.moe import varying
from switchjax.moe.pieces import Piece, for_each_piece
from switchjax.moe.products import AllExperts, OneExpert, Products
from switchjax.remat import PRODUCT, named


def block_rows(num_rows: float, num_experts: int) -> int:
    """Rows of a block: an eighth of an expert's share of `num_rows`, in whole eights up to 128."""
    return min(128, max(1, math.ceil(num_rows / num_experts / 64)) * 8)


def padded_rows(num_rows: int, num_experts: int, block: int) -> int:
    """Rows of a buffer in which `num_rows` have room, however they are spread over the experts."""
    partly_filled = min(num_rows, num_experts)
    return (num_rows + partly_filled * (block - 1)) // block * block


def run_starts(sizes_e: Int[Array, "e"], block: int) -> Int[Array, "e"]:
    """First row of each expert's run."""
    rows_e = _block_aligned(sizes_e, block)
    return jnp.cumsum(rows_e, dtype=jnp.int32) - rows_e


def grouped_ffn(
    x_ND: Float[Array, "N D"],
    sizes_e: Int[Array, "e"],
    w_in_eDf: Float[Array, "e D f"],
    w_gate_eDf: Float[Array, "e D f"] | None,
    w_out_efD: Float[Array, "e f D"],
    keep_Nf: Float[Array, "N f"] | None,
    block: int,
) -> Float[Array, "N D"]:
    """Each row through its run's expert: relu(x·in)·out, or with a gate (x·in · gelu(x·gate))·out.

    Sums run in float32 whatever the dtype. Inside `shard_map` the result varies over every axis
    that an argument varies over.

    Args:
        x_ND: zeros outside the runs; N of at least `padded_rows`.
        sizes_e: rows of each expert, int32.
        keep_Nf: factor of the hidden activations (dropout), which gets no gradient.
        block: as in `run_starts`.
    """
    operands = (x_ND, sizes_e, Weights(w_in_eDf, w_gate_eDf, w_out_efD), keep_Nf)
    axes = frozenset().union(*map(varying.axes_of, jax.tree.leaves(operands)))
    # Here, outside our own gradient: JAX sums the weights' gradients over the axes added.
    return _ffn(*jax.tree.map(partial(varying.over, axes), operands), block)


class Weights(NamedTuple):
    """Of all experts, or of one: then without the first dim."""

    w_in: Array  # [e, D, f]
    w_gate: Array | None  # [e, D, f]
    w_out: Array  # [e, f, D]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ffn(x_ND: Array, sizes_e: Array, weights: Weights, keep_Nf: Array | None, block: int) -> Array:
    return _ffn_forward(x_ND, sizes_e, weights, keep_Nf, block)[0]


def _ffn_forward(x_ND, sizes_e, weights, keep_Nf, block):
    operands = (x_ND, sizes_e, weights, keep_Nf)
    ways = {"cpu": partial(loop_forward, block), "default": partial(ragged_forward, block)}
    y_ND, saved = lax.platform_dependent(*operands, **ways)
    return y_ND, (*operands, named(PRODUCT, saved))


def _ffn_backward(block, residuals, dy_ND):
    ways = {"cpu": partial(loop_backward, block), "default": partial(ragged_backward, block)}
    dx_ND, dweights = lax.platform_dependent(*residuals, dy_ND, **ways)
    return dx_ND, None, dweights, None


_ffn.defvjp(_ffn_forward, _ffn_backward)


# --- One feed-forward layer, whatever its products are ------------------------------------------


def _activate(saved: tuple[Array, ...]) -> Array:
    """Hidden activations from what the forward pass keeps; with relu they are kept themselves."""
    if len(saved) == 1:
        return jax.nn.relu(saved[0])
    return saved[0] * jax.nn.gelu(saved[1])


def _forward(products: Products, x: Array, weights: Weights, keep: Array | None):
    """Outputs of rows x, and what to keep for the backward pass."""
    inner = products.by(x, weights.w_in)
    if weights.w_gate is None:
        saved = (jax.nn.relu(inner),)
    else:
        saved = (inner, products.by(x, weights.w_gate))
    hidden = _activate(saved)
    if keep is not None:
        hidden *= keep.astype(hidden.dtype)
    return products.by(hidden, weights.w_out), saved


def _backward(
    products: Products,
    x: Array,
    weights: Weights,
    keep: Array | None,
    saved: tuple[Array, ...],
    dy: Array,
) -> tuple[Array, Weights]:
    """Gradients of x, and of the weights in float32."""
    hidden, activate_vjp = jax.vjp(_activate, saved)
    dhidden = products.by_transposed(dy, weights.w_out)
    if keep is not None:
        hidden, dhidden = (h * keep.astype(h.dtype) for h in (hidden, dhidden))
    (dsaved,) = activate_vjp(dhidden)
    dx = products.by_transposed(dsaved[0], weights.w_in)
    dw_gate = None
    if weights.w_gate is not None:
        dx += products.by_transposed(dsaved[1], weights.w_gate)
        dw_gate = products.outer(x, dsaved[1])
    return dx, Weights(products.outer(x, dsaved[0]), dw_gate, products.outer(hidden, dy))


# --- A loop over the pieces of all runs -----------------------------------------------------------


def loop_forward(block, x_ND, sizes_e, weights, keep_Nf):
    """Outputs, and the hidden activations to keep."""

    def step(piece: Piece, mine: Weights, carry: Any) -> Any:
        y, saved = _forward(OneExpert(), piece.read(x_ND), mine, piece.read(keep_Nf))
        return jax.tree.map(piece.write, carry, (jnp.where(piece.real_R1, y, 0), saved))

    hidden_Nf = _zeros(x_ND, (x_ND.shape[0], weights.w_in.shape[-1]))
    saved = (hidden_Nf,) if weights.w_gate is None else (hidden_Nf, hidden_Nf)
    carry = (_zeros(x_ND, x_ND.shape), saved)
    starts_e, N = run_starts(sizes_e, block), x_ND.shape[0]
    return for_each_piece(starts_e, sizes_e, block, N, weights, step, carry)


def loop_backward(block, x_ND, sizes_e, weights, keep_Nf, saved, dy_ND):
    """Gradients of x and of the weights."""

    def step(piece: Piece, mine: Weights, carry: Any) -> Any:
        dx_ND, dweights = carry
        x, keep, kept, dy = piece.read((x_ND, keep_Nf, saved, dy_ND))
        dy = jnp.where(piece.real_R1, dy, 0)
        dx, dmine = _backward(OneExpert(), x, mine, keep, kept, dy)
        return piece.write(dx_ND, dx), jax.tree.map(piece.add, dweights, dmine)

    # Sums over the pieces of a run are in float32 too.
    dweights = jax.tree.map(lambda w: _zeros(w, w.shape, jnp.float32), weights)
    carry = (_zeros(x_ND, x_ND.shape), dweights)
    starts_e, N = run_starts(sizes_e, block), x_ND.shape[0]
    dx_ND, dweights = for_each_piece(starts_e, sizes_e, block, N, weights, step, carry)
    return dx_ND, jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, weights)


# --- Ragged products ------------------------------------------------------------------------------


def ragged_forward(block, x_ND, sizes_e, weights, keep_Nf):
    """As `loop_forward`."""
    products = AllExperts(_block_aligned(sizes_e, block))
    y_ND, saved = _forward(products, x_ND, weights, keep_Nf)
    return jnp.where(_real(sizes_e, block, len(x_ND)), y_ND, 0), saved


def ragged_backward(block, x_ND, sizes_e, weights, keep_Nf, saved, dy_ND):
    """As `loop_backward`."""
    products = AllExperts(_block_aligned(sizes_e, block))
    real_N1 = _real(sizes_e, block, len(x_ND))
    dy_ND = jnp.where(real_N1, dy_ND, 0)
    dx_ND, dweights = _backward(products, x_ND, weights, keep_Nf, saved, dy_ND)
    dweights = jax.tree.map(lambda d, w: d.astype(w.dtype), dweights, weights)
    return jnp.where(real_N1, dx_ND, 0), dweights


def _real(sizes_e: Array, block: int, num_rows: int) -> Bool[Array, "N 1"]:
    """Which rows are in a run."""
    starts_e = run_starts(sizes_e, block)
    change_N = jnp.zeros(num_rows, jnp.int32).at[starts_e].add(1, mode="drop")
    change_N = change_N.at[starts_e + sizes_e].add(-1, mode="drop")
    return (jnp.cumsum(change_N) > 0)[:, None]


def _block_aligned(sizes_e: Array, block: int) -> Array:
    """Rows of each run with what fills its last block."""
    return -(-sizes_e // block) * block


def _zeros(like: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """Zeros that vary over the mesh axes that `like` varies over."""
    return varying.over(varying.axes_of(like), jnp.zeros(shape, dtype or like.dtype))
