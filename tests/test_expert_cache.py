"""Steps that keep busy experts gathered: the same numbers, fewer bytes, by its own formula."""

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import builders
import jax
import numpy as np
import pytest

from switchjax.expert_cache import gathered_bytes, kept_bytes, saved_bytes
from switchjax.mesh import read_mesh
from switchjax.metrics import StepMetrics
from switchjax.plan.collectives import Collective, collectives
from switchjax.presets import PRESETS
from switchjax.state import TrainState
from switchjax.step import train_step

# Two stacks, each with layers to loop over, and micro-batches.
MODEL = replace(builders.MODEL, moe_every=1, activation="geglu", d_ff=64)
CONFIG = builders.run_config(MODEL, rows=16, optimizer="sgd", clip_norm=None, accumulation=2)
PLAIN, HOT = "data4_expert2,zero=3", "data4_expert2,zero=3,hot_experts=4"


class Stepped(NamedTuple):
    """Two steps, and what one of them sends."""

    states: list[TrainState]
    metrics: list[StepMetrics]
    sent: list[Collective]


@cache
def stepped(mesh_name: str) -> Stepped:
    layout, states, metrics = builders.layout(mesh_name), [], []
    with jax.set_mesh(builders.mesh(mesh_name)):
        batches = [layout.place(builders.random_batch(MODEL, 16, seed=seed)) for seed in (0, 1)]
        state = builders.start(CONFIG, layout)
        step = jax.jit(partial(train_step, CONFIG, layout)).lower(state, batches[0]).compile()
        for batch in batches:
            state, measured = step(state, batch)
            states, metrics = [*states, state], [*metrics, measured]
    sent = collectives(step.as_text(), read_mesh(mesh_name))
    return Stepped(states, metrics, sent)


def test_numbers_do_not_change():
    """Bit for bit: the same sums of the same numbers."""
    plain, kept = stepped(PLAIN), stepped(HOT)
    for number in range(2):
        one, other = (s.metrics[number]._asdict() for s in (kept, plain))
        routers = [m.pop("router")._replace(cold=0) for m in (one, other)]
        jax.tree.map(np.testing.assert_array_equal, (one, routers[0]), (other, routers[1]))
        one, other = (builders.host_leaves(s.states[number]) for s in (kept, plain))
        assert one.keys() == other.keys()
        for name, x in other.items():
            np.testing.assert_array_equal(one[name], x, err_msg=name)


def test_loads_are_counted_once_a_step():
    """On every mesh, so that a run has its history wherever it goes on."""
    for mesh_name in (PLAIN, HOT):
        one = stepped(mesh_name)
        first, second = (m.router.load_E for m in one.metrics)
        np.testing.assert_array_equal(one.states[0].load_XE, first)
        np.testing.assert_allclose(one.states[1].load_XE, 0.9 * first + second, rtol=1e-6)


def sent(mesh_name: str, kind: str, *, conditional: bool) -> float:
    """Bytes of a device in a step, of collectives that may be left out, or may not."""
    found = [c for c in stepped(mesh_name).sent if c.kind == kind]
    assert all(c.axes == ("data",) for c in found)
    return sum(c.wire_bytes * c.runs for c in found if c.conditional == conditional)


def test_bytes_on_the_wire_are_those_of_the_formula():
    """Hot experts are gathered once, cold ones twice in each micro-batch and where they are used;
    gradients are summed as before, those of cold experts where they are used.
    """
    plain, kept = read_mesh(PLAIN), read_mesh(HOT)
    cold = sent(HOT, "all-gather", conditional=True)
    once = kept_bytes(MODEL, kept) * 3 / 4  # four devices, of which each has a quarter
    assert cold + once == gathered_bytes(CONFIG, kept)
    assert not sent(PLAIN, "all-gather", conditional=True)
    before, after = sent(PLAIN, "all-gather", conditional=False), cold
    after += sent(HOT, "all-gather", conditional=False)
    assert before - after == saved_bytes(CONFIG, kept) > 0
    assert gathered_bytes(CONFIG, plain) - gathered_bytes(CONFIG, kept) == before - after
    sums = [
        sent(name, "reduce-scatter", conditional=c) for name in (PLAIN, HOT) for c in (False, True)
    ]
    assert sums[1] == 0 and sums[3] > 0 and sums[0] == sums[2] + sums[3]


@pytest.mark.parametrize("experts, model", [("separate", 2), ("folded", 2)])
def test_bytes_by_hand(experts, model):
    """Switch-base-128 on 64 devices: 8 of 16 of a device's experts, each 768 by 3072 by two, in
    12 layers, or half of it where `model` splits their hidden dim; in bfloat16."""
    config = PRESETS["switch-base-128"]
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    shape = read_mesh(f"data=8,expert=4,model={model},experts={experts},zero=3,hot_experts=64")
    hot_experts_of_a_device = 64 / 8 if experts == "folded" else 64 / 4 / 2
    kept = 12 * hot_experts_of_a_device * 2 * 768 * 3072 * 2
    assert kept_bytes(config.model, shape) == kept
    assert saved_bytes(config, shape) == kept * 7 / 8  # the backward pass's gather
    four = replace(config, optim=replace(config.optim, accumulation=4))
    assert saved_bytes(four, shape) == kept * 7 / 8 * 7
    assert gathered_bytes(four, shape) == kept * 7 / 8 * 9  # as many are cold


@pytest.mark.parametrize("seed", [0, 1])
def test_the_share_of_gathers_is_reported(seed):
    """Of two parts of the experts, two micro-batches."""
    cold_X = stepped(HOT).metrics[seed].router.cold
    assert cold_X.shape == (4,) and set(cold_X.tolist()) <= {0, 0.25, 0.5, 0.75, 1}
    assert not stepped(PLAIN).metrics[seed].router.cold.any()
