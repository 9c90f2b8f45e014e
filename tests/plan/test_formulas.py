"""Bytes and FLOPs by formula: against the state itself, and against compiled programs.

The programs are compiled for absent H200, in processes of their own.
"""

import tempfile
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import builders
import compile_absent
import jax
import numpy as np
import pytest
from test_absent import linux, reports

from switchjax.config import DataConfig, OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.plan.candidates import Candidate
from switchjax.plan.compiling import Program, compile_all
from switchjax.plan.cost import model_flops, step_flops
from switchjax.plan.hardware import read_hardware
from switchjax.plan.memory import memory, state_bytes
from switchjax.plan.sizes import Sizes
from switchjax.plan.wire import sends
from switchjax.state import abstract_state

H200 = read_hardware("h200")


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize(
    "name",
    [
        "single",
        "data2_expert2_model2",
        "data2_expert2_model2,zero=1",
        "data2_model4_folded,zero=2",
        "data4_expert2,zero=3",
    ],
)
def test_bytes_of_the_state_are_exact(name, optimizer):
    config, shape = builders.run_config(builders.DEEP, optimizer=optimizer), read_mesh(name)
    with jax.set_mesh(builders.mesh(name)):
        state = abstract_state(config, Layout.of(shape))
    expected = [
        sum(
            np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(part)
        )
        for part in (state.model, state.opt_state)
    ]
    assert state_bytes(config, shape) == tuple(expected)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_narrow_parameters_move_into_the_optimizer(optimizer):
    """Two bytes of each weight in place of four, four more of state, and gradients as ever."""
    shape = read_mesh("data2_expert2_model2")
    wide = builders.run_config(builders.DEEP, optimizer=optimizer)
    narrow = replace(wide, model=replace(wide.model, param_dtype="bfloat16"))
    with jax.set_mesh(builders.mesh(shape.name)):
        state = abstract_state(narrow, Layout.of(shape))
    leaves = jax.tree.leaves(state.model)
    rounded = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves if leaf.dtype != "float32"
    )
    (parameters, of_state), (fewer, more) = (state_bytes(c, shape) for c in (wide, narrow))
    assert (parameters - fewer, more - of_state) == (2 * rounded, 4 * rounded)
    assert 0.9 * parameters < 4 * rounded < parameters
    gradients = [memory(Sizes(config, shape)).gradients for config in (wide, narrow)]
    assert gradients == [parameters, parameters]


# Encoder and decoder, layers computed again in the backward pass, micro-batches.
BOTH = RunConfig(
    model=replace(
        compile_absent.SMALL.model,
        architecture="encoder_decoder",
        vocab_size=1024,
        d_model=256,
        d_ff=1024,
        num_heads=4,
        d_kv=64,
        dropout=0.1,
    ),
    data=DataConfig(batch_size=256, sequence_length=256),
    optim=OptimConfig(accumulation=2),
)
# Each rung of both ladders, on meshes that split everything.
ASKED = {
    mesh: Candidate(
        config=replace(BOTH, model=replace(BOTH.model, remat=remat)), shape=read_mesh(mesh)
    )
    for mesh, remat in {
        "data=2,expert=4,model=2": "full",
        "data=4,expert=2,model=2,zero=1": "dots",
        "data=8,expert=2,zero=2": "moe",
        "data=4,model=4,experts=folded,dispatcher=local,zero=3": "full",
    }.items()
}
LARGE = compile_absent.MESHES["large"]


@cache
def programs() -> dict[str, Program]:
    """Of those asked for."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        answers = compile_all(list(ASKED.values()), H200)
    found = dict(zip(ASKED, answers, strict=True))
    assert all(isinstance(answer, Program) for answer in answers), found
    return found


def of_program(mesh: str) -> tuple[Sizes, dict[str, Any]]:
    """What formulas start from, and what the compiler says."""
    if mesh in ASKED:
        candidate, program = ASKED[mesh], programs()[mesh]
        sent = [c for c, _ in program.collectives]
        return Sizes(candidate.config, candidate.shape), vars(program) | {"sent": sent}
    report = reports("large")[mesh]
    sent = [SimpleNamespace(**fields) for fields in report["sent"]]
    return Sizes(compile_absent.LARGE, read_mesh(mesh)), report | {"sent": sent}


@linux
@pytest.mark.parametrize("mesh", [*LARGE, *ASKED])
def test_bytes_sent_are_those_of_the_program(mesh):
    sizes, program = of_program(mesh)
    expected: dict[tuple, float] = {}
    for sent in program["sent"]:
        at = sent.kind, tuple(sent.axes)
        expected[at] = expected.get(at, 0.0) + sent.wire_bytes * sent.runs
    expected = {at: size for at, size in expected.items() if size > 1e5}  # not the statistics
    found: dict[tuple, float] = {}
    for send in sends(sizes):
        at = send.kind, send.axes
        found[at] = found.get(at, 0.0) + send.wire_bytes
    assert found == pytest.approx(expected, rel=0.05)


@linux
@pytest.mark.parametrize("mesh", [*LARGE, *ASKED])
def test_bytes_of_a_device_are_those_of_the_program(mesh):
    sizes, program = of_program(mesh)
    used = memory(sizes)
    assert used.parameters + used.optimizer == pytest.approx(program["argument_bytes"], rel=0.01)
    assert used.total == pytest.approx(program["device_bytes"], rel=0.2)


@linux
@pytest.mark.parametrize("mesh", [*LARGE, *ASKED])
def test_flops_are_those_of_the_program(mesh):
    sizes, program = of_program(mesh)
    assert step_flops(sizes, H200) == pytest.approx(program["flops"], rel=0.05)


def test_model_flops_of_a_dense_decoder():
    """Six for each parameter and token, and the attention; the embedding going in is no product."""
    model = replace(builders.MODEL, moe_every=0, architecture="decoder_only", num_layers=2, d_ff=64)
    config = replace(builders.run_config(model), data=DataConfig(batch_size=8, sequence_length=32))
    D, F, V, L = model.d_model, model.d_ff, model.vocab_size, 32
    parameters = 2 * (4 * D * D + 2 * D * F) + V * D
    tokens = 8 * L
    attention = 2 * 4 * L * D * tokens  # scores and values, forward
    expected = 6 * parameters * tokens + 3 * attention
    sizes = Sizes(config, read_mesh("data=2,model=4"))
    assert model_flops(sizes) * 8 == expected
    assert step_flops(sizes, H200) == model_flops(sizes)


def test_what_no_one_needs_is_no_model_flops():
    model = replace(builders.MODEL, capacity_factor=2.0)
    for changes, ratio in (({}, 1.0), ({"remat": "full"}, 4 / 3)):
        config = builders.run_config(replace(model, **changes))
        sizes = Sizes(config, read_mesh("data4_expert2"))
        wasteful = step_flops(sizes, H200)
        assert wasteful > model_flops(sizes) * ratio * 0.9
        assert wasteful > model_flops(sizes)
