"""What a decoder keeps of the tokens that it has read, so that it need not read them again.

Arrays alone: knows neither the model nor how the next token is chosen.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from switchjax.layout import Layout
from switchjax.nn.attention import KeyValues


class Kept(NamedTuple):
    """Of one block, or with leading dims of all: what its queries look at."""

    own: KeyValues  # of self-attention: of the decoder's tokens
    cross: KeyValues | None  # of the encoder's output, complete from the start


class Cache(NamedTuple):
    """Keys and values of a decoder, in slots of which the first `slot` are filled.

    All rows fill the same slot at a time. Where a row has no token, as behind a prompt that is
    shorter than others or once the row has ended, its slot belongs to no segment, and neither its
    queries see the slot nor do positions count it.
    """

    kept: tuple[Kept, ...]  # of each block of a period: [N, B, slots or S, H, K]
    segment_BS: Array  # of the slots: 1, or 0 where there is nothing to see
    context_segment_BS: Array | None  # of the encoder's tokens
    slot: Array  # the first free one, int32


def empty(shape: tuple[int, int, int, int, int], dtype: str, layout: Layout) -> KeyValues:
    """Slots [N, B, S, H, K] without tokens."""
    k, v = (jnp.zeros(shape, dtype, out_sharding=layout.kept_nbshk) for _ in range(2))
    return KeyValues(k, v)


def written(slots: KeyValues, new: KeyValues, slot: Int[Array, ""]) -> KeyValues:
    """The slots [..., S, H, K] with new ones [..., L, H, K] from `slot` on."""

    def write(old: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(old, new, slot, axis=old.ndim - 3)

    return jax.tree.map(write, slots, new)


def with_segments(cache: Cache, segment_BL: Int[Array, "B L"]) -> Int[Array, "B S"]:
    """The segments of the slots once new tokens are written."""
    return lax.dynamic_update_slice_in_dim(cache.segment_BS, segment_BL, cache.slot, axis=1)


def advanced(cache: Cache, news: tuple[KeyValues, ...], segment_BL: Int[Array, "B L"]) -> Cache:
    """The cache with the keys and values of L new tokens, of each block [N, B, L, H, K]."""
    return cache._replace(
        kept=tuple(
            kept._replace(own=written(kept.own, new, cache.slot))
            for kept, new in zip(cache.kept, news, strict=True)
        ),
        segment_BS=with_segments(cache, segment_BL),
        slot=cache.slot + segment_BL.shape[1],
    )
