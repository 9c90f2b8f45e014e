"""Activations that keep little for the backward pass equal those of JAX, and keep what they say."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchjax.nn.activation import attention_weights, gated_gelu, relu_dropout

B, H, L, S = 2, 3, 4, 5
RATE = 0.25


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def visible():
    """Of each query another number of keys, of one none."""
    number_BL1 = np.random.default_rng(0).integers(1, S + 1, (B, L, 1))
    number_BL1[0, 0] = 0
    return jnp.asarray(np.arange(S) < number_BL1)


def plain_weights(scores_BHLS, visible_BLS, dtype):
    masked_BHLS = jnp.where(visible_BLS[:, None], scores_BHLS, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(masked_BHLS, axis=-1).astype(dtype)


def factors(*shape):
    return jnp.where(np.random.default_rng(1).random(shape) < RATE, 0, 1 / (1 - RATE))


CASES = {
    "attention": (
        lambda s: attention_weights(s, visible(), "float32"),
        lambda s: plain_weights(s, visible(), "float32"),
        [normal(2, B, H, L, S)],
    ),
    "relu": (lambda x: relu_dropout(x, None, 0.0), jax.nn.relu, [normal(3, B, L)]),
    "relu at 0": (lambda x: relu_dropout(x, None, 0.0), jax.nn.relu, [jnp.zeros((2, 3))]),
    "relu with dropout": (
        lambda x: relu_dropout(x, factors(B, L), RATE),
        lambda x: jax.nn.relu(x) * factors(B, L),
        [normal(4, B, L)],
    ),
    "gated gelu": (
        gated_gelu,
        lambda x, gate: x * jax.nn.gelu(gate),
        [normal(5, B, L), normal(6, B, L)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_jaxs_own(name):
    ours, plain, arguments = CASES[name]
    (y, vjp), (plain_y, plain_vjp) = (jax.vjp(f, *arguments) for f in (ours, plain))
    np.testing.assert_array_equal(y, plain_y)
    dy = normal(7, *y.shape)
    for found, expected in zip(vjp(dy), plain_vjp(dy), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name, arrays", [("attention", 1), ("relu with dropout", 1), ("gated gelu", 2)]
)
def test_keeps_no_more_than_it_says(name, arrays):
    ours, plain, arguments = CASES[name]
    of_shape = [
        sum(x.shape == arguments[0].shape for x in jax.tree.leaves(jax.vjp(f, *arguments)[1]))
        for f in (ours, plain)
    ]
    assert of_shape[0] == arrays < of_shape[1]


def test_gradients_of_narrow_weights_are_as_near_as_their_rounding():
    scores, dy = 3 * normal(8, B, H, L, S), normal(9, B, H, L, S, dtype="bfloat16")
    weights = [
        jax.vjp(partial(f, visible_BLS=visible(), dtype=dtype), scores)
        for f, dtype in ((attention_weights, jnp.bfloat16), (plain_weights, jnp.float32))
    ]
    (y, vjp), (_, exact_vjp) = weights
    assert y.dtype == jnp.bfloat16
    (found,), (expected,) = vjp(dy), exact_vjp(dy.astype(jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=2**-8 * float(jnp.abs(dy).max()))
    assert not np.asarray(found)[~np.broadcast_to(visible()[:, None], found.shape)].any()
