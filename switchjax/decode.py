"""Continuations of prompts, one token of every row at a time, in one program for all of them.

The prompts are read at once, and from then on each token once: the cache has the rest. Nothing
drops at the experts, so no row depends on another. A row that has ended is read on as padding, is
sent to no expert, and says the pad id; when all rows have ended, so does the loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from switchjax.batch import Prompts
from switchjax.model import SwitchTransformer
from switchjax.nn.cache import Cache
from switchjax.sampling import Sampling, Vocabulary, draw, possible


class Continuations(NamedTuple):
    """What follows each prompt: tokens up to the first EOS, that included, then the pad id."""

    tokens_BM: Array  # int32
    passes: Array  # times that the decoder read tokens, the prompts' time included, int32


class _Progress(NamedTuple):
    tokens_BM: Array
    done_B: Array
    said: Array  # tokens of each row, int32
    cache: Cache


Logits = Array
Reader = Callable[[Array, Array, Cache], tuple[Logits, Cache]]


def decode(
    model: SwitchTransformer,
    router_bias_XE: Array | None,
    prompts: Prompts,
    key: Array,
    *,
    max_new_tokens: int,
    vocabulary: Vocabulary,
    sampling: Sampling,
) -> Continuations:
    """Continuations of at most `max_new_tokens` tokens, each token the likeliest or drawn.

    Args:
        key: of what is drawn; the number of a row and the place in its continuation do the rest.
    """
    logits_BV, cache, read = start(model, router_bias_XE, prompts, max_new_tokens, vocabulary)

    def say(progress: _Progress, logits_BV: Logits) -> _Progress:
        tokens_BM, done_B, said, cache = progress
        drawn_B = draw(logits_BV, sampling, jax.random.fold_in(key, said), prompts.row_B)
        token_B = jnp.where(done_B, vocabulary.pad_id, drawn_B)
        tokens_BM = lax.dynamic_update_slice_in_dim(tokens_BM, token_B[:, None], said, axis=1)
        return _Progress(tokens_BM, done_B | (token_B == vocabulary.eos_id), said + 1, cache)

    def go_on(progress: _Progress) -> _Progress:
        last_B1 = lax.dynamic_slice_in_dim(progress.tokens_BM, progress.said - 1, 1, axis=1)
        real_B1 = ~progress.done_B[:, None]
        logits_BV, cache = read(last_B1, real_B1.astype(jnp.int32), progress.cache)
        return say(progress._replace(cache=cache), logits_BV)

    def unfinished(progress: _Progress) -> Array:
        return (progress.said < max_new_tokens) & ~progress.done_B.all()

    shape = (len(prompts.row_B), max_new_tokens)
    spec = model.embedding.layout.tokens_bl
    nothing_BM = jnp.full(shape, vocabulary.pad_id, jnp.int32, out_sharding=spec)
    done_B = ~(prompts.segment_BL > 0).any(axis=1)
    first = say(_Progress(nothing_BM, done_B, jnp.int32(0), cache), logits_BV)
    last = lax.while_loop(unfinished, go_on, first)
    return Continuations(last.tokens_BM, passes=last.said)


def start(
    model: SwitchTransformer,
    router_bias_XE: Array | None,
    prompts: Prompts,
    max_new_tokens: int,
    vocabulary: Vocabulary,
) -> tuple[Logits, Cache, Reader]:
    """Logits of the first new token, the cache with the prompts in it, and how to go on.

    Logits are -inf for ids that no text has, and every device has whole rows of them.
    """

    def read(tokens_BL: Array, segment_BL: Array, cache: Cache) -> tuple[Logits, Cache]:
        logits_BV, cache = model.read(tokens_BL, segment_BL, cache, router_bias_XE)
        logits_BV = jax.reshard(logits_BV, model.embedding.layout.rows(2))
        return possible(logits_BV, vocabulary), cache

    num_rows, length = prompts.tokens_BL.shape
    cache = model.start_cache(
        num_rows,
        length + max_new_tokens - 1,  # nobody looks at the last one
        prompts.encoder_tokens_BS,
        prompts.encoder_segment_BS,
        router_bias_XE,
    )
    return *read(prompts.tokens_BL, prompts.segment_BL, cache), read
