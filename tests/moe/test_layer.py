"""The Switch layer equals the loop oracle: values, all gradients and statistics, on every mesh."""

import itertools
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jaxprs import equations
from small_meshes import GRADIENTS, LAYOUT, NAMES, SHAPES, VALUES, copies, put, use

from switchjax import zero
from switchjax.config import ModelConfig, OptimConfig
from switchjax.metrics import router_record
from switchjax.moe.layer import SwitchLayer
from switchjax.moe.routing import capacity
from switchjax.nn.mlp import Mlp
from switchjax.nn.noise import Noise
from switchjax.optim import make_optimizer

ROWS, LENGTH = 16, 16
CONFIG = ModelConfig(d_model=8, d_ff=16, num_experts=8, jitter=0.0)
AUX, Z = 0.7, 0.3  # coefficients of the objective whose gradients are compared


# --- Layers with given weights, and one call of them -----------------------------------------


def random_weights(config, *, seed=0):
    """Weights that make a lively router: some experts are asked by many, some by few."""
    rng = np.random.default_rng(seed)
    D, F, E = config.d_model, config.d_ff, config.num_experts

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    return oracle.Weights(
        router=normal(D, E, scale=0.7),
        w_in=normal(E, D, F, scale=D**-0.5),
        w_gate=normal(E, D, F, scale=D**-0.5) if config.activation == "geglu" else None,
        w_out=normal(E, F, D, scale=F**-0.5),
    )


def random_tokens(*, rows=ROWS, length=LENGTH, width=8, padding=0.3, seed=1):
    """Tokens with a mean that is not zero, so that their choices are skewed, and a mask."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, length, width)) + 0.3).astype(np.float32)
    return x, rng.random((rows, length)) >= padding


def make_layer(config, weights, layout=LAYOUT):
    """The layer on the mesh in use."""
    layer = jax.eval_shape(
        lambda: SwitchLayer(jax.random.key(0), config, layout, router_kind=config.encoder_router)
    )

    def held(weight, held):
        return nnx.Param(put(weight, held.spec), width=held.width)

    layer.router_DE = held(weights.router, layout.router_de)
    layer.experts.w_in_EDF = held(weights.w_in, layout.w_in_edf)
    layer.experts.w_out_EFD = held(weights.w_out, layout.w_out_efd)
    if weights.w_gate is not None:
        layer.experts.w_gate_EDF = held(weights.w_gate, layout.w_in_edf)
    return layer


def noise_of(rows, *, seed=0, start=0):
    """What makes a call a training step, on the mesh in use."""
    row_B = np.arange(start, start + rows, dtype=np.int32)
    return Noise(put(jax.random.key(seed), LAYOUT.whole), put(row_B, LAYOUT.rows_b))


@jax.jit
def forward(layer, x_BLD, real_BL, noise, bias_E=None):
    return layer(x_BLD, real_BL, noise, bias_E)


def both_ways(layer, x_BLD, real_BL, noise, cotangents, bias_E=None, placement_E=None):
    """The layer's results, and the gradients of the objective that the oracle has too."""

    def objective(variables, x_BLD):
        given = zero.with_variables(layer, variables, layer.layout)
        y_BLD, stats = given(x_BLD, real_BL, noise, bias_E, placement_E=placement_E)
        total = jnp.sum(y_BLD * cotangents.y)
        total += cotangents.aux_coefficient * stats.balance + cotangents.z_coefficient * stats.z
        return total, (y_BLD, stats)

    gradient = jax.grad(objective, argnums=(0, 1), has_aux=True)
    variables = zero.variables(layer, layer.layout)
    (dlayer, dx_BLD), (y_BLD, stats) = gradient(variables, x_BLD)
    return y_BLD, stats, dx_BLD, dlayer


backward = jax.jit(both_ways)


def weights_of(dlayer):
    """The gradients of a layer's weights."""
    gate = dlayer.experts.w_gate_EDF
    return oracle.Weights(
        router=dlayer.router_DE.get_value(),
        w_in=dlayer.experts.w_in_EDF.get_value(),
        w_gate=None if gate is None else gate.get_value(),
        w_out=dlayer.experts.w_out_EFD.get_value(),
    )


jax.tree_util.register_dataclass(oracle.Cotangents, ["y", "aux_coefficient", "z_coefficient"], [])


def call(config, weights, x, real, *, training=True, seed=0, bias=None):
    """Output and statistics of one call on the mesh in use, as numpy arrays."""
    noise = noise_of(len(x), seed=seed) if training else None
    return jax.device_get(
        forward(
            make_layer(config, weights),
            put(x, LAYOUT.tokens_bld),
            put(real, LAYOUT.tokens_bl),
            noise,
            None if bias is None else put(bias, LAYOUT.whole),
        )
    )


def call_with_gradients(config, weights, x, real, cotangents, *, training=True, bias=None):
    """Output, statistics, gradient of x and gradients of the weights, as numpy arrays."""
    y, stats, dx, dlayer = jax.device_get(
        backward(
            make_layer(config, weights),
            put(x, LAYOUT.tokens_bld),
            put(real, LAYOUT.tokens_bl),
            noise_of(len(x)) if training else None,
            replace(cotangents, y=put(cotangents.y, LAYOUT.tokens_bld)),
            None if bias is None else put(bias, LAYOUT.whole),
        )
    )
    return y, stats, dx, weights_of(dlayer)


def cotangents_like(x, *, aux=AUX, z=Z):
    """Random, and so small that gradients are about 1, where the tolerance has its meaning."""
    dy = np.random.default_rng(2).standard_normal(x.shape) / np.sqrt(x.shape[0] * x.shape[1])
    return oracle.Cotangents(dy.astype(np.float32), aux, z)


def check_gradients(actual, expected):
    np.testing.assert_allclose(actual.router, expected.router, **GRADIENTS)
    np.testing.assert_allclose(actual.w_in, expected.w_in, **GRADIENTS)
    np.testing.assert_allclose(actual.w_out, expected.w_out, **GRADIENTS)
    assert (actual.w_gate is None) == (expected.w_gate is None)
    if actual.w_gate is not None:
        np.testing.assert_allclose(actual.w_gate, expected.w_gate, **GRADIENTS)


def check_stats(stats, expected):
    assert (stats.load_E.dtype, stats.dropped.dtype) == (np.int32, np.int32)
    assert (stats.load_E.tolist(), int(stats.dropped)) == (expected.load, expected.dropped)
    np.testing.assert_allclose(stats.balance, expected.aux, **VALUES)
    np.testing.assert_allclose(stats.z, expected.z, **VALUES)


# --- Layer = oracle ---------------------------------------------------------------------------

FACTORS = (0.001, 1.5, 8.0)  # one slot an expert; some drops; a slot for every token
GROUPS = (None, 8, 32)  # a row of 16, half a row, two rows
MEANING = ("mesh", "factor", "top_k", "activation", "group", "padding")


def choose(mesh, factor):
    """One of the combinations, of which there are enough that every pair of options meets."""
    i, j = NAMES.index(mesh), FACTORS.index(factor)
    return (
        mesh,
        factor,
        (1, 2)[(i // 2 + j) % 2],
        ("relu", "geglu")[(i + j) % 2],
        GROUPS[(i + j) % 3],
        (0.3, 0.0)[(i // 4 + j) % 2],
    )


COMBINATIONS = [choose(mesh, factor) for mesh in NAMES for factor in FACTORS]


def test_every_pair_of_options_is_tried():
    for one, other in itertools.combinations(zip(*COMBINATIONS, strict=True), 2):
        assert set(zip(one, other, strict=True)) == set(itertools.product(set(one), set(other)))


@cache
def expected_of(factor, top_k, activation, group, padding):
    """The config, what goes in, and what the oracle says of it."""
    config = replace(
        CONFIG,
        activation=activation,
        top_k=top_k,
        capacity_factor=factor,
        group_size=group,
    )
    weights = random_weights(config)
    x, real = random_tokens(padding=padding)
    cotangents = cotangents_like(x)
    group_size = group or LENGTH
    expected = oracle.switch(
        x,
        real,
        weights,
        group_size=group_size,
        capacity=capacity(group_size, config.num_experts, top_k, factor),
        top_k=top_k,
        cotangents=cotangents,
    )
    assert expected.margin > 1e-5, "float32 could choose other experts"
    return config, weights, x, real, cotangents, expected


@pytest.mark.mesh
@pytest.mark.parametrize(MEANING, COMBINATIONS)
def test_layer_equals_oracle(mesh, factor, top_k, activation, group, padding):
    config, weights, x, real, cotangents, expected = expected_of(
        factor, top_k, activation, group, padding
    )
    assert (expected.dropped > 0) == (factor < 8)
    with use(mesh):
        y, stats, dx, dweights = call_with_gradients(config, weights, x, real, cotangents)
    check_stats(stats, expected)
    np.testing.assert_allclose(y, expected.y, **VALUES)
    assert (y[(expected.y == 0).all(axis=-1)] == 0).all()  # dropped and padding: exactly
    np.testing.assert_allclose(dx, expected.dx, **GRADIENTS)
    check_gradients(dweights, expected.dweights)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["single", "data2_expert2_model2"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_evaluation_drops_nothing(mesh, top_k):
    """Whatever the training's capacity; and so it equals training with a slot for everyone."""
    config, weights, x, real, cotangents, expected = expected_of(8.0, top_k, "relu", None, 0.3)
    config = replace(config, capacity_factor=0.001)
    with use(mesh):
        y, stats, dx, dweights = call_with_gradients(
            config, weights, x, real, cotangents, training=False
        )
    assert stats.dropped == 0
    check_stats(stats, expected)
    np.testing.assert_allclose(y, expected.y, **VALUES)
    np.testing.assert_allclose(dx, expected.dx, **GRADIENTS)
    check_gradients(dweights, expected.dweights)


def test_evaluation_with_a_capacity_of_its_own():
    *_, weights, x, real, _, expected = expected_of(1.5, 1, "relu", None, 0.3)
    config = replace(CONFIG, capacity_factor=8.0, eval_capacity_factor=1.5)
    with use("single"):
        y, stats = call(config, weights, x, real, training=False)
    check_stats(stats, expected)
    np.testing.assert_allclose(y, expected.y, **VALUES)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["single", "data2_expert2_model2"])
def test_padding_that_is_routed(mesh):
    """Outputs are those of a layer without padding; what is counted is real tokens. A number of
    slots holds in training and at evaluation."""
    weights, (x, real) = random_weights(CONFIG), random_tokens()
    config = replace(CONFIG, expert_capacity=2)
    routed = replace(config, padding_is_routed=True)
    everywhere = np.ones_like(real)
    with use(mesh):
        y, stats = call(routed, weights, x, real)
        again, same = call(routed, weights, x, real, training=False)
        whole, whole_stats = call(config, weights, x, everywhere)
        plain, plain_stats = call(config, weights, x, real)
    np.testing.assert_array_equal(y, whole)
    np.testing.assert_array_equal(again, y)
    jax.tree.map(np.testing.assert_array_equal, same, stats)
    np.testing.assert_allclose(stats.balance, plain_stats.balance, rtol=1e-6)
    np.testing.assert_allclose(stats.z, plain_stats.z, rtol=1e-6)
    np.testing.assert_array_equal(stats.load_E, plain_stats.load_E)
    kept = (y != 0).any(axis=-1)
    assert kept.sum() == whole_stats.asked - whole_stats.dropped
    assert stats.asked - stats.dropped == (kept & real).sum()
    assert stats.dropped > plain_stats.dropped > 0  # padding has taken slots
    assert (plain[~real] == 0).all() and kept[~real].any()


# --- Other kinds of routing -------------------------------------------------------------------

MIXED = "data2_expert2_model2"
BIAS = np.array([0.1, -0.1, 0.05, 0, 0, 0.2, -0.3, 0], np.float32)
KINDS = {
    "top 3": replace(CONFIG, top_k=3, capacity_factor=0.9),
    "random second, bias": replace(CONFIG, top_k=2, random_second=True),
    "expert choice": replace(CONFIG, encoder_router="expert_choice", capacity_factor=1.5),
}


def sparse_tokens():
    """The tokens of all tests, but a row of two and an empty one, where slots stay empty."""
    x, real = random_tokens()
    real[0], real[1] = np.arange(LENGTH) < 2, False
    return x, real


@cache
def expected_of_kind(kind, factor=None):
    """What goes in, and what the oracle says of it."""
    config, weights, (x, real) = KINDS[kind], random_weights(CONFIG), sparse_tokens()
    cotangents = cotangents_like(x)
    factor = factor or config.capacity_factor
    num_slots = capacity(LENGTH, config.num_experts, config.top_k, factor)
    given = {"group_size": LENGTH, "capacity": num_slots, "cotangents": cotangents}
    bias = BIAS if "bias" in kind else None
    if kind == "expert choice":
        expected = oracle.expert_choice(x, real, weights, **given)
    else:
        with use("single"):
            uniform_BL = np.asarray(noise_of(ROWS).at(2).uniform((LENGTH,)))
        second = uniform_BL if config.random_second else None
        given |= {"top_k": config.top_k, "bias": bias, "second": second}
        expected = oracle.switch(x, real, weights, **given)
    assert expected.margin > 1e-5, "float32 could choose otherwise"
    assert expected.dropped > 0
    return config, weights, x, real, cotangents, bias, expected


@pytest.mark.mesh
@pytest.mark.parametrize(
    "mesh, kind",
    [
        *((n, "expert choice") for n in NAMES),
        *itertools.product(("single", MIXED), list(KINDS)[:2]),
    ],
)
def test_kinds_of_routing_equal_the_oracle(mesh, kind):
    config, weights, x, real, cotangents, bias, expected = expected_of_kind(kind)
    with use(mesh):
        y, stats, dx, dweights = call_with_gradients(
            config, weights, x, real, cotangents, bias=bias
        )
    check_stats(stats, expected)
    assert stats.asked == (real.sum() if kind == "expert choice" else sum(expected.load))
    np.testing.assert_allclose(y, expected.y, **VALUES)
    assert (y[(expected.y == 0).all(axis=-1)] == 0).all()
    np.testing.assert_allclose(dx, expected.dx, **GRADIENTS)
    check_gradients(dweights, expected.dweights)


def test_the_other_kinds_are_other_functions():
    """A bias moves choices, a second choice is left out now and then, at evaluation never."""
    config, weights, x, real, *_, expected = expected_of_kind("random second, bias")
    assert 1.2 * real.sum() < sum(expected.load) < 1.8 * real.sum()
    _, stats = single(config, weights, x, real, training=False)
    assert (stats.load_E.sum(), stats.dropped) == (2 * real.sum(), 0)
    _, biased = single(config, weights, x, real, training=False, bias=BIAS)
    assert biased.load_E.tolist() != stats.load_E.tolist()


@pytest.mark.parametrize("factor", [None, 1.0])
def test_expert_choice_has_its_capacity_at_evaluation_too(factor):
    *_, expected = expected_of_kind("expert choice", factor)
    config, weights, x, real, *_ = expected_of_kind("expert choice")
    config = replace(config, eval_capacity_factor=factor)
    y, stats = single(config, weights, x, real, training=False)
    check_stats(stats, expected)
    np.testing.assert_allclose(y, expected.y, **VALUES)


def test_expert_choice_has_an_equal_load_and_a_balance_loss_without_gradient():
    """Rows of 16, 2 and no real tokens, of which each expert takes three, two and none."""
    config, weights, x, real, cotangents, _, _ = expected_of_kind("expert choice")
    real = np.concatenate([real[:2], np.ones_like(real[:1])])
    still = replace(cotangents, y=np.zeros_like(x), aux_coefficient=1.0, z_coefficient=0.0)
    with use("single"):
        _, stats, _, dweights = call_with_gradients(
            config, weights, x[:3], real, replace(still, y=still.y[:3])
        )
    assert stats.load_E.tolist() == [3 + 2] * 8
    np.testing.assert_allclose(stats.balance, 1.0, **VALUES)
    np.testing.assert_allclose(dweights.router, 0, atol=1e-6)


def test_expert_choice_makes_no_array_of_all_pairs_of_token_and_expert():
    """Of T · E numbers there are some, of T · E · D none, forward or backward."""  # case 42
    config = replace(
        KINDS["expert choice"], d_model=32, d_ff=32, num_experts=16, capacity_factor=1.0
    )
    x, real = random_tokens(rows=4, length=128, width=32)
    pairs = x[..., 0].size * config.num_experts * config.d_model
    with use("single"):
        given = (
            make_layer(config, random_weights(config)),
            put(x, LAYOUT.tokens_bld),
            put(real, LAYOUT.tokens_bl),
            noise_of(4),
            replace(cotangents_like(x), y=put(cotangents_like(x).y, LAYOUT.tokens_bld)),
        )
        sizes = [
            out.aval.size
            for equation in equations(jax.make_jaxpr(backward)(*given).jaxpr)
            for out in equation.outvars
        ]
        compiled = backward.lower(*given).compile()
    assert pairs // config.d_model in sizes  # the search finds the logits
    assert max(sizes) < pairs / 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * pairs


# --- The same numbers on every mesh -----------------------------------------------------------


def single(config, weights, x, real, **changed):
    with use("single"):
        return call(config, weights, x, real, **changed)


@cache
def reference_with_noise(jitter, expert_dropout):
    config = replace(CONFIG, jitter=jitter, expert_dropout=expert_dropout)
    given = (config, random_weights(config), *random_tokens())
    return given, single(*given)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", NAMES)
def test_noise_is_the_same_on_every_mesh(mesh):
    """Jitter large enough to move tokens to other experts, and dropout inside the experts."""
    given, (y, stats) = reference_with_noise(0.3, 0.5)
    with use(mesh):
        mesh_y, mesh_stats = call(*given)
    assert mesh_stats.load_E.tolist() == stats.load_E.tolist()
    assert mesh_stats.dropped == stats.dropped > 0
    np.testing.assert_allclose(mesh_y, y, **VALUES)
    np.testing.assert_allclose(mesh_stats.balance, stats.balance, **VALUES)
    np.testing.assert_allclose(mesh_stats.z, stats.z, **VALUES)


SGD = make_optimizer(
    OptimConfig(optimizer="sgd", learning_rate=0.05, warmup_steps=1, clip_norm=None)
)
NUM_STEPS = 3


@jax.jit
def sgd_steps(layers, x_BLD, real_BL, noise, target_BLD):
    """A dense layer and a Switch layer after some steps of plain SGD."""

    def loss(layers):
        mlp, switch = layers
        x1_BLD = x_BLD + mlp(x_BLD, None)
        y_BLD, stats = switch(x1_BLD, real_BL, noise)
        error_BLD = jnp.where(real_BL[..., None], x1_BLD + y_BLD - target_BLD, 0)
        return jnp.square(error_BLD).mean() + 1e-2 * stats.balance + 1e-3 * stats.z

    def step(carry, _):
        layers, opt_state = carry
        updates, opt_state = SGD.update(jax.grad(loss)(layers), opt_state, layers)
        return (jax.tree.map(jnp.add, layers, updates), opt_state), None

    return jax.lax.scan(step, (layers, SGD.init(layers)), length=NUM_STEPS)[0][0]


def train_layers(mesh):
    """The weights by name before and after; and after, what each device holds of them."""
    config = replace(CONFIG, activation="geglu")
    rng = np.random.default_rng(5)
    x, real = random_tokens(rows=8, length=8)
    with use(mesh):
        mlp = jax.tree.map(
            lambda s: put(rng.standard_normal(s.shape).astype(np.float32) * 0.3, s.sharding.spec),
            jax.eval_shape(lambda: Mlp(jax.random.key(0), config, LAYOUT)),
        )
        before = (mlp, make_layer(config, random_weights(config)))
        after = sgd_steps(
            before,
            put(x, LAYOUT.tokens_bld),
            put(real, LAYOUT.tokens_bl),
            noise_of(8),
            put(rng.standard_normal(x.shape).astype(np.float32), LAYOUT.tokens_bld),
        )

    def by_name(tree):
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

    delta = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after, before)
    return by_name(delta), {name: copies(leaf) for name, leaf in by_name(after).items()}


@cache
def reference_of_sgd():
    return train_layers("single")[0]


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", NAMES)
def test_sgd_moves_dense_and_expert_weights_alike_on_every_mesh(mesh):
    """Adam would hide gradients that are off by a factor; plain SGD does not."""  # case 2
    expected = reference_of_sgd()
    delta, parts = train_layers(mesh)
    assert len(delta) == len(expected) == 7
    for name in expected:
        assert np.abs(expected[name]).max() > 1e-3
        ratio = np.linalg.norm(delta[name]) / np.linalg.norm(expected[name])
        np.testing.assert_allclose(ratio, 1.0, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(delta[name], expected[name], **GRADIENTS, err_msg=name)
    # Copies that devices hold of one part have not drifted apart by a single bit.  # case 18
    shape = SHAPES[mesh]
    router = parts["[1].router_DE.value"]
    assert [len(same) for same in router.values()] == [shape.num_devices]
    for name, part in parts.items():
        for same in part.values():
            assert all(np.array_equal(same[0], other) for other in same[1:]), name


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", [name for name in NAMES if SHAPES[name].expert <= 4])
def test_collapse_is_reported(mesh):
    """A router of zeros: ties send all 8 tokens of a row to expert 0, which has two slots.

    The balance loss is 1, as if all were well; the metrics tell.
    """  # case 33, case 62: ties go to the lowest index on every mesh
    config = replace(CONFIG, num_experts=4, capacity_factor=1.0)
    weights = random_weights(config)
    weights = replace(weights, router=np.zeros_like(weights.router))
    x, real = random_tokens(rows=8, length=8, padding=0.0)
    with use(mesh):
        y, stats = call(config, weights, x, real)
    np.testing.assert_allclose(stats.balance, 1.0, **VALUES)
    assert stats.load_E.tolist() == [64, 0, 0, 0]
    record = router_record(jax.tree.map(lambda a: a[None], stats))
    assert record == {"load_max": 1.0, "load_min": 0.0, "drop_fraction": 0.75, "dead_experts": 3}
    assert (np.abs(y).sum(axis=-1) > 0).tolist() == [[True] * 2 + [False] * 6] * 8


# --- Gradients of the losses ------------------------------------------------------------------


def router_gradient(aux, *, task=1.0):
    x, real = random_tokens(rows=8)
    cotangents = cotangents_like(x, aux=aux, z=0.0)
    cotangents = replace(cotangents, y=np.float32(task) * cotangents.y)
    return call_with_gradients(CONFIG, random_weights(CONFIG), x, real, cotangents)[3].router


@pytest.mark.parametrize("mesh", ["single", "data2_expert2_model2"])
def test_the_balance_loss_acts_in_proportion_to_its_coefficient(mesh):  # case 26
    with use(mesh):
        none, weak, strong = (router_gradient(aux) for aux in (0.0, 0.01, 1.0))
    assert np.abs(strong - none).max() > 1e-2
    np.testing.assert_allclose((weak - none) * 100, strong - none, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mesh", ["single", "data2_expert2_model2"])
def test_the_router_learns_from_the_task_alone(mesh):  # case 29
    with use(mesh):
        assert np.abs(router_gradient(0.0)).max() > 1e-2
        assert (router_gradient(0.0, task=0.0) == 0).all()


# --- Hand tables ------------------------------------------------------------------------------


def telltale(num_experts, router, *, d_model=None, dtype="float32", **changed):
    """A layer whose output says who did the work: expert e puts its gate into feature e.

    A token's last feature must be 1.
    """
    D = d_model or len(router)
    config = ModelConfig(
        d_model=D, d_ff=1, num_experts=num_experts, jitter=0.0, dtype=dtype, **changed
    )
    w_in = np.zeros((num_experts, D, 1), np.float32)
    w_in[:, -1] = 1
    w_out = np.zeros((num_experts, 1, D), np.float32)
    w_out[range(num_experts), 0, range(num_experts)] = 1
    return config, oracle.Weights(np.asarray(router, np.float32), w_in, None, w_out)


def test_dropped_tokens_are_zero():
    """x = 1 … 5, an expert that multiplies by ten, gates of 0.7310586, two slots."""  # case 11
    x = np.array([[[v, 1.0] for v in (1, 2, 3, 4, 5)]], np.float32)
    config = ModelConfig(d_model=2, d_ff=1, num_experts=2, jitter=0.0, capacity_factor=0.8)
    weights = oracle.Weights(
        router=np.array([[0, 0], [1, 0]], np.float32),
        w_in=np.array([[[1], [0]]] * 2, np.float32),
        w_gate=None,
        w_out=np.array([[[10, 0]]] * 2, np.float32),
    )
    real = np.ones((1, 5), bool)
    ones = oracle.Cotangents(np.ones_like(x), 0.0, 0.0)
    with use("single"):
        y, stats, dx, dweights = call_with_gradients(config, weights, x, real, ones)
    np.testing.assert_allclose(y[0, :, 0], [7.3105858, 14.6211716, 0, 0, 0], rtol=1e-6)
    assert (y[0, 2:] == 0).all() and (dx[0, 2:] == 0).all()
    assert stats.dropped == 3
    np.testing.assert_allclose(dweights.router[1], [5.898357, -5.898357], rtol=1e-6)


def test_padded_row_keeps_its_real_tokens():
    """Four of padding, which are not zeros, then four real tokens, of which one is.

    All would go to expert 0, which has four slots.
    """  # case 5
    config = replace(CONFIG, num_experts=2, capacity_factor=1.0)
    weights = random_weights(config)
    weights = replace(weights, router=np.zeros_like(weights.router))
    real = np.array([[False] * 4 + [True] * 4])
    x, _ = random_tokens(rows=1, length=8)
    x[0, 5] = 0
    cotangents = cotangents_like(x)
    with use("single"):
        y, stats, dx, dweights = call_with_gradients(config, weights, x, real, cotangents)
        alone = call_with_gradients(
            replace(config, capacity_factor=2.0),
            weights,
            x[:, 4:],
            real[:, 4:],
            replace(cotangents, y=cotangents.y[:, 4:]),
        )
    assert (stats.dropped, stats.load_E.tolist()) == (0, [4, 0])
    assert (y[:, :4] == 0).all() and (dx[:, :4] == 0).all()
    np.testing.assert_allclose(y[:, 4:], alone[0], **VALUES)
    np.testing.assert_allclose(dx[:, 4:], alone[2], **GRADIENTS)
    check_gradients(dweights, alone[3])


@pytest.mark.parametrize("mesh", [name for name in NAMES if SHAPES[name].expert == 1])
@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_one_expert_is_the_dense_layer(mesh, activation):
    """Its gate is 1 and so is its balance loss."""  # case 31d
    config = replace(CONFIG, num_experts=1, activation=activation)
    weights = random_weights(config)
    x, real = random_tokens(padding=0.0)
    with use(mesh):
        y, stats = call(config, weights, x, real)
        mlp = jax.eval_shape(lambda: Mlp(jax.random.key(0), config, LAYOUT))
        mlp.w_in_DF = nnx.Param(put(weights.w_in[0], LAYOUT.w_in_df.spec))
        mlp.w_out_FD = nnx.Param(put(weights.w_out[0], LAYOUT.w_out_fd.spec))
        if activation == "geglu":
            mlp.w_gate_DF = nnx.Param(put(weights.w_gate[0], LAYOUT.w_in_df.spec))
        dense = jax.device_get(jax.jit(mlp)(put(x, LAYOUT.tokens_bld), None))
    np.testing.assert_allclose(y, dense, **VALUES)
    assert (stats.balance, stats.dropped, stats.load_E.tolist()) == (1.0, 0, [x[..., 0].size])


@pytest.mark.parametrize("length", [4, 1])
def test_experts_without_tokens_have_no_gradient(length):
    """16 experts and 4 tokens, or 1."""  # case 31e, case 31f
    config = replace(CONFIG, num_experts=16)
    weights = random_weights(config)
    x, real = random_tokens(rows=1, length=length, padding=0.0)
    with use("single"):
        _, stats, _, dweights = call_with_gradients(config, weights, x, real, cotangents_like(x))
    idle = stats.load_E == 0
    assert idle.sum() >= 16 - length
    for gradient in (dweights.w_in, dweights.w_out):
        assert (gradient[idle] == 0).all() and np.isfinite(gradient).all()
        assert (np.abs(gradient[~idle]).max(axis=(1, 2)) > 0).any()


# --- The router stays in float32 --------------------------------------------------------------


def test_router_computes_in_float32():  # case 17
    config = replace(CONFIG, num_experts=5, top_k=2, dtype="bfloat16", jitter=0.1)
    x, real = random_tokens(rows=1)
    with use("single"):
        program = jax.make_jaxpr(forward)(
            make_layer(config, random_weights(config)),
            put(x.astype(jnp.bfloat16), LAYOUT.tokens_bld),
            put(real, LAYOUT.tokens_bl),
            noise_of(1),
        )
    dtypes = {}
    for equation in equations(program.jaxpr):
        name, (out, *_) = equation.primitive.name, equation.outvars
        # No logit, probability, gate or router weight is rounded on the way.
        assert not (out.aval.dtype == jnp.bfloat16 and out.aval.shape[-1:] == (5,)), equation
        if name == "dot_general":  # the router's has an expert dim at its end, no other has
            name = "router" if out.aval.shape[-1:] == (5,) else "experts"
        dtypes.setdefault(name, set()).add(out.aval.dtype.name)
    assert dtypes["router"] == {"float32"}
    assert "bfloat16" in dtypes["experts"]
    assert dtypes["exp"] == dtypes["top_k"] == dtypes["log"] == {"float32"}
    assert dtypes["cumsum"] == {"int32"}
    y, stats = program.out_avals[0], program.out_avals[1:]
    assert y.dtype == jnp.bfloat16
    assert [s.dtype.name for s in stats] == ["float32"] * 2 + ["int32"] * 4 + ["float32"]


def test_bfloat16_does_not_move_tokens_to_other_experts():
    """Given the same tokens none does; given tokens that are rounded, at most one in a hundred."""
    # case 17
    E, D = 8, 16
    router = np.random.default_rng(3).standard_normal((D, E))
    x, real = random_tokens(rows=8, length=256, width=D, padding=0.0)
    x[..., -1] = 1

    def chosen(dtype, x):
        config, weights = telltale(E, router, dtype=dtype)
        y, stats = single(config, weights, x, real, training=False)
        choice = y.astype(np.float32).argmax(axis=-1)
        assert np.bincount(choice.ravel(), minlength=E).tolist() == stats.load_E.tolist()
        return choice

    rounded = x.astype(jnp.bfloat16)
    in_bfloat16 = chosen("bfloat16", rounded)
    np.testing.assert_array_equal(in_bfloat16, chosen("float32", rounded.astype(np.float32)))
    assert (in_bfloat16 == chosen("float32", x)).mean() >= 0.99


def test_close_logits_and_long_queues_in_bfloat16():
    """Logits of 256, 256.5 and 257 for 1000 tokens; 256 slots would be all that bfloat16 counts."""
    # case 17
    config, weights = telltale(
        3, [[256, 256.5, 257], [0] * 3, [0] * 3, [0] * 3], dtype="bfloat16", capacity_factor=2.7
    )
    x = np.zeros((1, 1000, 4), jnp.bfloat16)
    x[..., 0] = x[..., -1] = 1
    y, stats = single(config, weights, x, np.ones((1, 1000), bool))
    assert stats.load_E.tolist() == [0, 0, 1000]
    assert stats.dropped == 100
    assert (y[0, :900, 2] > 0.4).all() and (y[0, 900:] == 0).all()
    assert (y[..., [0, 1, 3]] == 0).all()


@pytest.mark.parametrize(
    "mesh, changed, bias",
    [
        ("single", {}, None),
        ("data2_expert2_model2", {}, None),
        ("single", {"top_k": 2, "random_second": True}, np.zeros(8, np.float32)),
        ("single", {"encoder_router": "expert_choice"}, None),
    ],
)
def test_a_nan_is_not_silent(mesh, changed, bias):  # case 62
    x, real = random_tokens(rows=8)
    x[3, np.argmax(real[3])] = np.nan
    config = replace(CONFIG, **changed)
    with use(mesh):
        _, stats = call(config, random_weights(config), x, real, bias=bias)
    assert not np.isfinite(stats.balance) and not np.isfinite(stats.z)


# --- Noise ------------------------------------------------------------------------------------


def test_experts_see_the_tokens_without_jitter():
    """Experts that return their input, and two gates whose sum is 1 whatever the router says."""
    # case 21
    eye = np.stack([np.eye(8, dtype=np.float32)] * 2)
    router = random_weights(replace(CONFIG, num_experts=2)).router
    weights = oracle.Weights(router, eye, None, eye)
    config = replace(CONFIG, d_ff=8, num_experts=2, top_k=2, capacity_factor=2.0)
    x = np.abs(random_tokens()[0])  # so that relu lets everything through
    real = np.ones(x.shape[:2], bool)
    jittered, stats = single(replace(config, jitter=0.5), weights, x, real)
    _, calm_stats = single(config, weights, x, real)
    np.testing.assert_allclose(jittered, x, **VALUES)
    assert abs(stats.z - calm_stats.z) > 1e-3


def test_jitter_and_dropout_are_in_training_only():  # case 21
    noisy = replace(CONFIG, jitter=0.3, expert_dropout=0.5)
    weights, (x, real) = random_weights(CONFIG), random_tokens()
    y, _ = single(noisy, weights, x, real, training=False)
    again, _ = single(noisy, weights, x, real, training=False)
    calm, _ = single(CONFIG, weights, x, real, training=False)
    np.testing.assert_array_equal(y, again)
    np.testing.assert_array_equal(y, calm)
    first, _ = single(noisy, weights, x, real, seed=1)
    second, _ = single(noisy, weights, x, real, seed=2)
    assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize("noisy", [{"jitter": 0.3}, {"expert_dropout": 0.5}])
def test_rows_and_places_have_noise_of_their_own(noisy):
    """All tokens are equal, so only noise can tell their outputs apart."""  # case 21
    config = replace(CONFIG, d_ff=64, capacity_factor=8.0, **noisy)
    x, real = np.ones((4, 8, 8), np.float32), np.ones((4, 8), bool)
    y, _ = single(config, random_weights(config), x, real)
    assert len(np.unique(y.reshape(-1, 8), axis=0)) == 4 * 8


def test_noise_belongs_to_the_row_not_to_its_place_in_the_batch():
    """Rows 4 to 7 of a batch draw as they do when they are a micro-batch of their own."""
    config = replace(CONFIG, jitter=0.3, expert_dropout=0.5)
    weights, (x, real) = random_weights(config), random_tokens(rows=8)
    whole, _ = single(config, weights, x, real)
    with use("single"):
        part, _ = jax.device_get(
            forward(
                make_layer(config, weights),
                put(x[4:], LAYOUT.tokens_bld),
                put(real[4:], LAYOUT.tokens_bl),
                noise_of(4, start=4),
            )
        )
    np.testing.assert_allclose(part, whole[4:], **VALUES)


def test_expert_dropout_keeps_the_mean():
    """Half of the hidden values vanish, the others count double."""
    config = replace(CONFIG, d_ff=512, num_experts=2, capacity_factor=2.0, expert_dropout=0.25)
    weights = oracle.Weights(
        np.zeros((8, 2), np.float32),
        np.full((2, 8, 512), 1 / 8, np.float32),
        None,
        np.full((2, 512, 8), 1 / 512, np.float32),
    )
    x, real = np.ones((8, 16, 8), np.float32), np.ones((8, 16), bool)
    y, _ = single(config, weights, x, real)
    # Gate 1/2 times the mean of 512 numbers that are 0 or 4/3: ± 0.026 is one deviation.
    assert abs(2 * y[..., 0].mean() - 1) < 0.01
    assert 0.015 < 2 * y[..., 0].std() < 0.04


# --- Padding and batch-mates ------------------------------------------------------------------


def padded(array, before, after, value):
    """More columns on both sides."""
    width = ((0, 0), (before, after)) + ((0, 0),) * (array.ndim - 2)
    return np.pad(array, width, constant_values=value)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("before, after", [(0, 16), (7, 9)])
def test_columns_of_padding_change_nothing(before, after, top_k):  # case 4
    """Half of the tokens are padding, and full of garbage."""
    config = replace(CONFIG, top_k=top_k)
    weights, (x, real) = random_weights(config), random_tokens(rows=4)
    cotangents = cotangents_like(x)
    wide = replace(cotangents, y=padded(cotangents.y, before, after, 5.0))
    with use("single"):
        y, stats, dx, dweights = call_with_gradients(
            config, weights, x, real, cotangents, training=False
        )
        wide_y, wide_stats, wide_dx, wide_dweights = call_with_gradients(
            config,
            weights,
            padded(x, before, after, 9.0),
            padded(real, before, after, False),
            wide,
            training=False,
        )
    own = slice(before, before + LENGTH)
    np.testing.assert_allclose(wide_y[:, own], y, **VALUES)
    np.testing.assert_allclose(wide_dx[:, own], dx, **GRADIENTS)
    assert not np.delete(wide_y, np.r_[own], axis=1).any()
    assert not np.delete(wide_dx, np.r_[own], axis=1).any()
    check_gradients(wide_dweights, dweights)
    check_same_stats(wide_stats, stats)


def check_same_stats(stats, expected):
    assert stats.load_E.tolist() == expected.load_E.tolist()
    assert stats.dropped == expected.dropped
    np.testing.assert_allclose(stats.balance, expected.balance, **VALUES)
    np.testing.assert_allclose(stats.z, expected.z, **VALUES)


@pytest.mark.parametrize("mesh", ["single", "data8"])
def test_rows_of_padding_change_nothing(mesh):  # case 4
    """Also where tokens drop and noise is drawn; on eight devices some hold padding alone."""
    config = replace(CONFIG, jitter=0.1, expert_dropout=0.3)
    weights, (x, real) = random_weights(config), random_tokens(rows=8)
    more_x = np.concatenate([x, np.full_like(x, 9.0)])
    more_real = np.concatenate([real, np.zeros_like(real)])
    y, stats = single(config, weights, x, real)
    assert stats.dropped > 0
    with use(mesh):
        more_y, more_stats = call(config, weights, more_x, more_real)
    np.testing.assert_allclose(more_y[:8], y, **VALUES)
    assert not more_y[8:].any()
    check_same_stats(more_stats, stats)


def test_columns_of_padding_leave_noise_as_it_is():
    """Longer rows draw the same noise for the tokens that were there before."""
    config = replace(CONFIG, jitter=0.3, expert_dropout=0.5, capacity_factor=8.0)
    weights, (x, real) = random_weights(config), random_tokens(rows=4)
    y, stats = single(config, weights, x, real)
    wide_y, wide_stats = single(config, weights, padded(x, 0, 16, 9.0), padded(real, 0, 16, False))
    np.testing.assert_allclose(wide_y[:, :LENGTH], y, **VALUES)
    check_same_stats(wide_stats, stats)


def test_what_padding_holds_does_not_matter():
    weights, (x, real) = random_weights(CONFIG), random_tokens()
    y, stats = single(CONFIG, weights, x, real)
    other_y, other_stats = single(CONFIG, weights, np.where(real[..., None], x, 1e6), real)
    np.testing.assert_array_equal(y, other_y)
    jax.tree.map(np.testing.assert_array_equal, stats, other_stats)


def test_rows_do_not_see_their_batch_mates_at_evaluation():  # case 22
    """Even where all tokens of a batch share one group of slots."""
    weights, (x, real) = random_weights(CONFIG), random_tokens(rows=8, padding=0.0)
    for group_size in (None, 8 * LENGTH):
        together, _ = single(
            replace(CONFIG, group_size=group_size), weights, x, real, training=False
        )
        alone, _ = single(CONFIG, weights, x[2:3], real[2:3], training=False)
        np.testing.assert_allclose(together[2:3], alone, **VALUES)
