"""Beam search against lists of words in numpy, and against all that could be said."""

from dataclasses import replace
from functools import cache, partial

import builders
import jax
import numpy as np
import pytest

from switchjax.batch import Batch
from switchjax.beam import reordered, search
from switchjax.data.prompts import prompt_rows
from switchjax.decode import decode
from switchjax.layout import Layout
from switchjax.nn.attention import KeyValues
from switchjax.nn.cache import Cache, Kept
from switchjax.sampling import Sampling, Vocabulary

MODEL = replace(
    builders.MODEL, architecture="decoder_only", moe_every=1, num_layers=1, init_scale=8.0
)
PAD, EOS = 0, 1
WORDS = (EOS, 2, 3, 4)
VOCABULARY = Vocabulary(size=5, pad_id=PAD, eos_id=EOS)
PROMPTS = [np.asarray(words, np.int32) for words in ([0, 3, 2], [0, 4], [0, 2, 2, 4])]
LENGTH, ROWS, NEW = 4, 4, 4
PENALTY = 0.6


@cache
def model_of(mesh="single"):
    return builders.start(builders.run_config(MODEL), builders.layout(mesh)).model


@cache
def found(num_beams, new=NEW, mesh="single"):
    """What beam search says after each prompt [4, M]; the last row holds no prompt."""
    with jax.set_mesh(builders.mesh(mesh)):
        program = jax.jit(
            partial(
                search,
                max_new_tokens=new,
                vocabulary=VOCABULARY,
                num_beams=num_beams,
                length_penalty=PENALTY,
            )
        )
        said = program(model_of(mesh), None, Layout().place(rows()))
        return np.asarray(said.tokens_BM)


def rows():
    return prompt_rows(
        PROMPTS, length=LENGTH, num_rows=ROWS, pad_id=PAD, architecture="decoder_only"
    )


@cache
def _forward():
    return jax.jit(lambda model, batch: model(batch, None)[0])


@cache
def nats(prompt: int, said: tuple[int, ...]) -> np.ndarray:
    """Logarithm of the probability of each of the words next, from an evaluation of the row."""
    words = [*PROMPTS[prompt], *said]
    tokens_BL = np.zeros((1, LENGTH + NEW), np.int32)
    tokens_BL[0, : len(words)] = words
    segment_BL = (np.arange(LENGTH + NEW) < len(words))[None].astype(np.int32)
    mask_BL = np.zeros(tokens_BL.shape, bool)
    batch = Batch(np.zeros(1, np.int32), tokens_BL, segment_BL, tokens_BL, mask_BL)
    with jax.set_mesh(builders.mesh("single")):
        logits_BLV = np.asarray(_forward()(model_of(), Layout().place(batch)))
    chosen = logits_BLV[0, len(words) - 1, list(WORDS)].astype(np.float64)
    return chosen - np.log(np.exp(chosen).sum())


def score(prompt, said):
    """Of a whole continuation."""
    total = sum(nats(prompt, said[:i])[WORDS.index(said[i])] for i in range(len(said)))
    return total / ((5 + len(said)) / 6) ** PENALTY


def has_ended(said):
    return bool(said) and said[-1] == EOS


def beams_as_lists(prompt, num_beams, new):
    """The best of `num_beams`, by sorting everything that could come next."""
    beams = [()]
    for _ in range(new):
        after = {said if has_ended(said) else (*said, w) for said in beams for w in WORDS}
        beams = sorted(after, key=lambda said: -score(prompt, said))[:num_beams]
    return beams[0]


def all_that_could_be_said(new):
    said = [()]
    for _ in range(new):
        said = [s if has_ended(s) else (*s, w) for s in said for w in WORDS]
    return set(said)


def row(said, new):
    return [*said, *[PAD] * (new - len(said))]


@cache
def greedy():
    """Likewise, of the likeliest word each time."""
    with jax.set_mesh(builders.mesh("single")):
        program = jax.jit(
            partial(decode, max_new_tokens=NEW, vocabulary=VOCABULARY, sampling=Sampling())
        )
        said = program(model_of(), None, Layout().place(rows()), jax.random.key(0))
        return np.asarray(said.tokens_BM)


def test_one_beam_is_greedy():  # case 22
    np.testing.assert_array_equal(found(num_beams=1), greedy())


def test_three_beams_are_those_of_lists():  # case 67: caches go with their beams
    said_BM = found(3)
    expected = [row(beams_as_lists(prompt, 3, NEW), NEW) for prompt in range(3)]
    assert said_BM[:3].tolist() == expected
    assert said_BM[3].tolist() == [PAD] * NEW
    # More than the likeliest word each time, and at least as good.
    likeliest = [tuple(w for w in said if w != PAD) for said in greedy()[:3]]
    chosen = [tuple(w for w in said if w != PAD) for said in said_BM[:3]]
    gains = [score(p, chosen[p]) - score(p, likeliest[p]) for p in range(3)]
    assert min(gains) >= 0 and max(gains) > 0


def test_enough_beams_find_the_best_of_all():
    """Three words: with 16 beams no continuation of two words is ever given up."""
    said_BM = found(num_beams=16, new=3)
    for prompt in range(3):
        best = max(all_that_could_be_said(3), key=lambda said: score(prompt, said))
        assert said_BM[prompt].tolist() == row(best, 3)


@pytest.mark.mesh
def test_beams_are_the_same_on_a_mesh():
    np.testing.assert_array_equal(found(3, mesh="data2_expert2_model2"), found(3))


def test_caches_go_with_their_beams():  # case 67
    """What the decoder read of each beam moves; what the encoder read is all beams' own."""
    numbers = np.arange(6, dtype=np.float32)
    array = np.broadcast_to(numbers[None, :, None, None, None], (2, 6, 3, 1, 2))
    cache = Cache(
        (Kept(KeyValues(array, array + 10), KeyValues(array, array)),) * 2,
        np.broadcast_to(numbers[:, None], (6, 3)).astype(np.int32),
        np.ones((6, 4), np.int32),
        np.int32(2),
    )
    cache = jax.tree.map(jax.numpy.asarray, cache)
    moved = reordered(cache, jax.numpy.asarray([[2, 0, 0], [0, 1, 1]]))
    expected = [2, 0, 0, 3, 4, 4]
    for kept in moved.kept:
        assert kept.own.k_BSHK[1, :, 2, 0, 1].tolist() == expected
        assert kept.own.v_BSHK[0, :, 0, 0, 0].tolist() == [10 + x for x in expected]
        assert kept.cross.k_BSHK[1, :, 2, 0, 1].tolist() == numbers.tolist()
    assert moved.segment_BS[:, 1].tolist() == expected
