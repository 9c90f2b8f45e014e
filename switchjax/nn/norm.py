"""Root-mean-square normalisation without bias (T5, arXiv:1910.10683, section 2.1)."""

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from switchjax.layout import Layout
from switchjax.nn.init import ones
from switchjax.remat import recomputed

EPSILON = 1e-6  # as in T5


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²)) · scale, in float32 whatever the dtype of x."""

    def __init__(self, d_model: int, layout: Layout):
        self.norm_D = ones((d_model,), layout.norm_d)

    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        return _normed(x_BLD, self.norm_D[...])


@recomputed  # or what is kept are several arrays of x's shape in float32
def _normed(x_BLD: Array, norm_D: Array) -> Array:
    x32_BLD = x_BLD.astype(jnp.float32)
    mean_square_BL1 = jnp.mean(jnp.square(x32_BLD), axis=-1, keepdims=True)
    normed_BLD = x32_BLD * lax.rsqrt(mean_square_BL1 + EPSILON) * norm_D[None, None]
    return normed_BLD.astype(x_BLD.dtype)
