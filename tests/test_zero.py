"""ZeRO: what a device holds of the state, what a step sends for it, and that it is one state.

That numbers do not change is for `test_invariance.py`, and for one layer `moe/test_dispatchers.py`.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import builders
import jax
import numpy as np
import pytest

from switchjax.axes import DATA
from switchjax.checkpoint import Checkpoints
from switchjax.model import SwitchTransformer
from switchjax.plan.collectives import Collective, collectives
from switchjax.saved_steps import SavedSteps
from switchjax.state import TrainState, abstract_state
from switchjax.step import step_with_gradient

# Three periods of a stack for the scan, and little beside what is split.
MODEL = replace(
    builders.MODEL, architecture="decoder_only", d_ff=64, num_layers=3, moe_every=1, remat="full"
)
CONFIG = builders.run_config(MODEL, optimizer="adamw", clip_norm=1e-3)
MESH, DEGREE = "data4_expert2", 4
ZEROS = [0, 1, 2, 3]


class Stepped(NamedTuple):
    """A state after its first step, and how it got there."""

    state: TrainState
    gradient: SwitchTransformer
    sent: list[Collective]


@cache
def stepped(zero: int) -> Stepped:
    name = f"{MESH},zero={zero}"
    layout = builders.layout(name)
    with jax.set_mesh(builders.mesh(name)):
        state, batch = builders.start(CONFIG, layout), layout.place(builders.random_batch(MODEL))
        step = jax.jit(partial(step_with_gradient, CONFIG, layout)).lower(state, batch).compile()
        state, _, gradient = step(state, batch)
    return Stepped(state, gradient, collectives(step.as_text(), builders.read_mesh(name)))


def bytes_of_a_device(tree: object) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("zero", ZEROS)
def test_bytes_fall_by_the_degree_of_data(zero):
    """Optimizer state with 1, gradients with 2, parameters with 3; the others stay as they are."""
    one, whole = stepped(zero), stepped(0)
    for since, part in ((1, "opt_state"), (3, "model")):
        parts, all_of_it = (bytes_of_a_device(getattr(s.state, part)) for s in (one, whole))
        expected = all_of_it / DEGREE if zero >= since else all_of_it
        assert parts == pytest.approx(expected, rel=0.02), part
    parts, all_of_it = bytes_of_a_device(one.gradient), bytes_of_a_device(whole.gradient)
    # With 1 each device adds up whole gradients, and hands on its part.
    assert parts == pytest.approx(all_of_it / DEGREE if zero >= 1 else all_of_it, rel=0.02)


@pytest.mark.parametrize("zero", ZEROS)
def test_moments_lie_as_what_the_optimizer_works_on(zero):  # case 34
    """Over `data` along the width, experts' as all others, and else as their parameters."""
    state = stepped(zero).state
    parameters = builders.named_leaves(state.model)
    moments = {
        name: x for name, x in builders.named_leaves(state.opt_state).items() if ".periods" in name
    }
    assert len(moments) == 2 * sum(".periods" in name for name in parameters)
    for name, moment in moments.items():
        parameter = parameters[name[name.index(".decoder") :]]
        shape = list(parameter.addressable_shards[0].data.shape)
        if zero in (1, 2) and not name.endswith("norm_D"):
            shape[parameter.shape.index(MODEL.d_model)] //= DEGREE
        assert list(moment.addressable_shards[0].data.shape) == shape, name


def elements(where: Callable[[Collective], bool], zero: int) -> int:
    """That pass through such collectives over `data` in a step, each counted as a whole array's."""
    found = (c for c in stepped(zero).sent if DATA in c.axes and where(c))
    return sum(c.elements * c.runs for c in found)


def weights_of_a_device(word: str) -> int:
    """Elements of what `data` can split, by a word of its name, where it does not."""
    leaves = builders.named_leaves(stepped(0).state.model).items()
    split = (x for name, x in leaves if word in name and not name.endswith("norm_D"))
    return sum(x.addressable_shards[0].data.size for x in split)


@pytest.mark.parametrize("zero", ZEROS)
def test_gradients_are_scattered_as_they_are_summed(zero):
    """With 2 and 3, each once, where its weight was used: a tied embedding was used twice."""
    weights, embedding = weights_of_a_device(""), weights_of_a_device("embed_VD")
    summed = elements(lambda c: c.kind == "all-reduce", zero)
    scattered = elements(lambda c: c.kind == "reduce-scatter", zero)
    if zero < 2:
        assert summed >= weights and not scattered
    else:
        assert scattered == weights + embedding
        assert summed < 0.02 * weights  # statistics, norms


@pytest.mark.parametrize("zero", ZEROS)
def test_parameters_are_gathered_once_or_layer_by_layer(zero):
    """With 1 and 2 once, all that the optimizer moved. With 3 in the loops over layers, a layer's
    before it computes and once more before its gradient; and the embedding.
    """
    in_loops = elements(lambda c: c.kind == "all-gather" and c.runs == MODEL.num_layers, zero)
    once = elements(lambda c: c.kind == "all-gather" and c.runs == 1, zero)
    assert in_loops + once == elements(lambda c: c.kind == "all-gather", zero)
    if zero == 3:
        assert in_loops == 2 * weights_of_a_device(".periods")
        assert once in (weights_of_a_device("embed_VD") * n for n in (1, 2, 3))
    else:
        assert not in_loops
        assert once == (weights_of_a_device("") if zero else 0)


@pytest.mark.parametrize(
    "zero, mesh_name",
    [(3, "data2_expert2_model2"), (3, "single"), (0, "data8,zero=3"), (1, "data2_expert4,zero=2")],
)
def test_a_state_is_restored_however_it_was_split(zero, mesh_name, tmp_path):  # cases 7, 34
    """Bit for bit, onto another mesh, and as that one splits it."""
    state, layout = stepped(zero).state, builders.layout(mesh_name)
    with closing(Checkpoints(tmp_path, keep=1, on_commit=lambda step: None)) as checkpoints:
        checkpoints.save(1, state, data_state={}, config=CONFIG, eval_loss=None)
    with jax.set_mesh(builders.mesh(mesh_name)):
        target = abstract_state(CONFIG, layout)
        restored, _ = SavedSteps(tmp_path).restore(1, target)
    promised, saved = builders.named_leaves(target), builders.named_leaves(state)
    for name, leaf in builders.named_leaves(restored).items():
        assert leaf.sharding == promised[name].sharding, name
        np.testing.assert_array_equal(leaf, saved[name], err_msg=name)
    assert promised.keys() == saved.keys()
