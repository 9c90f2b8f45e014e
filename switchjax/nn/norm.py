"""Root-mean-square normalisation without bias (T5, arXiv:1910.10683, section 2.1)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from switchjax.layout import Layout
from switchjax.nn.init import ones

EPSILON = 1e-6  # as in T5


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²)) · scale, in float32 whatever the dtype of x."""

    def __init__(self, d_model: int, layout: Layout):
        self.norm_D = ones((d_model,), layout.norm_d)

    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        x32_BLD = x_BLD.astype(jnp.float32)
        mean_square_BL1 = jnp.mean(jnp.square(x32_BLD), axis=-1, keepdims=True)
        normed_BLD = x32_BLD * lax.rsqrt(mean_square_BL1 + EPSILON) * self.norm_D[...][None, None]
        return normed_BLD.astype(x_BLD.dtype)
