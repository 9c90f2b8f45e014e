"""A layer with some experts gathered beforehand equals the loop oracle, whichever they are."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from small_meshes import GRADIENTS, LAYOUT, SHAPES, VALUES, put, use
from test_layer import (
    CONFIG,
    check_gradients,
    check_stats,
    cotangents_like,
    make_layer,
    noise_of,
    random_tokens,
    random_weights,
    weights_of,
)

from switchjax import zero
from switchjax.layout import Layout
from switchjax.mesh import Exchange, Storage
from switchjax.moe import hot

HOT = 4  # of eight experts
ROW = 5  # whose first token has its experts in two halves, and in two quarters, of all
GEGLU = replace(CONFIG, activation="geglu", top_k=2, capacity_factor=8.0)
WAYS = [
    pytest.param(("all_to_all", "separate", "data4_expert2"), marks=pytest.mark.mesh),
    pytest.param(("all_gather", "separate", "data2_expert2_model2"), marks=pytest.mark.mesh),
    ("ragged", "folded", "data2_expert2_model2"),
]


def layout_of(dispatcher, experts, mesh):
    exchange = Exchange(dispatcher=dispatcher, experts=experts)
    storage = Storage(zero=3, hot_experts=HOT)
    return Layout.of(replace(SHAPES[mesh], exchange=exchange, storage=storage))


def with_hot(layer, variables, order_1E):
    """The layer as a function of its variables, in a step in which experts have this order."""

    def joined(leaf, variable):
        if not hot.is_of_experts(leaf):
            return variable
        stacked = leaf.replace(leaf.get_value()[None])
        hot_1AXY = hot.gathered(stacked, order_1E, layer.layout, "float32")
        return leaf.replace(hot.Cached(variable.get_value(), hot_1AXY[0], order_1E[0]))

    is_leaf = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    return jax.tree.map(joined, layer, variables, is_leaf=is_leaf)


@jax.jit
def both_ways(layer, load_E, x_BLD, real_BL, noise, cotangents):
    order_1E = hot.orders(load_E[None], layer.layout)

    def objective(variables, x_BLD):
        y_BLD, stats = with_hot(layer, variables, order_1E)(x_BLD, real_BL, noise)
        total = jnp.sum(y_BLD * cotangents.y)
        total += cotangents.aux_coefficient * stats.balance + cotangents.z_coefficient * stats.z
        return total, (y_BLD, stats)

    gradient = jax.grad(objective, argnums=(0, 1), has_aux=True)
    (dlayer, dx_BLD), (y_BLD, stats) = gradient(zero.variables(layer, layer.layout), x_BLD)
    return y_BLD, stats, dx_BLD, dlayer


@cache
def given_and_expected(num_real):
    """The layer's weights, tokens, of which so many of one row are real, and the oracle's word."""
    weights, (x, real) = random_weights(GEGLU), random_tokens()
    if num_real is not None:
        real[:] = False
        real[ROW, :num_real] = True
    cotangents = cotangents_like(x)
    expected = oracle.switch(
        x, real, weights, group_size=16, capacity=16, top_k=2, cotangents=cotangents
    )
    assert expected.margin > 1e-5, "float32 could choose other experts"
    return weights, x, real, cotangents, expected


def check(way, load, num_real=None):
    """The layer equals the oracle; the share of devices that gathered cold experts."""
    weights, x, real, cotangents, expected = given_and_expected(num_real)
    with use(way[-1]):
        y, stats, dx, dlayer = jax.device_get(
            both_ways(
                make_layer(GEGLU, weights, layout_of(*way)),
                put(np.float32(load), LAYOUT.whole),
                put(x, LAYOUT.tokens_bld),
                put(real, LAYOUT.tokens_bl),
                noise_of(len(x)),
                replace(cotangents, y=put(cotangents.y, LAYOUT.tokens_bld)),
            )
        )
    check_stats(stats, expected)
    np.testing.assert_allclose(y, expected.y, **VALUES)
    np.testing.assert_allclose(dx, expected.dx, **GRADIENTS)
    check_gradients(weights_of(dlayer), expected.dweights)
    return stats.cold


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_whichever_experts_are_hot(way):
    """Any, the busiest, or the idlest. Cold experts are gathered where any of a device's are
    asked for: of one token, whose two experts are hot, nowhere.
    """
    assert check(way, np.random.default_rng(0).permutation(8)) == 1
    of_one = given_and_expected(1)[-1].load
    assert check(way, of_one, num_real=1) == 0
    devices = np.reshape(of_one, (4 if way[1] == "folded" else 2, -1))
    assert (devices.sum(axis=1) <= devices.shape[1] // 2).all(), "what is asked for fits"
    asked = (devices > 0).any(axis=1).mean()
    assert check(way, np.negative(of_one), num_real=1) == asked > 0


def test_the_busiest_of_each_device_come_first():
    """Three devices of four experts: of equals the first; no expert leaves its device."""
    layout = replace(LAYOUT, exchange=Exchange())
    load_XE = jnp.array([[0, 5, 5, 9, 1, 2, 3, 4, 0, 0, 0, 0]], jnp.float32)
    with use("expert=3"):
        assert hot.orders(load_XE, layout).tolist() == [[3, 1, 2, 0, 7, 6, 5, 4, 8, 9, 10, 11]]


def test_later_loads_count_more():
    history_XE = hot.counted(jnp.float32([[10, 0]]), jnp.array([[1, 2]]))
    np.testing.assert_allclose(history_XE, [[10, 2]])
    for _ in range(7):
        history_XE = hot.counted(history_XE, jnp.array([[0, 0]]))
    assert 4 < history_XE[0, 0] < 5  # half is forgotten
