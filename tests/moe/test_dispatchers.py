"""Every dispatcher, with both layouts, on every mesh, equals the loop oracle."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import P
from jax.test_util import check_grads
from small_meshes import GRADIENTS, LAYOUT, NAMES, SHAPES, VALUES, put, use
from test_layer import (
    CONFIG,
    both_ways,
    check_gradients,
    check_stats,
    cotangents_like,
    expected_of,
    forward,
    make_layer,
    noise_of,
    random_tokens,
    random_weights,
    weights_of,
)

from switchjax.axes import EXPERT, MODEL
from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.mesh import Exchange, Storage
from switchjax.moe.dispatch import placement, wire
from switchjax.moe.dispatch.interface import Plan, Tokens
from switchjax.moe.grouped import run_starts
from switchjax.moe.layer import DISPATCHERS as LAYER_DISPATCHERS
from switchjax.moe.layer import SwitchLayer
from switchjax.moe.routing import route

ON_MESHES = [
    (dispatcher, mesh)
    for dispatcher in ("all_to_all", "all_gather", "ragged", "local")
    for mesh in NAMES
    if dispatcher != "local" or SHAPES[mesh].expert == 1
]
DROPS, NO_DROPS = 1.5, 8.0
EXPERTS = 8


# Many programs that run for a moment: what LLVM makes of them is not the question.
quick_both_ways = jax.jit(both_ways, compiler_options={"xla_backend_optimization_level": 0})


def layout_of(exchange, zero=0):
    return Layout.of(replace(SHAPES["single"], exchange=exchange, storage=Storage(zero=zero)))


def moved(weights, order_E):
    """Expert weights in another order."""
    gate = None if weights.w_gate is None else weights.w_gate[order_E]
    return replace(weights, w_in=weights.w_in[order_E], w_gate=gate, w_out=weights.w_out[order_E])


def results(exchange, given, placement_E, zero=0):
    """Output, statistics, gradient of x and of the weights, the experts being placed so."""
    config, weights, x, real, cotangents, _ = given
    layout = layout_of(exchange, zero)
    layer = make_layer(config, moved(weights, np.argsort(placement_E)), layout)
    y, stats, dx, dlayer = jax.device_get(
        quick_both_ways(
            layer,
            put(x, LAYOUT.tokens_bld),
            put(real, LAYOUT.tokens_bl),
            noise_of(len(x)),
            replace(cotangents, y=put(cotangents.y, LAYOUT.tokens_bld)),
            placement_E=put(placement_E.astype(np.int32), LAYOUT.whole),
        )
    )
    quick_both_ways.clear_cache()  # of a program that no other test needs, and of its memory maps
    return y, stats, dx, moved(weights_of(dlayer), placement_E)


def check(exchange, given, placement_E, zero=0):
    """The layer, its experts placed so, equals the oracle."""
    y, stats, dx, dweights = results(exchange, given, placement_E, zero)
    expected = given[-1]
    check_stats(stats, expected)
    np.testing.assert_allclose(y, expected.y, **VALUES)
    assert (y[(expected.y == 0).all(axis=-1)] == 0).all()  # dropped and padding: exactly
    np.testing.assert_allclose(dx, expected.dx, **GRADIENTS)
    check_gradients(dweights, expected.dweights)
    return stats


@pytest.mark.parametrize("top_k", [1, pytest.param(2, marks=pytest.mark.mesh)])
@pytest.mark.parametrize("dispatcher, mesh", ON_MESHES)
@pytest.mark.parametrize("experts", ["separate", "folded"])
def test_every_way_equals_the_oracle(dispatcher, experts, mesh, top_k):
    """Values, gradients, drops, loads and losses, with the experts' weights in a random order.

    Top 2 where `data` splits the weights too, if it is split.
    """
    factor = NO_DROPS if dispatcher == "ragged" else DROPS
    activation = "geglu" if top_k == 2 else "relu"
    given = expected_of(factor, top_k, activation, None, 0.3)
    placement_E = np.random.default_rng(len(mesh)).permutation(EXPERTS)
    zero = 3 if top_k == 2 and SHAPES[mesh].data > 1 else 0
    with use(mesh):
        check(Exchange(dispatcher=dispatcher, experts=experts), given, placement_E, zero)


@pytest.mark.parametrize(
    "dispatcher, experts, mesh",
    [
        ("all_to_all", "separate", "data2_expert2_model2"),
        ("all_gather", "folded", "data2_expert4"),
        ("local", "folded", "data4_model2"),
    ],
)
def test_gradients_of_which_a_device_has_a_part(dispatcher, experts, mesh):
    """Of weights that it has whole: zero 2."""
    given = expected_of(DROPS, 1, "relu", None, 0.3)
    with use(mesh):
        exchange = Exchange(dispatcher=dispatcher, experts=experts)
        check(exchange, given, np.arange(EXPERTS), zero=2)


BOUNDED = [("all_gather", 1.7, 0), ("all_gather", 0.25, 1), ("ragged", 1.9, 0), ("ragged", 0.3, 1)]


@pytest.mark.parametrize("experts", ["separate", "folded"])
@pytest.mark.parametrize("mesh", ["expert8", "data2_expert2_model2"])
@pytest.mark.parametrize("dispatcher, buffer, fell_back", BOUNDED)
def test_bounded_buffers(dispatcher, buffer, fell_back, mesh, experts):
    """The same numbers whether the buffer holds what comes or the slower way is taken."""
    factor = NO_DROPS if dispatcher == "ragged" else DROPS
    given = expected_of(factor, 2, "relu", None, 0.3)
    with use(mesh):
        exchange = Exchange(dispatcher=dispatcher, experts=experts, buffer=buffer)
        stats = check(exchange, given, np.arange(EXPERTS))
    assert stats.fell_back == fell_back


@pytest.mark.parametrize("experts, buffer", [("separate", 1.8), ("folded", 3)])
@pytest.mark.parametrize("dispatcher", ["all_gather", "ragged"])
def test_one_group_of_devices_falls_back_and_another_does_not(dispatcher, experts, buffer):
    """Tokens of the first half of the rows are all alike, so their experts get too many."""
    config = replace(CONFIG, capacity_factor=NO_DROPS)
    weights, (x, real) = random_weights(config), random_tokens(padding=0.0)
    x[: len(x) // 2] = x[0, 0]
    cotangents = cotangents_like(x)
    expected = oracle.switch(
        x, real, weights, group_size=16, capacity=16, top_k=1, cotangents=cotangents
    )
    given = (config, weights, x, real, cotangents, expected)
    exchange = Exchange(dispatcher=dispatcher, experts=experts, buffer=buffer)
    with use("data2_expert2_model2"):
        assert check(exchange, given, np.arange(EXPERTS)).fell_back
    calm = (config, weights, x[8:], real[8:], replace(cotangents, y=cotangents.y[8:]), None)
    with use("expert=2,model=2"):
        assert not results(exchange, calm, np.arange(EXPERTS))[1].fell_back


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather", "ragged"])
def test_chunks_change_nothing(dispatcher, chunks):
    """Four groups of a device, some at a time."""
    factor = NO_DROPS if dispatcher == "ragged" else DROPS
    given = expected_of(factor, 1, "geglu", 8, 0.3)
    with use("data2_expert2_model2"):
        check(Exchange(dispatcher=dispatcher, chunks=chunks), given, np.arange(EXPERTS))


# --- The journey alone, with experts whose work is known -----------------------------------------


class Multipliers(NamedTuple):
    """Experts in place of feed-forward layers: expert e returns (1 + e) · x."""

    number_e: jax.Array

    def on_slots(self, tokens):
        return tokens.x * (1 + self.number_e[:, None, None])

    def on_runs(self, tokens, sizes_e, block):
        starts_e = run_starts(sizes_e, block)
        expert_N = jnp.searchsorted(starts_e, jnp.arange(len(tokens.x)), side="right") - 1
        return tokens.x * (1 + self.number_e[expert_N])[:, None]


@partial(jax.jit, static_argnames=("exchange", "top_k", "capacity"))
def journey(x_BLD, logits_BLE, real_BL, *, exchange, top_k, capacity):
    """For each token the sum of its experts' multiples, and the routing."""

    def local(x_bLD, logits_bLE, real_bL):
        routed = route(logits_bLE, real_bL, top_k=top_k, capacity=capacity)
        routed = routed._replace(gate_GTQ=jnp.ones_like(routed.gate_GTQ))
        order_E = jnp.arange(EXPERTS)
        lanes = placement.to_lanes(routed, order_E, exchange.experts)
        plan = Plan(placement.num_lanes(EXPERTS, exchange.experts), capacity, exchange)
        here = Multipliers(placement.experts_here(order_E, exchange.experts))
        x_TD = jax.lax.pcast(x_bLD.reshape(-1, x_bLD.shape[-1]), MODEL, to="varying")
        y_TD, _ = LAYER_DISPATCHERS[exchange.dispatcher](Tokens(x_TD, None), lanes, here, plan)
        if exchange.experts == "separate":  # every device of the model axis did the whole work
            y_TD /= jax.lax.axis_size(MODEL)
        return jax.lax.psum(y_TD, MODEL).reshape(x_bLD.shape), routed

    return jax.shard_map(
        local,
        in_specs=(LAYOUT.tokens_bld, LAYOUT.tokens_bld, LAYOUT.tokens_bl),
        out_specs=(LAYOUT.tokens_bld, LAYOUT.rows(3)),
    )(x_BLD, logits_BLE, real_BL)


def travellers(dtype=np.float32):
    """Whole numbers, so that sums are exact; logits with a favourite; a mask."""
    rng = np.random.default_rng(0)
    x_BLD = rng.integers(-8, 9, (8, 6, 3)).astype(dtype)
    logits_BLE = rng.standard_normal((8, 6, EXPERTS)).astype(np.float32)
    logits_BLE[..., 2] += 1.5  # so that some tokens are dropped
    return x_BLD, logits_BLE, rng.random((8, 6)) > 0.3


def placed_travellers(dtype=np.float32):
    specs = (LAYOUT.tokens_bld, LAYOUT.tokens_bld, LAYOUT.tokens_bl)
    return [put(x, spec) for x, spec in zip(travellers(dtype), specs, strict=True)]


JOURNEYS = [  # with a buffer that holds what comes, and with one that does not
    Exchange(dispatcher="all_to_all"),
    Exchange(dispatcher="all_gather", experts="folded"),
    Exchange(dispatcher="all_gather", buffer=2),
    Exchange(dispatcher="ragged", experts="folded", buffer=8),
    Exchange(dispatcher="ragged", buffer=0.2),
]


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["expert8", "data2_expert2_model2"])
@pytest.mark.parametrize("exchange", JOURNEYS, ids=str)
def test_there_and_back_bit_by_bit(exchange, mesh):
    """Each token comes back from exactly the experts that kept it; and so do gradients."""
    x_BLD, _, real_BL = travellers()
    capacity = 6 if exchange.dispatcher == "ragged" else 1
    with use(mesh):
        x, logits, real = placed_travellers()

        def of_x(x):
            return journey(x, logits, real, exchange=exchange, top_k=2, capacity=capacity)

        y_BLD, vjp, routed = jax.vjp(of_x, x, has_aux=True)
        y_BLD, dx_BLD, routed = jax.device_get((y_BLD, vjp(x)[0], routed))
    kept_BLQ = routed.kept_GTQ
    assert kept_BLQ.any() and (capacity == 6 or (~kept_BLQ & real_BL[..., None]).any())
    factor_BL = np.where(kept_BLQ, 1 + routed.expert_GTQ, 0).sum(axis=-1)
    np.testing.assert_array_equal(y_BLD, x_BLD * factor_BL[..., None])
    np.testing.assert_array_equal(dx_BLD, y_BLD)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["expert=4", "data=2,expert=2", "expert=2,model=2"])
@pytest.mark.parametrize("exchange", JOURNEYS, ids=str)
def test_gradients_of_the_journey_in_float64(exchange, mesh):
    """Not linear in x, so that second derivatives are not zero either."""
    # case 61: with folded experts, also over two axes. case 39: ragged, backward, on CPU.
    with jax.enable_x64(True), use(mesh):
        x_BLD, logits_BLE, real_BL = placed_travellers(np.float64)

        def wave(x_BLD):
            x_BLD = jax.reshard(x_BLD, LAYOUT.tokens_bld)  # finite differences come without
            y_BLD, _ = journey(x_BLD, logits_BLE, real_BL, exchange=exchange, top_k=2, capacity=6)
            return jnp.cos(y_BLD / 128).sum()

        check_grads(wave, (x_BLD,), order=2, modes=["rev"], atol=1e-6, rtol=1e-6)


# --- Noise ------------------------------------------------------------------------------------


def with_dropout(mesh, exchange):
    """Output where half of the hidden activations are dropped, which depends on every key."""
    config = replace(CONFIG, expert_dropout=0.5, capacity_factor=NO_DROPS)
    layout = layout_of(exchange)
    x, real = random_tokens()
    placement_E = np.random.default_rng(1).permutation(EXPERTS).astype(np.int32)
    weights = moved(random_weights(config), np.argsort(placement_E))
    with use(mesh):
        y, _ = jax.jit(SwitchLayer.__call__)(
            make_layer(config, weights, layout),
            put(x, layout.tokens_bld),
            put(real, layout.tokens_bl),
            noise_of(len(x)),
            placement_E=put(placement_E, layout.whole),
        )
        return jax.device_get(y)


@pytest.mark.parametrize("experts", ["separate", "folded"])
@pytest.mark.parametrize(
    "dispatcher, buffer", [("all_to_all", None), ("all_gather", 0.2), ("ragged", None)]
)
def test_dropout_goes_with_the_token_and_the_expert(dispatcher, buffer, experts):
    """Not with the buffer, the device or the physical place of the expert."""
    expected = with_dropout("single", Exchange(dispatcher="local"))
    exchange = Exchange(dispatcher=dispatcher, experts=experts, buffer=buffer)
    y = with_dropout("data2_expert2_model2", exchange)
    np.testing.assert_allclose(y, expected, **VALUES)


# --- The wire ---------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("kind", "wire"))
def travel(x, kind, wire):
    """One move of `x` [X · X, rows, D] over the expert axis, and a gradient going back."""

    def local(x):
        return kind(x, wire)

    move = jax.shard_map(local, in_specs=P(EXPERT), out_specs=P(EXPERT))
    y, vjp = jax.vjp(move, x)
    feature_D = jnp.cos(jnp.arange(x.shape[-1], dtype=x.dtype))
    return y, vjp(jnp.ones_like(y) * feature_D.reshape((1,) * (y.ndim - 1) + (-1,)))[0]


@pytest.mark.parametrize("kind", [wire.swap, wire.gather, wire.scatter_sum])
@pytest.mark.parametrize(
    "name, error, error_back", [("bfloat16", 2**-8, 2**-8), ("float8", 2**-4, 2**-3)]
)
def test_a_narrow_wire_rounds_each_row_once(kind, name, error, error_back):
    """By a share of the row's own largest value, whatever other rows hold."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 3, 8)).astype(np.float32)
    if kind is not wire.scatter_sum:
        x *= (10.0 ** rng.integers(-20, 20, (16, 3, 1))).astype(np.float32)
    x[:, 1], x[:, 2] = 0, 1e-44  # their scales must not be 0
    with use("expert=4"):
        narrow, exact = (travel(put(x, P(EXPERT)), kind, n) for n in (name, "compute"))
        (y, dx), (exact_y, exact_dx) = jax.device_get((narrow, exact))
    largest = np.abs(exact_y).max(axis=-1, keepdims=True)
    added = 4 if kind is wire.scatter_sum else 1
    assert (np.abs(y - exact_y) <= added * error * largest + 1e-38).all() and (y != exact_y).any()
    added = 4 if kind is wire.gather else 1
    assert np.abs(dx - exact_dx).max() <= added * error_back and (dx != exact_dx).any()


def test_a_broken_row_stays_broken_on_the_wire():
    """Infinity and NaN come out as NaN, for the step to notice."""
    x = np.ones((4, 2, 4), np.float32)
    x[1, 0, 2], x[2, 1, 1] = np.inf, np.nan
    with use("expert=2"):
        y = jax.device_get(travel(put(x, P(EXPERT)), wire.swap, "float8")[0])
    assert np.isnan(y).any(axis=-1).sum() == 2


@pytest.mark.parametrize("name, error", [("bfloat16", 0.01), ("float8", 0.1)])
@pytest.mark.parametrize("experts", ["separate", "folded"])
@pytest.mark.parametrize(
    "dispatcher, buffer",
    [("all_to_all", None), ("all_gather", None), ("all_gather", 1.5), ("ragged", None),
     ("ragged", 0.3)],
)  # fmt: skip
def test_a_narrow_wire_suits_every_dispatcher(dispatcher, buffer, experts, name, error):
    """Close to the oracle, and not equal; drops, loads and losses are exact."""
    given = expected_of(NO_DROPS, 2, "geglu", None, 0.3)
    config, weights, x, real, cotangents, expected = given
    exchange = Exchange(dispatcher=dispatcher, experts=experts, buffer=buffer, wire=name)
    with use("data2_expert2_model2"):
        y, stats, dx, dweights = results(exchange, given, np.arange(EXPERTS))
    check_stats(stats, expected)
    for ours, exact in (
        (y, expected.y),
        (dx, expected.dx),
        (dweights.w_in, expected.dweights.w_in),
    ):
        distance = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        assert 1e-5 < distance < error


# --- Sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["single", "expert=2"])
@pytest.mark.parametrize("length, width", [(32, 64), (37, 64), (2048, 512)])
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather", "ragged"])
def test_large_and_odd_sizes(dispatcher, length, width, mesh):  # case 73
    """Against every expert computing every token, with skewed choices."""
    config = ModelConfig(
        d_model=width, d_ff=48, num_experts=6, jitter=0.0, capacity_factor=6.0, group_size=length
    )
    weights = random_weights(config)
    weights.router[:, 5] = 0  # asked by few
    x, real = random_tokens(rows=2, length=length, width=width, padding=0.1)
    logits = x.astype(np.float64) @ weights.router
    best = np.sort(logits, axis=-1)
    real &= best[..., -1] - best[..., -2] > 1e-3  # float32 could choose others
    layout = layout_of(Exchange(dispatcher=dispatcher))
    with use(mesh):
        y, stats = jax.device_get(
            forward(
                make_layer(config, weights, layout),
                put(x, layout.tokens_bld),
                put(real, layout.tokens_bl),
                noise_of(2),
            )
        )
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    gate = probs.max(-1) / probs.sum(-1)
    assert stats.load_E.sum() == real.sum() and stats.dropped == 0
    for expert in range(6):
        chose = real & (logits.argmax(-1) == expert)
        h = np.maximum(x[chose] @ weights.w_in[expert].astype(np.float64), 0)
        expected = gate[chose][:, None] * (h @ weights.w_out[expert])
        np.testing.assert_allclose(y[chose], expected, rtol=1e-4, atol=1e-5)
    assert (y[~real] == 0).all()


@pytest.mark.parametrize("dispatcher", ["all_to_all", "local"])
def test_buffers_do_not_grow_with_the_experts(dispatcher):  # case 42
    """Forward and backward: with 16 times the experts, a tenth more at most beside the weights."""
    layout = layout_of(Exchange(dispatcher=dispatcher))

    def temporary_bytes(num_experts):
        config = replace(CONFIG, d_model=256, d_ff=1024, num_experts=num_experts)
        x, real = random_tokens(rows=4, length=512, width=256)

        def loss(layer, x_BLD, real_BL, noise):
            return layer(x_BLD, real_BL, noise)[0].sum()

        with use("single"):
            layer = make_layer(config, random_weights(config), layout)
            given = put(x, layout.tokens_bld), put(real, layout.tokens_bl), noise_of(4)
            program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(layer, *given).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(128) <= 1.1 * temporary_bytes(8)
