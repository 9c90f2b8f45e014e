"""Activations of which the backward pass needs one array, or two.

As JAX has them, each step of theirs is kept: of softmax its numerators beside its result, of a
gated gelu eight arrays, of relu a mask, and of dropout its factors.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from switchjax.remat import recomputed


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def relu_dropout(
    x: Float[Array, "..."], factor: Float[Array, "..."] | None, rate: float
) -> Float[Array, "..."]:
    """max(x, 0) · factor. Keeps its result, as the product that follows does.

    Args:
        factor: 0 or 1 / (1 - rate), without gradient; None if nothing is dropped, and `rate` is 0.
    """
    y = jax.nn.relu(x)
    return y if factor is None else y * factor


def _relu_dropout_forward(x, factor, rate):
    y = relu_dropout(x, factor, rate)
    return y, y


def _relu_dropout_backward(rate, y, dy):
    return jnp.where(y > 0, dy / (1 - rate), 0), None


relu_dropout.defvjp(_relu_dropout_forward, _relu_dropout_backward)


@recomputed
def gated_gelu(x: Float[Array, "..."], gate: Float[Array, "..."]) -> Float[Array, "..."]:
    """x · gelu(gate), by the tanh formula. Keeps what it is given.

    Source: GLU variants, arXiv:2002.05202, eq. 6.
    """
    return x * jax.nn.gelu(gate)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def attention_weights(
    scores_BHLS: Float[Array, "B H L S"], visible_BLS: Bool[Array, "B L S"], dtype: DTypeLike
) -> Float[Array, "B H L S"]:
    """Softmax of float32 scores over the keys that are visible, in `dtype`, and kept so.

    Where no key is visible, all are, but no gradient goes to the scores.
    """
    # Finite: a padded query sees nothing, and its row must stay free of NaN.
    masked_BHLS = jnp.where(visible_BLS[:, None], scores_BHLS, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(masked_BHLS, axis=-1).astype(dtype)


def _attention_weights_forward(scores_BHLS, visible_BLS, dtype):
    weights_BHLS = attention_weights(scores_BHLS, visible_BLS, dtype)
    return weights_BHLS, (weights_BHLS, visible_BLS)


def _attention_weights_backward(dtype, residuals, dweights_BHLS):
    del dtype
    weights_BHLS, visible_BLS = residuals
    weights_BHLS = weights_BHLS.astype(jnp.float32)
    mean_BHL1 = (weights_BHLS * dweights_BHLS).sum(axis=-1, keepdims=True)
    dscores_BHLS = weights_BHLS * (dweights_BHLS - mean_BHL1)
    return jnp.where(visible_BLS[:, None], dscores_BHLS, 0), None


attention_weights.defvjp(_attention_weights_forward, _attention_weights_backward)
