"""What is narrow and what is not: operations of a step, sums of gradients, parameters, losses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, inner_programs

from switchjax import scaling
from switchjax.batch import Batch
from switchjax.config import RunConfig
from switchjax.layout import Layout
from switchjax.mesh import make_submesh, read_mesh
from switchjax.metrics import StepMetrics
from switchjax.optim import WithMasters, learning_rate
from switchjax.saved_steps import named_leaves
from switchjax.state import TrainState, abstract_state
from switchjax.step import train_step

ONE_LAYER = replace(builders.MODEL, architecture="decoder_only", moe_every=1, num_layers=1)


def traced(config: RunConfig, mesh_name: str) -> Any:
    """The train step, before any compiler has looked at it."""
    layout = builders.layout(mesh_name)
    with jax.set_mesh(builders.mesh(mesh_name)):
        state = abstract_state(config, layout)
        batch = layout.place(builders.random_batch(config.model))
        return jax.make_jaxpr(partial(train_step, config, layout))(state, batch).jaxpr


def arrays(equation: Any) -> Iterator[Any]:
    """What an operation reads and makes."""
    avals = (variable.aval for variable in (*equation.invars, *equation.outvars))
    return (aval for aval in avals if hasattr(aval, "dtype"))


def is_narrow(array: Any) -> bool:
    return array.dtype in (jnp.bfloat16, jnp.float16)


# --- What a step computes in few bits ---------------------------------------------------------

MOVES = {
    "all_gather", "all_gather_reduced", "all_to_all", "broadcast_in_dim", "concatenate",
    "convert_element_type", "dynamic_slice", "dynamic_update_slice", "empty2", "gather", "name",
    "optimization_barrier", "preduced", "pvary", "reduce_precision", "reduced_vary_cast", "reshape",
    "reshard", "select_n", "slice", "split", "squeeze", "stack", "transpose", "vary_unreduced_cast",
}  # fmt: skip
ALLOWED = MOVES | {
    *(
        "dot_general",
        "ragged_dot_general",
    ),  # products of attention, feed-forward layers and experts; not the router's
    "mul",  # by gates of geglu, by d_model^-0.5 before logits
    *("add", "add_any", "sub"),  # the residual stream; gradients where paths meet
    "div",  # of dropout, by the share that is kept
    *("max", "gt"),  # relu
    *("tanh", "integer_pow", "one_minus_square"),  # gelu
    *("psum", "psum_invariant"),  # parts of products over `model`
    *("unreduced_psum", "unreduced_reduce_scatter"),  # gradients, as `reduce_dtype` says
    "scatter-add",  # gradient of the rows of the embedding that were read
}


def narrow_operations(jaxpr: Any) -> set[str]:
    """Names of those that read or make 16-bit floats."""
    return {
        equation.primitive.name.removesuffix("_p")
        for equation in equations(jaxpr)
        if not inner_programs(equation) and any(map(is_narrow, arrays(equation)))
    }


# No other dim of model or batch is as large as one of these.
EXPERTS, VOCABULARY = 6, 38
KINDS = {
    "bfloat16": ("single", dict(dtype="bfloat16")),
    "float16, all there is": (
        "single",
        dict(
            dtype="float16",
            param_dtype="bfloat16",
            activation="geglu",
            tied_embeddings=False,
            encoder_router="expert_choice",
            top_k=2,
            random_second=True,
            jitter=0.1,
            dropout=0.1,
        ),
    ),
    "on a mesh": (
        "data=4,model=2,dispatcher=ragged,zero=3",
        dict(dtype="bfloat16", param_dtype="bfloat16", architecture="decoder_only", moe_every=1),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_products_are_narrow(kind):  # case 17
    """Router, norms, softmax, losses and the optimizer are float32: nothing else exponentiates,
    takes a logarithm or a root, compares, ranks, counts or adds up an array."""
    mesh_name, changes = KINDS[kind]
    model = replace(builders.MODEL, num_experts=EXPERTS, vocab_size=VOCABULARY, **changes)
    scale = "dynamic" if model.dtype == "float16" else None
    jaxpr = traced(builders.run_config(model, loss_scale=scale, bias_rate=0.1), mesh_name)
    assert sorted(narrow_operations(jaxpr) - ALLOWED) == []
    wide = {equation.primitive.name for equation in equations(jaxpr)} - narrow_operations(jaxpr)
    assert {"exp", "log", "rsqrt", "reduce_max", "reduce_sum", "top_k", "sqrt"} <= wide
    for equation in equations(jaxpr):
        for array in arrays(equation):
            # Router weights, logits, probabilities; then the logits of tokens, and their gradient.
            of_router = array.shape[-1:] == (EXPERTS,)
            of_tokens = len(array.shape) == 3 and array.shape[-1] == VOCABULARY
            assert not (is_narrow(array) and (of_router or of_tokens)), equation


def test_a_narrow_softmax_is_seen():
    """And a norm, a ranking, a loss: each has an operation that is not allowed."""
    x = jnp.zeros((2, 4), jnp.bfloat16)
    wrong = {
        jax.nn.softmax: "exp",
        jax.nn.logsumexp: "log",
        lambda x: x * jax.lax.rsqrt(jnp.square(x).mean()): "rsqrt",
        lambda x: jax.lax.top_k(x, 1): "top_k",
        lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None): "reduce_sum",
        lambda x: jax.lax.scan(lambda c, y: (c, jax.jit(jnp.exp)(y)), 0.0, x)[1]: "exp",
    }
    for function, name in wrong.items():
        assert name in narrow_operations(jax.make_jaxpr(function)(x).jaxpr) - ALLOWED


# --- Sums of gradients over devices -----------------------------------------------------------


def dtypes_of_sums(jaxpr: Any) -> dict[bool, set[str]]:
    """Of gradients that are summed over `data`: those of routers, and those of other weights."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for equation in equations(jaxpr):
        if equation.primitive.name not in ("unreduced_psum", "unreduced_reduce_scatter"):
            continue
        (array,) = (variable.aval for variable in equation.invars)
        found[array.shape[-1] == EXPERTS].add(array.dtype.name)
    return found


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "summed"),
    [
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "compute", "bfloat16"),
    ],
)
def test_gradients_are_summed_as_the_mesh_file_says(dtype, reduce_dtype, summed, zero):
    """Of bfloat16 parameters, and with ZeRO of all; the router's are summed in float32."""
    model = replace(ONE_LAYER, num_experts=EXPERTS, dtype=dtype, param_dtype="bfloat16")
    mesh_name = f"data=4,expert=2,zero={zero},reduce_dtype={reduce_dtype}"
    sums = dtypes_of_sums(traced(builders.run_config(model), mesh_name))
    assert sums[False] == {summed}
    assert sums[True] <= {"float32"}
    assert bool(sums[True]) == (zero > 1)  # without, JAX sums what is float32 of its own accord


# --- Parameters and their masters -------------------------------------------------------------

MASTERED = replace(ONE_LAYER, param_dtype="bfloat16")
STEPS, ROWS = 3, 16


@cache
def after_steps(mesh_name: str) -> tuple[TrainState, dict[str, np.ndarray]]:
    """The state, and its arrays on the host."""
    config = builders.run_config(MASTERED, ROWS, accumulation=2)
    layout = builders.layout(mesh_name)
    with jax.set_mesh(builders.mesh(mesh_name)):
        state = builders.start(config, layout)
        step = builders.compiled_step(config, layout)
        for seed in range(STEPS):
            batch = builders.random_batch(config.model, ROWS, seed=seed)
            state, _ = step(state, layout.place(batch))
        return state, jax.device_get(named_leaves(state))


WIDE = ("router_DE", "norm_D", "relative_UH")


@pytest.mark.parametrize(
    "mesh_name",
    [
        "single",
        pytest.param("data=2,expert=2,model=2,zero=1", marks=pytest.mark.mesh),
        "data=4,expert=2,zero=2",
        pytest.param("data=4,model=2,zero=3", marks=pytest.mark.mesh),
    ],
)
def test_narrow_parameters_are_their_masters_rounded(mesh_name):
    """Bit for bit, on any mesh; and masters go where they go on one device."""
    state, arrays = after_steps(mesh_name)
    assert isinstance(state.opt_state, WithMasters)
    parameters = {n.removeprefix("model."): x for n, x in arrays.items() if n.startswith("model.")}
    of = "opt_state.masters."
    masters = {n.removeprefix(of): x for n, x in arrays.items() if n.startswith(of)}
    assert masters.keys() == {n for n in parameters if not n.endswith(WIDE)}
    for name, x in parameters.items():
        assert x.dtype == (jnp.bfloat16 if name in masters else np.float32), name
    _, on_one = after_steps("single")
    for name, x in masters.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(parameters[name], x.astype(jnp.bfloat16), err_msg=name)
        assert np.abs(x - on_one[of + name]).sum() <= 1e-5 * np.abs(x).sum(), name
    rest = {x.dtype.name for n, x in arrays.items() if n.startswith("opt_state.")}
    assert rest == {"float32", "int32"}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_masters_are_split_with_the_state(zero):
    shape = read_mesh(f"data=4,expert=2,zero={zero}")
    layout = Layout.of(shape)
    with jax.set_mesh(make_submesh(shape)):
        state = abstract_state(builders.run_config(MASTERED), layout)
    for name, leaf in named_leaves(state.opt_state).items():
        if name.startswith("masters."):
            here = np.prod(leaf.sharding.shard_shape(leaf.shape))
            devices = (4 if zero else 1) * (2 if "experts" in name else 1)
            assert here * devices == leaf.size, name


# --- Losses, and steps that overflow ----------------------------------------------------------

LIMIT = 2e-2  # of losses, relative; 9e-3 was the most that was seen
Step = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


@cache
def program(dtype: str, param_dtype: str) -> tuple[RunConfig, TrainState, Step]:
    """A run's config, its first state and its compiled step, on one device."""
    model = replace(ONE_LAYER, dtype=dtype, param_dtype=param_dtype)
    scale = "dynamic" if dtype == "float16" else None
    rates: dict[str, Any] = dict(learning_rate=2e-2, warmup_steps=5, bias_rate=0.01)
    config = builders.run_config(model, loss_scale=scale, **rates)
    with on_one_device():
        return config, builders.start(config), builders.compiled_step(config)


def on_one_device():
    return jax.set_mesh(builders.mesh("single"))


def batch_number(number: int) -> Batch:
    return Layout().place(builders.random_batch(ONE_LAYER, seed=number % 4))


@cache
def losses(dtype: str, param_dtype: str) -> np.ndarray:
    """Of twenty steps, in which the loss falls by a quarter."""
    _, state, step = program(dtype, param_dtype)
    measured = []
    with on_one_device():
        for number in range(20):
            state, metrics = step(state, batch_number(number))
            measured.append(float(metrics.loss))
    return np.array(measured)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_bits_learn_as_well(dtype):
    expected = losses("float32", "float32")
    assert expected[-1] < 0.8 * expected[0]
    np.testing.assert_allclose(losses(dtype, "bfloat16"), expected, rtol=LIMIT)


FLOAT16 = ("float16", "bfloat16")


def with_scale(state: TrainState, scale: float, steady: int = 0) -> TrainState:
    return state._replace(
        loss_scale=scaling.LossScale(jnp.float32(scale), jnp.int32(steady), jnp.int32(0))
    )


def test_a_step_that_overflows_leaves_all_as_it_was():
    """But for its number and the scale: parameters, masters, moments, schedule, router bias."""
    config, first, step = program(*FLOAT16)
    with on_one_device():
        before, _ = step(first, batch_number(0))
        after, metrics = step(with_scale(before, 2.0**60), batch_number(1))
        old, new = jax.device_get((before, after))
    assert not np.isfinite(metrics.grad_norm) and np.isfinite(metrics.loss)
    assert (new.step, new.updates, new.loss_scale) == (2, 1, (2.0**59, 0, 1))
    unchanged = [state._replace(step=0, loss_scale=None) for state in (old, new)]
    jax.tree.map(np.testing.assert_array_equal, *unchanged)
    # The next step has the rate that this one had.
    assert after.loss_scale is not None
    fits = after._replace(loss_scale=after.loss_scale._replace(scale=jnp.float32(1)))
    with on_one_device():
        state, following = step(fits, batch_number(1))
    assert (state.step, state.updates, state.loss_scale) == (3, 2, (1, 1, 1))
    assert metrics.learning_rate == following.learning_rate == learning_rate(config.optim, 1)
    assert np.isfinite(following.grad_norm)


def test_the_scale_falls_until_gradients_fit_and_the_run_learns():
    _, first, step = program(*FLOAT16)
    with on_one_device():
        state, measured = with_scale(first, 2.0**40), []
        for number in range(60):
            state, metrics = step(state, batch_number(number))
            measured.append((bool(np.isfinite(metrics.grad_norm)), float(metrics.loss)))
    finite = [is_finite for is_finite, _ in measured]
    skipped = finite.index(True)
    assert skipped > 5 and all(finite[skipped:])
    assert state.loss_scale is not None
    assert state.loss_scale == (2.0 ** (40 - skipped), 60 - skipped, skipped)
    learned = [loss for _, loss in measured[skipped : skipped + 20]]
    np.testing.assert_allclose(learned[-1], losses(*FLOAT16)[-1], rtol=0.05)


def test_a_steady_scale_doubles_and_changes_no_number():
    _, first, step = program(*FLOAT16)
    last = scaling.STEPS_TO_DOUBLE - 1
    with on_one_device():
        state, metrics = step(with_scale(first, 2.0**10, last), batch_number(0))
        other, others = step(with_scale(first, 2.0**11, last - 1), batch_number(0))
    assert state.loss_scale == (2.0**11, 0, 0)
    assert other.loss_scale == (2.0**11, last, 0)
    np.testing.assert_allclose(metrics.grad_norm, others.grad_norm, rtol=1e-3)
    assert metrics.loss == others.loss


@pytest.mark.parametrize(
    ("scale", "steady", "is_finite", "expected"),
    [
        (2.0**15, 0, True, (2.0**15, 1, 3)),
        (2.0**15, 1999, True, (2.0**16, 0, 3)),
        (2.0**24, 1999, True, (2.0**24, 0, 3)),
        (2.0**15, 1999, False, (2.0**14, 0, 4)),
        (1.0, 0, False, (0.5, 0, 4)),
    ],
)
def test_how_the_scale_follows(scale, steady, is_finite, expected):
    before = scaling.LossScale(jnp.float32(scale), jnp.int32(steady), jnp.int32(3))
    assert before.after(jnp.bool(is_finite)) == expected
