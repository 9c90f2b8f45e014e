"""Relative buckets against another implementation's, rotary angles by their properties."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_meshes import LAYOUT, VALUES, put, use

from switchjax.config import ModelConfig
from switchjax.nn.position import RelativeBias, positions, relative_buckets, rotate

# From Hugging Face transformers 5.24.0, modeling_switch_transformers._relative_position_bucket,
# with 32 buckets and a largest distance of 128, for key - query from -60 to 199.
GOLDEN = Path(__file__).parent.parent / "data" / "relative_buckets.npz"


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_buckets_equal_the_golden_ones(direction):
    with np.load(GOLDEN) as golden:
        offset, expected = golden["relative_position"], golden[direction]
    buckets = relative_buckets(200, 200, bidirectional=direction == "bidirectional")
    assert buckets.dtype == np.int32
    found = buckets[np.maximum(-offset, 0), np.maximum(offset, 0)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_depend_on_the_distance_alone(bidirectional):
    buckets = relative_buckets(300, 300, bidirectional=bidirectional)
    np.testing.assert_array_equal(buckets[1:, 1:], buckets[:-1, :-1])
    np.testing.assert_array_equal(
        buckets[:70, :90], relative_buckets(70, 90, bidirectional=bidirectional)
    )
    assert len(np.unique(buckets)) == 32 - bidirectional  # 0 after the query is never used
    assert buckets.max() == 31


@pytest.mark.parametrize("mesh", ["single", "model8", "data2_expert2_model2"])
def test_bias_is_looked_up(mesh):
    config = ModelConfig(num_heads=8)
    table_UH = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    with use(mesh):
        module = jax.eval_shape(
            lambda: RelativeBias(jax.random.key(0), config, LAYOUT, bidirectional=True)
        )
        module.relative_UH = nnx.Param(put(table_UH, LAYOUT.relative_uh.spec))
        bias_HLL = np.asarray(jax.jit(lambda module: module(20))(module))
    buckets_LL = relative_buckets(20, 20, bidirectional=True)
    np.testing.assert_array_equal(bias_HLL, table_UH[buckets_LL].transpose(2, 0, 1))


def test_positions_start_again_in_each_segment():
    segment_BL = np.array(
        [[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 2, 0]]
    )
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3, 0, 0]]
    assert positions(jnp.asarray(segment_BL)).tolist() == expected


def random_heads(seed):
    return np.random.default_rng(seed).standard_normal((1, 1, 2, 8)).astype(np.float32)


def turned(x_BLHK, position):
    return np.asarray(rotate(jnp.asarray(x_BLHK), jnp.full((1, 1), position)))


@pytest.mark.parametrize("shift", [1, 100, 3000])
def test_rotary_scores_depend_on_the_distance_alone(shift):
    q, k = random_heads(0), random_heads(1)
    score = (turned(q, 7) * turned(k, 3)).sum(axis=-1)
    shifted = (turned(q, 7 + shift) * turned(k, 3 + shift)).sum(axis=-1)
    other = (turned(q, 8) * turned(k, 3)).sum(axis=-1)
    # Angles of some thousand radians are known to 2e-4 in float32.
    np.testing.assert_allclose(shifted, score, rtol=1e-5, atol=1e-6 + 1e-6 * shift)
    assert np.abs(other - score).max() > 0.1


def test_rotary_is_a_rotation():
    """Position 0 turns nothing, lengths stay, and the first pair turns by one radian a place."""
    x = random_heads(0)
    np.testing.assert_array_equal(turned(x, 0), x)
    np.testing.assert_allclose(
        np.linalg.norm(turned(x, 9), axis=-1), np.linalg.norm(x, axis=-1), **VALUES
    )
    one = np.zeros((1, 1, 1, 8), np.float32)
    one[..., 0] = 1
    expected = [np.cos(3), 0, 0, 0, np.sin(3), 0, 0, 0]
    np.testing.assert_allclose(turned(one, 3)[0, 0, 0], expected, **VALUES)
    slow = np.roll(one, 3, axis=-1)  # the last pair turns by 10000^(-3/4) a place
    expected = [0, 0, 0, np.cos(0.003), 0, 0, 0, np.sin(0.003)]
    np.testing.assert_allclose(turned(slow, 3)[0, 0, 0], expected, **VALUES)
