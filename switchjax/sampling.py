"""From logits to the next token of every row: the likeliest, or one drawn.

Knows nothing of models or caches. Logits are float32, and here every device has whole rows of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class Vocabulary(NamedTuple):
    """Which ids mean something: the tokenizer's, of which the model may have more."""

    size: int
    pad_id: int
    eos_id: int


class Sampling(NamedTuple):
    """How a token is drawn. Temperature 0: not at all, the likeliest one is taken."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def possible(logits_BV: Float[Array, "B V"], vocabulary: Vocabulary) -> Float[Array, "B V"]:
    """The logits, -inf for ids that no text has.

    Those are ids beyond the tokenizer's, which only fill the embedding up, and the pad id: it
    starts a decoder and fills rows, and is no target in training. (A SentencePiece model without
    a pad piece has id 0 in its place, which is mostly its unknown piece, and is not said either.)
    """
    id_V = jnp.arange(logits_BV.shape[1])
    is_possible_V = (id_V < vocabulary.size) & (id_V != vocabulary.pad_id)
    return jnp.where(is_possible_V[None], logits_BV, -jnp.inf)


def draw(
    logits_BV: Float[Array, "B V"], sampling: Sampling, key: Array, row_B: Int[Array, "B"]
) -> Int[Array, "B"]:
    """One token a row; ties of the likeliest go to the lower id.

    Args:
        key: of this place in the continuations; with the number of the row it decides the draw, so
            that neither other rows nor the mesh do.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=1).astype(jnp.int32)
    scaled_BV = logits_BV / sampling.temperature
    kept_BV = jnp.where(is_kept(scaled_BV, sampling.top_k, sampling.top_p), scaled_BV, -jnp.inf)

    def of_row(logits_V: Array, row: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(key, row), logits_V)

    return jax.vmap(of_row)(kept_BV, row_B).astype(jnp.int32)


def is_kept(
    logits_BV: Float[Array, "B V"], top_k: int | None, top_p: float | None
) -> Bool[Array, "B V"]:
    """Which tokens may be drawn: the `top_k` likeliest, and of these the fewest, likeliest first,
    that have `top_p` of their probability together. Ties go to the lower id.

    Source: nucleus sampling, arXiv:1904.09751, section 3.1.
    """
    order_BV = jnp.argsort(-logits_BV, axis=1, stable=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=1)
    kept_BV = jnp.ones_like(sorted_BV, bool)
    if top_k is not None:
        kept_BV &= (jnp.arange(sorted_BV.shape[1]) < top_k)[None]
    if top_p is not None:
        probability_BV = jax.nn.softmax(jnp.where(kept_BV, sorted_BV, -jnp.inf), axis=1)
        before_BV = jnp.cumsum(probability_BV, axis=1) - probability_BV
        kept_BV &= before_BV < top_p
    rank_BV = jnp.argsort(order_BV, axis=1)
    return jnp.take_along_axis(kept_BV, rank_BV, axis=1)
