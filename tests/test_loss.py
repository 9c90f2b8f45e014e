"""Cross-entropy and accuracy as sums over real targets."""

import math

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from switchjax.layout import Layout
from switchjax.loss import TargetSums, target_sums


def logits_with_loss(nats_BL: np.ndarray) -> np.ndarray:
    """Two words; where the target is word 0 its cross-entropy is the given one."""
    other_BL = np.log(np.expm1(nats_BL))  # log(1 + exp(x)) = nats
    return np.stack([np.zeros_like(other_BL), other_BL], axis=-1).astype(np.float32)


def mean(sums: TargetSums) -> float:
    return float(sums.nats / sums.targets)


def of_losses(nats_BL: list, mask_BL: list) -> TargetSums:
    nats_BL = np.array(nats_BL)
    targets_BL = np.zeros(nats_BL.shape, np.int32)
    return target_sums(
        jnp.asarray(logits_with_loss(nats_BL)), jnp.asarray(targets_BL), jnp.asarray(mask_BL)
    )


def test_every_target_weighs_the_same():
    """Case 15: five targets of 1.0 in one row, one of 7.0 in the other: 2.0, not 4.0."""
    nats_BL = [[1.0] * 5, [7.0] + [3.0] * 4]
    sums = of_losses(nats_BL, [[True] * 5, [True] + [False] * 4])
    assert int(sums.targets) == 6
    np.testing.assert_allclose(mean(sums), 2.0, rtol=1e-6)


def test_sums_of_parts_add_up():
    """Case 16: 30 tokens of 2.0 and 10 of 6.0 are 3.0, not 4.0."""
    parts = [of_losses([[2.0] * 30], [[True] * 30]), of_losses([[6.0] * 10], [[True] * 10])]
    np.testing.assert_allclose(mean(jax.tree.map(jnp.add, *parts)), 3.0, rtol=1e-6)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh_name", builders.small_meshes())
def test_uneven_targets_on_every_mesh(mesh_name):
    """Case 15, with rows on devices of their own and words split over `model`."""
    rng = np.random.default_rng(0)
    logits_BLV = rng.normal(size=(8, 4, 16)).astype(np.float32)
    targets_BL = rng.integers(0, 16, (8, 4)).astype(np.int32)
    mask_BL = np.arange(4)[None, :] < np.array([4, 0, 1, 0, 2, 4, 0, 1])[:, None]
    # In float64, one target at a time.
    nats, correct = 0.0, 0
    for b, t in zip(*np.nonzero(mask_BL), strict=True):
        row = logits_BLV[b, t].astype(np.float64)
        nats += math.log(np.exp(row).sum()) - row[targets_BL[b, t]]
        correct += int(row.argmax() == targets_BL[b, t])
    layout = Layout()
    with jax.set_mesh(builders.mesh(mesh_name)):
        sums = jax.jit(target_sums)(
            jax.device_put(logits_BLV, layout.logits_blv),
            jax.device_put(targets_BL, layout.tokens_bl),
            jax.device_put(mask_BL, layout.tokens_bl),
        )
    assert int(sums.targets) == mask_BL.sum() == 12
    assert int(sums.correct) == correct
    np.testing.assert_allclose(float(sums.nats), nats, rtol=1e-6)


def test_no_target_is_a_sum_of_zero():
    sums = of_losses([[1.0, 2.0]], [[False, False]])
    assert (float(sums.nats), int(sums.correct), int(sums.targets)) == (0.0, 0, 0)


def test_accuracy_counts_the_highest_logit():
    logits_BLV = jnp.array([[[1.0, 3.0, 2.0], [0.0, -1.0, -2.0], [5.0, 5.5, 6.0]]])
    targets_BL = jnp.array([[1, 2, 2]])
    sums = target_sums(logits_BLV, targets_BL, jnp.array([[True, True, False]]))
    assert int(sums.correct) == 1


def test_masked_targets_get_no_gradient_whatever_they_hold():
    """S6: a logit of infinity behind the mask poisons neither the sum nor its gradient."""

    def nats(logits_BLV: Array) -> Array:
        mask_BL = jnp.array([[True, False]])
        return target_sums(logits_BLV, jnp.array([[0, 1]]), mask_BL).nats

    gradient = jax.grad(nats)(jnp.array([[[1.0, 0.0], [1e30, -1e30]]]))
    p = 1 / (1 + math.exp(-1.0))
    np.testing.assert_allclose(gradient, [[[p - 1, 1 - p], [0.0, 0.0]]], rtol=1e-6)


def test_large_logits_do_not_overflow():
    logits_BLV = jnp.array([[[1000.0, 0.0]]])
    sums = target_sums(logits_BLV, jnp.array([[1]]), jnp.array([[True]]))
    assert float(sums.nats) == 1000.0
