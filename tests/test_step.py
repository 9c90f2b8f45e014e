"""Train steps: what they report and obey, the semantics S1 and S6 to S12 of the design.

That whole steps are the same on every mesh is `test_invariance.py`'s business.
"""

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from switchjax.batch import Batch
from switchjax.config import RunConfig
from switchjax.invariance import copies_differ
from switchjax.layout import Layout
from switchjax.mesh import read_mesh, use_abstract_mesh
from switchjax.metrics import StepMetrics
from switchjax.optim import learning_rate
from switchjax.presets import PRESETS
from switchjax.state import abstract_state, init_state
from switchjax.step import train_step

LOSSES = dict(rtol=1e-5)
GRADIENTS = dict(rtol=1e-4, atol=1e-6)

# Tight queues, skewed routing and 30 % padding (of `random_batch`) in all of them.
TIGHT = replace(builders.MODEL, capacity_factor=1.0)
EXPERT_CHOICE = "encoder_decoder, expert choice, bias, accumulation, sgd"
CASES = {
    "encoder_decoder, sgd": builders.run_config(
        replace(TIGHT, num_layers=1, moe_every=1),
        optimizer="sgd",
        learning_rate=1.0,
        warmup_steps=1,
        clip_norm=None,
    ),
    "decoder_only, geglu, jitter, dropout, adamw": builders.run_config(
        replace(TIGHT, architecture="decoder_only", activation="geglu", jitter=0.1, dropout=0.1),
        optimizer="adamw",
        learning_rate=1e-3,
        warmup_steps=1,
        clip_norm=0.1,
    ),
    EXPERT_CHOICE: builders.run_config(
        replace(
            TIGHT,
            moe_every=1,
            encoder_router="expert_choice",
            top_k=2,
            random_second=True,
            capacity_factor=0.5,
        ),
        rows=16,
        optimizer="sgd",
        learning_rate=1.0,
        warmup_steps=1,
        clip_norm=None,
        accumulation=2,
        bias_rate=0.05,
    ),
}


class Run(NamedTuple):
    """Three steps on one device, on the host."""

    parameters: list[dict[str, np.ndarray]]  # before the first step and after each
    router_bias_XE: np.ndarray | None  # after the last step
    metrics: list[StepMetrics]


@cache
def three_steps(case: str) -> Run:
    config = CASES[case]
    with jax.set_mesh(builders.mesh("single")):
        state, step = builders.start(config), builders.compiled_step(config)
        parameters, metrics = [builders.host_leaves(state.model)], []
        for number in range(3):
            batch = builders.random_batch(config.model, config.data.batch_size, seed=number)
            state, measured = step(state, Layout().place(batch))
            parameters.append(builders.host_leaves(state.model))
            metrics.append(jax.device_get(measured))
        return Run(parameters, jax.device_get(state.router_bias_XE), metrics)


def test_what_a_step_reports():
    """S9: the total is the sum of the parts; S11: everything counts optimizer steps."""
    for case, config in CASES.items():
        optim = config.optim
        for number, metrics in enumerate(three_steps(case).metrics):
            batch = builders.random_batch(config.model, config.data.batch_size, seed=number)
            whole = metrics.ce + optim.balance_coefficient * metrics.aux
            np.testing.assert_allclose(metrics.loss, whole + optim.z_coefficient * metrics.z, 1e-6)
            np.testing.assert_array_equal(metrics.learning_rate, learning_rate(optim, number))
            segments = (batch.segment_BL, batch.encoder_segment_BS)
            assert metrics.tokens == sum((x > 0).sum() for x in segments if x is not None)


def test_gradient_norm_is_that_of_the_whole_gradient():
    """S12: plain SGD at rate 1 moves the parameters by exactly the gradient."""
    run = three_steps("encoder_decoder, sgd")
    squares = sum(
        np.square(after - run.parameters[0][name], dtype=np.float64).sum()
        for name, after in run.parameters[1].items()
    )
    np.testing.assert_allclose(run.metrics[0].grad_norm, np.sqrt(squares), rtol=1e-5)


PLAIN_SGD = dict(optimizer="sgd", learning_rate=1.0, warmup_steps=1, clip_norm=None)
DECODER = replace(builders.MODEL, architecture="decoder_only")
AMPLE = replace(DECODER, capacity_factor=8.0)  # as many slots as tokens: nothing drops
ROUTER = ".decoder.periods.blocks[1].switch.router_DE"


def router_gradient(config: RunConfig, batch: Batch) -> np.ndarray:
    before, after, _ = builders.one_step(config, batch)
    return before[ROUTER] - after[ROUTER]


def without_targets(batch: Batch) -> Batch:
    return batch._replace(target_mask_BL=np.zeros_like(batch.target_mask_BL))


def test_router_losses_are_applied_in_proportion_to_their_coefficient():
    """Case 26: g(1) - g(0) = 100 · (g(0.01) - g(0)), with remat and scan on."""
    model = replace(DECODER, remat="full")
    batch = builders.random_batch(model)
    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        none, small, large = (
            router_gradient(
                builders.run_config(model, **PLAIN_SGD, balance_coefficient=c, z_coefficient=c),
                batch,
            )
            for c in (0.0, 0.01, 1.0)
        )
    assert np.abs(large - none).max() > 1e-2
    np.testing.assert_allclose(large - none, 100 * (small - none), rtol=1e-3, atol=1e-4)


@pytest.mark.mesh
def test_accumulation_is_one_big_batch():
    """Cases 1 and 16, S11, S10: rows differ in padding and targets, noise is on, nothing drops.

    The balance loss is left out: it is the mean over micro-batches (next test).
    """
    model = replace(AMPLE, jitter=0.1, dropout=0.1)
    batch = builders.random_batch(model, rows=32)
    results = {}
    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        for count in (1, 4):
            config = builders.run_config(
                model,
                rows=32,
                **PLAIN_SGD,
                accumulation=count,
                balance_coefficient=0.0,
                z_coefficient=1.0,
            )
            results[count] = builders.one_step(config, batch)
    (before, whole, expected), (_, cut, metrics) = results[1], results[4]
    assert metrics.router.dropped.sum() == 0
    for name in ("loss", "ce", "z", "grad_norm", "tokens"):
        np.testing.assert_allclose(
            getattr(metrics, name), getattr(expected, name), **LOSSES, err_msg=name
        )
    np.testing.assert_array_equal(metrics.router.load_E, expected.router.load_E)
    for name in before:
        np.testing.assert_allclose(
            before[name] - cut[name], before[name] - whole[name], **GRADIENTS, err_msg=name
        )


def test_balance_loss_under_accumulation_is_the_mean_over_micro_batches():
    """Case 1, S11: a mean, never a sum. Micro-batch i holds rows i, i + m, …"""
    batch = without_targets(builders.random_batch(AMPLE, rows=32))
    coefficients = dict(balance_coefficient=1.0, z_coefficient=0.0)
    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        config = builders.run_config(AMPLE, rows=32, **PLAIN_SGD, accumulation=4, **coefficients)
        before, after, metrics = builders.one_step(config, batch)
        state = builders.start(config)
        step = builders.compiled_step(builders.run_config(AMPLE, **PLAIN_SGD, **coefficients))
        aux, gradient = [], []
        for i in range(4):
            micro = Layout().place(Batch(*(x if x is None else x[i::4] for x in batch)))
            alone, measured = step(state, micro)
            aux.append(measured.aux)
            gradient.append(before[ROUTER] - builders.host_leaves(alone.model)[ROUTER])
    np.testing.assert_allclose(metrics.aux, np.mean(aux), **LOSSES)
    assert np.ptp(aux) > 1e-3  # micro-batches differ, so the test can tell
    np.testing.assert_allclose(
        before[ROUTER] - after[ROUTER], np.mean(gradient, axis=0), **GRADIENTS
    )


def test_a_step_moves_the_bias_of_the_router_once():
    """Case 63: by the loads of all micro-batches together, whatever their number."""
    rate, biases, loads = 0.125, {}, {}
    batch = builders.random_batch(AMPLE, rows=32)
    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        for count in (1, 4):
            config = builders.run_config(
                AMPLE, rows=32, **PLAIN_SGD, accumulation=count, bias_rate=rate
            )
            state = builders.start(config)
            assert (np.asarray(state.router_bias_XE) == 0).all()
            state, metrics = builders.compiled_step(config)(state, Layout().place(batch))
            biases[count], loads[count] = jax.device_get(
                (state.router_bias_XE, metrics.router.load_E)
            )
    np.testing.assert_array_equal(loads[4], loads[1])
    assert biases[1].shape == (1, 8) and biases[1].dtype == np.float32
    expected = rate * np.sign(loads[1].mean(axis=1, keepdims=True) - loads[1])
    assert {-rate, rate} <= set(expected.ravel().tolist())
    for bias in biases.values():
        np.testing.assert_array_equal(bias, expected)


def test_the_bias_of_layers_whose_experts_choose_stays_0():
    """Their load is even."""
    bias_XE = three_steps(EXPERT_CHOICE).router_bias_XE
    assert (bias_XE[:2] == 0).all()  # the encoder's
    assert (bias_XE[2:] != 0).any(axis=1).all()


def test_noise_is_keyed_by_the_step():
    """S10: another step draws other noise, the same step the same."""
    model = replace(AMPLE, jitter=0.1, dropout=0.1)
    config = builders.run_config(model, **PLAIN_SGD)
    with jax.set_mesh(builders.mesh("single")):
        state, step = builders.start(config), builders.compiled_step(config)
        batch = Layout().place(builders.random_batch(model))
        first, again, later = (
            float(step(state._replace(step=jnp.int32(number)), batch)[1].ce) for number in (0, 0, 1)
        )
    assert first == again
    assert first != later


def test_a_batch_without_targets_is_finite():
    """Case 15: nothing to learn is a loss of 0, not NaN."""
    config = builders.run_config(DECODER, **PLAIN_SGD)
    empty = without_targets(builders.random_batch(DECODER))
    padding = empty._replace(segment_BL=np.zeros_like(empty.segment_BL))
    with jax.set_mesh(builders.mesh("single")):
        state, step = builders.start(config), builders.compiled_step(config)
        for batch in (empty, padding):
            after, metrics = step(state, Layout().place(batch))
            assert metrics.ce == 0
            assert np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm)
            for name, leaf in builders.host_leaves(after.model).items():
                assert np.isfinite(leaf).all(), name
    assert metrics.grad_norm == 0 and metrics.tokens == 0


# Case 51: how every parameter lies on the mesh, by its name, without the dim of stacked layers.
LAYOUTS = {
    "embed_VD": P("model", None),
    "logits_VD": P("model", None),
    "norm_D": P(None),
    "relative_UH": P(None, "model"),
    "w_q_DHK": P(None, "model", None),
    "w_k_DHK": P(None, "model", None),
    "w_v_DHK": P(None, "model", None),
    "w_o_HKD": P("model", None, None),
    "w_in_DF": P(None, "model"),
    "w_gate_DF": P(None, "model"),
    "w_out_FD": P("model", None),
    "router_DE": P(None, None),
    "w_in_EDF": P("expert", None, "model"),
    "w_gate_EDF": P("expert", None, "model"),
    "w_out_EFD": P("expert", "model", None),
}


GEGLU = replace(builders.MODEL, activation="geglu", tied_embeddings=False)


@cache
def initial_parameters() -> dict[str, np.ndarray]:
    with jax.set_mesh(builders.mesh("single")):
        config = builders.run_config(GEGLU)
        return builders.host_leaves(jax.jit(partial(init_state, config, Layout()))().model)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh_name", builders.small_meshes()[1:])
def test_initial_parameters_are_the_same_bits_and_lie_as_the_table_says(mesh_name):
    """S1, cases 30 and 51."""
    with jax.set_mesh(builders.mesh(mesh_name)):
        config = builders.run_config(GEGLU)
        model = jax.jit(partial(init_state, config, builders.layout(mesh_name)))().model
        seen = set()
        for name, leaf in builders.named_leaves(model).items():
            np.testing.assert_array_equal(leaf, initial_parameters()[name], name)
            seen.add(kind := name.rsplit(".", 1)[1])
            stacked = (None,) * (".periods." in name)
            spec = LAYOUTS[kind]
            if mesh_name.endswith("folded") and kind.endswith(("EDF", "EFD")):
                spec = P(("expert", "model"), None, None)
            expected = NamedSharding(jax.sharding.get_mesh(), P(*stacked, *spec))
            assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), name
            assert not copies_differ(leaf), name
        assert seen == LAYOUTS.keys()


def test_experts_and_layers_start_different_from_each_other():
    """S1, case 30."""
    starts = [x for name, x in initial_parameters().items() if "norm_D" not in name]
    experts = [
        w for x in starts if x.ndim == 4 and x.shape[1] == 8 and x.shape[2] == 16 for w in x[0]
    ]
    assert len(experts) == 2 * 3 * 8
    rows = {w.tobytes() for w in experts} | {x.tobytes() for x in starts}
    assert len(rows) == len(experts) + len(starts)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_state_stays_where_it_was_born(optimizer):
    """Cases 34, 41: moments lie as their parameters, nothing moves, nothing compiles twice."""
    model = replace(DECODER, activation="geglu", capacity_factor=1.0)
    config = builders.run_config(model, optimizer=optimizer, bias_rate=0.1)
    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        state = jax.jit(partial(init_state, config, Layout()))()

        def types() -> dict[str, tuple]:
            leaves = builders.named_leaves(state)
            return {name: (x.shape, x.dtype, x.sharding.spec) for name, x in leaves.items()}

        before = types()
        promised = builders.named_leaves(abstract_state(config, Layout()))
        assert before == {n: (x.shape, x.dtype, x.sharding.spec) for n, x in promised.items()}
        step = jax.jit(partial(train_step, config, Layout()), donate_argnums=0)
        for number in range(4):
            batch = builders.random_batch(config.model, seed=number)
            state, _ = step(state, Layout().place(batch))
            assert types() == before
        assert step._cache_size() == 1
        parameters = builders.named_leaves(state.model)
        leaves = builders.named_leaves(state.opt_state)
        for moment in {"adamw": (".mu", ".nu"), "adafactor": (".v",)}[optimizer]:
            moments = {n.split(moment, 1)[1]: x for n, x in leaves.items() if f"{moment}." in n}
            assert moments.keys() == parameters.keys()
            for name, leaf in moments.items():
                assert leaf.sharding == parameters[name].sharding, name
            experts = moments[EXPERTS]  # halves of the experts, halves of their hidden dim
            assert experts.addressable_shards[0].data.nbytes == experts.nbytes / 4


EXPERTS = ".decoder.periods.blocks[1].switch.experts.w_in_EDF"


@pytest.mark.parametrize("preset", [n for n, run in PRESETS.items() if run.model.moe_every])
def test_adafactor_factors_expert_weights_over_their_own_dims(preset):
    """Second moments of an expert are a row over D and a row over F, each expert its own."""
    model = PRESETS[preset].model
    config = builders.run_config(model, optimizer="adafactor")
    with use_abstract_mesh(read_mesh("single")):
        state = jax.eval_shape(lambda: init_state(config, Layout()).opt_state)
    layers = model.num_layers // model.moe_every
    expected = sorted((layers, model.num_experts, dim) for dim in (model.d_model, model.d_ff))
    leaves = builders.named_leaves(state)
    for weight in ("w_in_EDF", "w_out_EFD"):
        row, col = (
            next(x.shape for name, x in leaves.items() if kind in name and name.endswith(weight))
            for kind in (".v_row.", ".v_col.")
        )
        assert sorted((row, col)) == expected
