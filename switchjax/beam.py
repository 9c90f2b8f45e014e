"""Beam search: of each prompt the W best continuations so far go on together, as rows.

The beams of a prompt are neighbouring rows, so they are on one device, and their caches change
places there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from switchjax.batch import Prompts
from switchjax.decode import Continuations, start
from switchjax.model import SwitchTransformer
from switchjax.nn.cache import Cache
from switchjax.sampling import Vocabulary


class Beams(NamedTuple):
    """The beams of every prompt, best first."""

    tokens_BWM: Array
    said: Array  # tokens of the longest ones, int32
    length_BW: Array  # tokens of each, its EOS included, int32
    done_BW: Array
    nats_BW: Array  # logarithm of the probability of its tokens, float32; -inf where there is none


def search(
    model: SwitchTransformer,
    router_bias_XE: Array | None,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    vocabulary: Vocabulary,
    num_beams: int,
    length_penalty: float,
) -> Continuations:
    """The best continuation found for each prompt; with one beam that of `decode`, greedily.

    See `grow` for what is best. The search ends when all beams have, or are full.
    """
    logits_BV, cache, read = start(model, router_bias_XE, prompts, max_new_tokens, vocabulary)
    layout = model.embedding.layout
    (B, V), W = logits_BV.shape, num_beams
    shape, pad_id = (B, W, max_new_tokens), vocabulary.pad_id
    nothing_BWM = jnp.full(shape, pad_id, jnp.int32, out_sharding=layout.rows(3))
    zeros_BW = jnp.zeros((B, W), jnp.int32, out_sharding=layout.rows(2))
    no_prompt_B = ~(prompts.segment_BL > 0).any(axis=1)
    done_BW = jnp.broadcast_to(no_prompt_B[:, None], (B, W))
    # All beams are alike as yet, so that only the first may go on.
    nats_BW = jnp.where((jnp.arange(W) == 0)[None], 0.0, -jnp.inf) + zeros_BW
    beams = Beams(nothing_BWM, jnp.int32(0), zeros_BW, done_BW, nats_BW)

    def say(beams: Beams, logits_BWV: Array) -> tuple[Beams, Array]:
        return grow(beams, logits_BWV, vocabulary, length_penalty)

    def go_on(carry: tuple[Beams, Cache]) -> tuple[Beams, Cache]:
        beams, cache = carry
        last_BW = lax.dynamic_index_in_dim(beams.tokens_BWM, beams.said - 1, 2, keepdims=False)
        # R: rows of the model, a beam each.
        tokens_R1, real_R1 = (x.reshape(-1)[:, None] for x in (last_BW, ~beams.done_BW))
        logits_RV, cache = read(tokens_R1, real_R1.astype(jnp.int32), cache)
        beams, parent_BW = say(beams, logits_RV.reshape(B, W, V))
        return beams, reordered(cache, parent_BW)

    def unfinished(carry: tuple[Beams, Cache]) -> Array:
        return (carry[0].said < max_new_tokens) & ~carry[0].done_BW.all()

    beams, _ = say(beams, jnp.broadcast_to(logits_BV[:, None], (B, W, V)))
    beams, _ = lax.while_loop(unfinished, go_on, (beams, repeated(cache, W)))
    return Continuations(beams.tokens_BWM[:, 0], passes=beams.said)


def grow(
    beams: Beams, logits_BWV: Float[Array, "B W V"], vocabulary: Vocabulary, length_penalty: float
) -> tuple[Beams, Int[Array, "B W"]]:
    """The W best of all beams with one token more, and which beam each comes from.

    A beam that has ended stays as it is and competes with the others. The score is the logarithm
    of the probability over ((5 + length) / 6) to the power of `length_penalty`; ties go to the
    better parent, then to the lower id.

    Source: GNMT, arXiv:1609.08144, eq. 14, without its coverage penalty.
    """
    _, W, V = logits_BWV.shape
    is_pad_V = jnp.arange(V) == vocabulary.pad_id
    as_it_is_V = jnp.where(is_pad_V, 0.0, -jnp.inf)
    done_BW1 = beams.done_BW[..., None]
    more_BWV = jnp.where(done_BW1, as_it_is_V[None, None], jax.nn.log_softmax(logits_BWV, axis=2))
    nats_BWV = beams.nats_BW[..., None] + more_BWV
    length_BW = beams.length_BW + ~beams.done_BW
    penalty_BW1 = (((5 + length_BW) / 6) ** length_penalty)[..., None]
    _, best_BW = lax.top_k((nats_BWV / penalty_BW1).reshape(-1, W * V), W)
    parent_BW, token_BW = best_BW // V, best_BW % V
    nats_BW = jnp.take_along_axis(nats_BWV.reshape(-1, W * V), best_BW, axis=1)

    def of_parents(x_BW: Array) -> Array:
        return jnp.take_along_axis(x_BW, parent_BW, axis=1)

    tokens_BWM = jnp.take_along_axis(beams.tokens_BWM, parent_BW[..., None], axis=1)
    return Beams(
        lax.dynamic_update_slice_in_dim(tokens_BWM, token_BW[..., None], beams.said, axis=2),
        beams.said + 1,
        of_parents(length_BW),
        of_parents(beams.done_BW) | (token_BW == vocabulary.eos_id) | (nats_BW == -jnp.inf),
        nats_BW,
    ), parent_BW


def repeated(cache: Cache, num_beams: int) -> Cache:
    """The cache with each row as often as it has beams."""

    def repeat(x: Array, dim: int) -> Array:
        shape = (*x.shape[: dim + 1], num_beams, *x.shape[dim + 1 :])
        copies = jnp.broadcast_to(jnp.expand_dims(x, dim + 1), shape)
        return copies.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    segment_BS, context_BS = cache.segment_BS, cache.context_segment_BS
    return Cache(
        jax.tree.map(lambda x: repeat(x, 1), cache.kept),
        repeat(segment_BS, 0),
        None if context_BS is None else repeat(context_BS, 0),
        cache.slot,
    )


def reordered(cache: Cache, parent_BW: Int[Array, "B W"]) -> Cache:
    """The cache of beams that come from these of the same prompt.

    What the encoder read is the same for all beams of a prompt, and stays.
    """
    B, W = parent_BW.shape

    def of_parents(x: Array, dim: int) -> Array:
        split = x.reshape(*x.shape[:dim], B, W, *x.shape[dim + 1 :])
        pick = jax.vmap(lambda x, i: jnp.take(x, i, axis=dim), (dim, 0), dim)
        return pick(split, parent_BW).reshape(x.shape)

    kept = tuple(
        of_block._replace(own=jax.tree.map(lambda x: of_parents(x, 1), of_block.own))
        for of_block in cache.kept
    )
    return cache._replace(kept=kept, segment_BS=of_parents(cache.segment_BS, 0))
