"""Bytes and FLOPs by formula: against the state itself, and against compiled programs.

The programs are compiled for absent H200, in processes of their own (`compile_absent`).
"""

from dataclasses import replace

import builders
import compile_absent
import jax
import numpy as np
import pytest
from test_absent import linux, reports

from switchjax.config import DataConfig
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.plan.cost import model_flops, step_flops
from switchjax.plan.hardware import read_hardware
from switchjax.plan.memory import memory, state_bytes
from switchjax.plan.sizes import Sizes
from switchjax.plan.wire import sends
from switchjax.state import abstract_state

H200 = read_hardware("h200")


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize("name", ["single", "data2_expert2_model2", "data2_model4_folded"])
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


def of_program(size: str, mesh: str) -> tuple[Sizes, dict]:
    return Sizes(compile_absent.CONFIGS[size], read_mesh(mesh)), reports(size)[mesh]


PROGRAMS = [(size, mesh) for size in ("large", "both") for mesh in compile_absent.MESHES[size]]


@linux
@pytest.mark.parametrize(("size", "mesh"), PROGRAMS)
def test_bytes_sent_are_those_of_the_program(size, mesh):
    sizes, report = of_program(size, mesh)
    expected: dict[tuple, float] = {}
    for sent in report["sent"]:
        axes = tuple(sent["axes"])
        expected[axes] = expected.get(axes, 0.0) + sent["wire_bytes"] * sent["runs"]
    expected = {axes: size for axes, size in expected.items() if size > 1e5}  # not the statistics
    found: dict[tuple, float] = {}
    for send in sends(sizes):
        found[send.axes] = found.get(send.axes, 0.0) + send.wire_bytes
    assert found == pytest.approx(expected, rel=0.05)


@linux
@pytest.mark.parametrize(("size", "mesh"), PROGRAMS)
def test_bytes_of_a_device_are_those_of_the_program(size, mesh):
    sizes, report = of_program(size, mesh)
    used = memory(sizes)
    assert used.parameters + used.optimizer == pytest.approx(report["argument_bytes"], rel=0.01)
    assert used.total == pytest.approx(report["device_bytes"], rel=0.2)


@linux
@pytest.mark.parametrize(("size", "mesh"), PROGRAMS)
def test_flops_are_those_of_the_program(size, mesh):
    sizes, report = of_program(size, mesh)
    assert step_flops(sizes, H200) == pytest.approx(report["flops"], rel=0.05)


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
