"""Where a token is: T5's relative buckets, or rotary angles."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.nn.init import weight

NUM_BUCKETS = 32  # T5
MAX_DISTANCE = 128  # T5: all distances from here on share a bucket
_ROTARY_BASE = 10_000.0  # RoFormer, arXiv:2104.09864, section 3.2.2


def relative_buckets(num_queries: int, num_keys: int, *, bidirectional: bool) -> np.ndarray:
    """Bucket of every (query, key) pair, int32 [queries, keys].

    Half of the buckets are exact distances, the other half grow logarithmically up to 128. Looking
    both ways, the upper half of all buckets is for keys after the query.

    Source: T5, arXiv:1910.10683, section 2.1; mesh_tensorflow/transformer/transformer_layers.py,
    _relative_position_bucket.
    """
    offset = np.arange(num_keys)[None, :] - np.arange(num_queries)[:, None]
    buckets = np.zeros_like(offset)
    num_buckets = NUM_BUCKETS
    if bidirectional:
        num_buckets //= 2
        buckets += np.where(offset > 0, num_buckets, 0)
        distance = np.abs(offset)
    else:
        distance = np.maximum(-offset, 0)
    exact = num_buckets // 2
    # float32, since the boundaries between buckets are where the reference rounds them.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    scale = np.float32(math.log(MAX_DISTANCE / exact))
    far = exact + (np.log(ratio) / scale * np.float32(num_buckets - exact)).astype(np.int32)
    buckets += np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))
    return buckets.astype(np.int32)


class RelativeBias(nnx.Module):
    """A learned number for each bucket and head, added to the attention scores of every layer."""

    def __init__(self, key: Array, config: ModelConfig, layout: Layout, *, bidirectional: bool):
        shape = (NUM_BUCKETS, config.num_heads)
        variance = config.init_scale / config.d_model
        self.relative_UH = weight(key, shape, variance=variance, held=layout.relative_uh)
        self.bidirectional = bidirectional
        self.layout = layout

    def __call__(
        self,
        num_queries: int,
        num_keys: int | None = None,
        start: int | Int[Array, ""] = 0,
    ) -> Float[Array, "H L S"]:
        """For L queries next to each other, of which the first is at place `start` of S keys.

        Args:
            num_keys: None = as many as queries.
        """
        num_keys = num_queries if num_keys is None else num_keys
        buckets_SS = relative_buckets(num_keys, num_keys, bidirectional=self.bidirectional)
        buckets_LS = lax.dynamic_slice_in_dim(jnp.asarray(buckets_SS), start, num_queries)
        relative_HU = self.relative_UH[...].T
        return relative_HU.at[:, buckets_LS].get(out_sharding=self.layout.bias_hls)


def positions(segment_BL: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Place of each token in its own segment, from 0."""
    index_BL = lax.broadcasted_iota(jnp.int32, segment_BL.shape, 1)
    before_BL = jnp.pad(segment_BL[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start_BL = jnp.where(segment_BL != before_BL, index_BL, 0)
    return index_BL - lax.cummax(start_BL, axis=1)


def rotate(
    x_BLHK: Float[Array, "B L H K"], position_BL: Int[Array, "B L"]
) -> Float[Array, "B L H K"]:
    """`x` with each pair (k, k + K/2) turned by an angle proportional to its position.

    Source: RoFormer, arXiv:2104.09864, eq. 34, with the halves paired as in GPT-NeoX.
    """
    half = x_BLHK.shape[-1] // 2
    frequency_K = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BL1K = (position_BL[..., None] * frequency_K[None, None])[:, :, None]
    sin_BL1K, cos_BL1K = jnp.sin(angle_BL1K), jnp.cos(angle_BL1K)
    x1_BLHK, x2_BLHK = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    turned = (x1_BLHK * cos_BL1K - x2_BLHK * sin_BL1K, x2_BLHK * cos_BL1K + x1_BLHK * sin_BL1K)
    return jnp.concatenate(turned, axis=-1).astype(x_BLHK.dtype)
