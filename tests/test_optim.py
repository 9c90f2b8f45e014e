"""Learning rates, clipping and decay, by hand values."""

import math
from dataclasses import replace

import builders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from switchjax.config import OptimConfig
from switchjax.layout import Layout
from switchjax.optim import WithMasters, init, learning_rate, make_optimizer, update

WARM = OptimConfig(optimizer="adamw", learning_rate=0.4, warmup_steps=4)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4), (8, 0.4 * 2 / 3), (15, 0.2)]
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_linear_rise_then_inverse_square_root(optimizer, step, rate):
    config = replace(WARM, optimizer=optimizer)
    np.testing.assert_allclose(learning_rate(config, step), rate, rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.01), (9_999, 0.01), (39_999, 0.005), (999_999, 0.001)]
)
def test_t5_schedule_for_adafactor(step, rate):
    """1 / sqrt(max(step, 10 000))."""
    config = OptimConfig(optimizer="adafactor", learning_rate=0.01, warmup_steps=10_000)
    np.testing.assert_allclose(learning_rate(config, step), rate, rtol=1e-6)


def test_the_optimizer_follows_the_schedule_that_is_reported():
    config = replace(WARM, optimizer="sgd", clip_norm=None)
    optimizer = make_optimizer(config)
    weights = {"w": jnp.zeros(2)}
    state = optimizer.init(weights)
    for step in range(6):
        updates, state = optimizer.update({"w": jnp.array([1.0, -2.0])}, state, weights)
        rate = learning_rate(config, step)
        np.testing.assert_allclose(updates["w"], [-rate, 2 * rate], rtol=1e-6)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh_name", ["single", "data4_expert2", "data2_expert2_model2"])
def test_clipping_sees_the_whole_gradient(mesh_name):
    """Case 3: squared norms 20 and 100 on the two halves of the experts make sqrt(120).

    The average of the halves' norms would be 7.236068 and the factor 0.1381966.
    """
    config = OptimConfig(optimizer="sgd", learning_rate=1.0, warmup_steps=1, clip_norm=1.0)
    gradient_EDF = np.zeros((2, 2, 2), np.float32)
    gradient_EDF[0] = [[2.0, 0.0], [4.0, 0.0]]
    gradient_EDF[1] = [[0.0, 6.0], [0.0, 8.0]]
    optimizer = make_optimizer(config)

    def update(gradient_EDF):
        updates, _ = optimizer.update(gradient_EDF, optimizer.init(gradient_EDF), None)
        return updates, optax.tree.norm(gradient_EDF)

    with jax.set_mesh(builders.mesh(mesh_name)):
        updates, norm = jax.jit(update)(jax.device_put(gradient_EDF, Layout().w_in_edf.spec))
    np.testing.assert_allclose(norm, 10.954451, rtol=1e-6)
    np.testing.assert_allclose(updates, -0.0912871 * gradient_EDF, rtol=1e-5)


@pytest.mark.parametrize(("clip_norm", "factor"), [(5.0, 1.0), (None, 1.0), (0.5, 0.1)])
def test_only_long_gradients_are_clipped(clip_norm, factor):
    config = OptimConfig(optimizer="sgd", learning_rate=1.0, warmup_steps=1, clip_norm=clip_norm)
    optimizer = make_optimizer(config)
    gradient = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    np.testing.assert_allclose(updates["a"], [-3.0 * factor], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [-4.0 * factor], rtol=1e-6)


def test_a_zero_gradient_is_not_divided_by_its_norm():
    optimizer = make_optimizer(OptimConfig(optimizer="sgd", clip_norm=1.0))
    gradient = jnp.zeros(3)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    np.testing.assert_array_equal(updates, np.zeros(3))


def test_first_step_of_adamw_is_the_sign_of_the_gradient():
    """The moments' corrections cancel: -rate · g / (|g| + 1e-8)."""
    config = replace(WARM, weight_decay=0.5, clip_norm=None)
    optimizer = make_optimizer(config)
    weights = jnp.array([1.0, -2.0, 4.0])
    gradient = jnp.array([0.3, -0.001, 0.0])
    updates, _ = optimizer.update(gradient, optimizer.init(weights), weights)
    rate = 0.1
    # Decay is decoupled: rate · 0.5 · weight, outside the moments, also without a gradient.
    expected = [-rate - rate * 0.5, rate + rate * 0.5 * 2, -rate * 0.5 * 4]
    np.testing.assert_allclose(updates, expected, rtol=1e-4)


def test_adafactor_steps_scale_with_the_parameter():
    """A gradient of one size moves a parameter by rate · max(rms, 1e-3), as in the paper."""
    config = OptimConfig(optimizer="adafactor", learning_rate=0.01, warmup_steps=10, clip_norm=None)
    optimizer = make_optimizer(config)
    for size in (2.0, 0.0):
        weights = jnp.full(4, size)
        gradient = jnp.array([0.5, -0.5, 0.5, -0.5])
        updates, _ = optimizer.update(gradient, optimizer.init(weights), weights)
        expected = 0.01 * max(size, 1e-3)
        np.testing.assert_allclose(np.abs(updates), expected, rtol=1e-5)
        assert math.copysign(1, updates[0]) == -1


def test_steps_too_small_for_bfloat16_add_up_in_masters():
    """Below 1 the next number is 1 - 2**-8: a step of 1e-3 is lost, and the sum of ten is not."""
    config = OptimConfig(optimizer="sgd", learning_rate=1e-3, warmup_steps=1, clip_norm=None)
    ones = {"narrow": jnp.ones(2, jnp.bfloat16), "wide": jnp.ones(2)}
    parameters, state = ones, init(config, ones)
    gradient, total = {name: jnp.ones(2) for name in ones}, 0.0
    for step in range(10):
        parameters, state = update(make_optimizer(config), gradient, state, parameters)
        total += 1e-3 / math.sqrt(step + 1)
        np.testing.assert_allclose(parameters["wide"], [1 - total] * 2, rtol=1e-6)
        assert (parameters["narrow"] == parameters["wide"].astype(jnp.bfloat16)).all()
        if step == 0:
            assert (parameters["narrow"] == 1).all()
    assert (parameters["narrow"] < 1).all()
    assert isinstance(state, WithMasters)
    assert state.masters["wide"] is None  # float32 has no copy
    np.testing.assert_array_equal(state.masters["narrow"], parameters["wide"])


def test_float32_parameters_have_no_masters():
    config = OptimConfig()
    parameters = {"w": jnp.ones(2)}
    state, plain = init(config, parameters), make_optimizer(config).init(parameters)
    assert jax.tree.structure(state) == jax.tree.structure(plain)
