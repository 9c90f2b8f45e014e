"""Dropout neither depends on the mesh nor on how a batch is cut."""

import jax
import numpy as np
import pytest
from small_meshes import LAYOUT, NAMES, VALUES, put, use

from switchjax.nn.noise import Noise, dropout

RATE = 0.25
ROWS, LENGTH, WIDTH = 16, 8, 32
X_BLD = np.random.default_rng(0).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)


@jax.jit
def drop(x, noise):
    return dropout(x, RATE, noise)


def noise_of(row_B, *, seed=0):
    return Noise(
        put(jax.random.key(seed), LAYOUT.whole), put(np.asarray(row_B, np.int32), LAYOUT.rows_b)
    )


def dropped(x, row_B, *, seed=0):
    """On one device."""
    with use("single"):
        return np.asarray(drop(put(x, LAYOUT.tokens_bld), noise_of(row_B, seed=seed)))


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", NAMES)
@pytest.mark.parametrize("spec", [LAYOUT.tokens_bld, LAYOUT.hidden_blf])
def test_every_mesh_drops_the_same(mesh, spec):
    with use(mesh):
        y = np.asarray(drop(put(X_BLD, spec), noise_of(np.arange(ROWS))))
    np.testing.assert_array_equal(y, dropped(X_BLD, np.arange(ROWS)))


@pytest.mark.parametrize("num_micros", [2, 4])
def test_micro_batches_drop_as_the_whole(num_micros):
    """Whichever rows they hold."""
    whole = dropped(X_BLD, np.arange(ROWS))
    for micro in range(num_micros):
        rows = np.arange(micro, ROWS, num_micros)
        np.testing.assert_array_equal(dropped(X_BLD[rows], rows), whole[rows])


def test_a_longer_row_drops_the_same_where_it_was():
    whole = dropped(X_BLD, np.arange(ROWS))
    np.testing.assert_array_equal(dropped(X_BLD[:, :5], np.arange(ROWS)), whole[:, :5])


def test_a_share_is_dropped_and_the_rest_scaled():
    y = dropped(X_BLD, np.arange(ROWS))
    kept = y != 0
    np.testing.assert_allclose(y[kept], X_BLD[kept] / (1 - RATE), **VALUES)
    deviation = np.sqrt(RATE * (1 - RATE) / X_BLD.size)
    assert abs((1 - kept.mean()) - RATE) < 4 * deviation


def test_rows_steps_and_places_differ():
    ones = np.ones_like(X_BLD)
    y = dropped(ones, np.arange(ROWS))
    assert len(np.unique(y.reshape(ROWS, -1), axis=0)) == ROWS
    assert (y != dropped(ones, np.arange(ROWS), seed=1)).any(axis=(1, 2)).all()
    with use("single"):
        noise, x = noise_of(np.arange(ROWS)), put(ones, LAYOUT.tokens_bld)
        sites = [np.asarray(drop(x, n)) for n in (noise.at(0), noise.at(1), noise.at(0).at(1))]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert (sites[one] != sites[other]).any(axis=(1, 2)).all()


def test_no_noise_or_no_rate_changes_nothing():
    with use("single"):
        x = put(X_BLD, LAYOUT.tokens_bld)
        assert dropout(x, RATE, None) is x
        assert dropout(x, 0.0, noise_of(np.arange(ROWS))) is x
