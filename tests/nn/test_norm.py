"""RMS norm against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_meshes import LAYOUT, VALUES, put, use

from switchjax.nn.norm import RMSNorm


def norm(x, scale_D):
    with use("single"):
        module = RMSNorm(len(scale_D), LAYOUT)
        assert (np.asarray(module.norm_D) == 1).all()
        module.norm_D = nnx.Param(put(scale_D, LAYOUT.norm_d))
        return np.asarray(module(put(x, LAYOUT.tokens_bld)))


def expected(x, scale_D):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * scale_D


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_equals_numpy(size):
    """The mean is not taken off, and 1e-6 counts where values are small."""
    rng = np.random.default_rng(0)
    x = (size * (rng.standard_normal((2, 5, 16)) + 1)).astype(np.float32)
    scale_D = rng.standard_normal(16).astype(np.float32)
    np.testing.assert_allclose(norm(x, scale_D), expected(x, scale_D), **VALUES)


def test_zeros_stay_zeros():
    assert (norm(np.zeros((1, 2, 4), np.float32), np.ones(4, np.float32)) == 0).all()


def test_bfloat16_is_rounded_only_at_the_end():
    """A sum of 512 squares in bfloat16 would stop growing on the way."""
    x = np.random.default_rng(0).standard_normal((1, 2, 512)).astype(jnp.bfloat16)
    scale_D = np.full(512, 1.7, np.float32)
    y = norm(x, scale_D)
    assert y.dtype == jnp.bfloat16
    rounded = expected(x, scale_D).astype(np.float32).astype(jnp.bfloat16)
    assert (y == rounded).mean() > 0.99  # the others lie next to the middle of two
    np.testing.assert_allclose(y.astype(np.float32), rounded.astype(np.float32), rtol=2**-7)
