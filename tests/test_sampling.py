"""Which tokens may be said, and how often each is, against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchjax.sampling import Sampling, Vocabulary, draw, is_kept, possible


def kept_by_loop(logits_V, top_k, top_p):
    """The same set, token by token from the likeliest on."""
    probability_V = np.exp(logits_V - logits_V.max(), dtype=np.float64)
    order = sorted(range(len(logits_V)), key=lambda token: (-logits_V[token], token))
    order = order[: top_k or len(order)]
    total, mass, kept = sum(probability_V[order]), 0.0, set()
    for token in order:
        if top_p is not None and mass >= top_p * total:
            break
        kept.add(token)
        mass += probability_V[token]
    return kept


@pytest.mark.parametrize("top_k", [None, 1, 3, 7])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.93])
def test_exactly_the_likeliest_are_kept(top_k, top_p):
    rng = np.random.default_rng(0)
    logits_BV = rng.standard_normal((64, 7)).astype(np.float32)
    logits_BV[32:] = np.round(logits_BV[32:])  # many ties, which go to the lower id
    if top_p is not None:
        logits_BV[32:] += np.float32(1e-4) * rng.random((32, 7), np.float32)  # none at the edge
    found_BV = np.asarray(is_kept(jnp.asarray(logits_BV), top_k, top_p))
    for found_V, logits_V in zip(found_BV, logits_BV, strict=True):
        assert set(np.flatnonzero(found_V)) == kept_by_loop(logits_V, top_k, top_p)


def test_equal_probabilities_have_an_exact_edge():
    """Of four equal tokens two have half of the probability, and the lower ids are taken."""
    logits_BV = jnp.zeros((1, 4))
    assert is_kept(logits_BV, None, 0.5).tolist() == [[True, True, False, False]]
    assert is_kept(logits_BV, None, 0.51).tolist() == [[True, True, True, False]]
    assert is_kept(logits_BV, 2, 0.5).tolist() == [[True, False, False, False]]  # half of two
    assert is_kept(logits_BV, None, 1.0).all()


def test_ids_that_mean_nothing_are_impossible():
    logits_BV = jnp.asarray([[9.0, 1.0, 2.0, 3.0, 8.0]])
    masked_BV = possible(logits_BV, Vocabulary(size=4, pad_id=0, eos_id=1))
    assert masked_BV.tolist() == [[-np.inf, 1.0, 2.0, 3.0, -np.inf]]
    drawn_B = draw(masked_BV, Sampling(), jax.random.key(0), jnp.arange(1))
    assert drawn_B.tolist() == [3]


def test_the_likeliest_of_equals_is_the_lower_id():
    logits_BV = jnp.asarray([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert draw(logits_BV, Sampling(), jax.random.key(0), jnp.arange(2)).tolist() == [1, 0]


def frequencies(sampling):
    """Of 20,000 draws from one distribution over four tokens and an impossible one."""
    logits_V = jnp.asarray([0.0, 1.0, 2.0, 1.5, -jnp.inf])
    logits_BV = jnp.broadcast_to(logits_V, (20_000, 5))
    drawn_B = draw(logits_BV, sampling, jax.random.key(3), jnp.arange(len(logits_BV)))
    return np.bincount(drawn_B, minlength=5) / len(logits_BV)


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        (Sampling(1.0), np.exp([0, 1, 2, 1.5])),
        (Sampling(0.5), np.exp([0, 2, 4, 3])),
        (Sampling(1.0, top_k=2), [0, 0, np.exp(2), np.exp(1.5)]),
        (Sampling(2.0, top_p=0.7), [0, np.exp(0.5), np.exp(1), np.exp(0.75)]),
    ],
)
def test_draws_follow_the_probabilities(sampling, weights):
    expected = np.append(weights, 0) / np.sum(weights)
    found = frequencies(sampling)
    assert (found[expected == 0] == 0).all()
    # Five deviations of a share that 20,000 draws measure.
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 / np.sqrt(20_000))


def test_a_row_draws_by_its_number_alone():
    """Neither by its place in the batch nor by its neighbours; another key draws otherwise."""
    logits_BV = jnp.asarray(np.random.default_rng(1).standard_normal((16, 50)), jnp.float32)
    row_B, key, hot = jnp.arange(16), jax.random.key(5), Sampling(3.0)
    together_B = np.asarray(draw(logits_BV, hot, key, row_B))
    backwards_B = np.asarray(draw(logits_BV[::-1], hot, key, row_B[::-1]))
    alone_B = [int(draw(logits_BV[i : i + 1], hot, key, row_B[i : i + 1])[0]) for i in range(16)]
    np.testing.assert_array_equal(backwards_B[::-1], together_B)
    np.testing.assert_array_equal(alone_B, together_B)
    assert (np.asarray(draw(logits_BV, hot, jax.random.key(6), row_B)) != together_B).any()
