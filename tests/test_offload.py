"""The optimizer's state and what periods receive, in memory of the host. Case 71.

Simulated CPU devices have such memory beside their own: an array says in which it is, and a program
that computed with what is on the host would not trace.

Here XLA may not join a product and a sum into one instruction that rounds once. It does where it
fuses them, and the update of a period in a loop is fused otherwise than that of a whole stack.
Without it every bit is the same.
"""

import platform
from dataclasses import replace
from functools import cache, partial

import builders
import jax
import numpy as np
import pytest

from switchjax import offload, setup
from switchjax.errors import UserError
from switchjax.invariance import Observed, compare, observe
from switchjax.layout import Layout
from switchjax.mesh import make_submesh, read_mesh
from switchjax.plan.absent import absent_mesh
from switchjax.plan.hardware import read_hardware
from switchjax.saved_steps import named_leaves
from switchjax.state import abstract_state, init_state
from switchjax.step import train_step
from switchjax.update import update

# Two periods, of a dense block and a Switch block.
MODEL = replace(builders.DEEP, architecture="decoder_only", capacity_factor=1.0, remat="full")
CONFIGS = {
    # A rule of elements, whose state comes to the device a period after another.
    "adamw": builders.run_config(MODEL, rows=16, optimizer="adamw", clip_norm=None),
    # A rule of whole stacks, after clipping by the norm of all gradients.
    "adafactor": builders.run_config(MODEL, rows=16, optimizer="adafactor", clip_norm=0.1),
}
MESH = "data2_expert2_model2"
# The newest instructions without a product and a sum in one; other processors have no such choice.
CAN_ROUND_TWICE = platform.machine().lower() in ("x86_64", "amd64")
ROUNDED_TWICE: dict[str, int | str] = {"xla_cpu_max_isa": "AVX"} if CAN_ROUND_TWICE else {}
OPTIONS: dict[str, int | str] = {"xla_backend_optimization_level": 0} | ROUNDED_TWICE
if jax.__version__.startswith("0.10."):  # whose older code generator (conftest.py) does not obey
    OPTIONS["xla_cpu_use_fusion_emitters"] = True


@cache
def steps(name: str, mesh: str) -> Observed:
    """Three of them; and the state is what it is promised to be, and gives its memory away."""
    config, shape = CONFIGS[name], read_mesh(mesh)
    setup.check_sizes(config, shape)
    layout, batches = Layout.of(shape), [builders.random_batch(MODEL, 16, seed=i) for i in range(3)]
    with jax.set_mesh(make_submesh(shape)):
        state = jax.jit(partial(init_state, config, layout))()
        places = {n: x.sharding for n, x in named_leaves(state).items()}
        promised = named_leaves(abstract_state(config, layout))
        assert places == {n: x.sharding for n, x in promised.items()}
        for array, place in places.items():
            moves = "offload" in mesh and array.startswith("opt_state") and promised[array].ndim
            assert place.memory_kind == ("pinned_host" if moves else "device"), array
        observed = observe(config, layout, state, batches, OPTIONS)
        # Of what Adafactor does not keep, it has places of one element that no step reads.
        kept = [n for n, x in named_leaves(state).items() if x.size > 1 and not x.is_deleted()]
        assert not kept and not observed.misplaced and not observed.unequal
        return observed


def assert_same_bits(got: Observed, want: Observed):
    for field in ("losses", "counts", "gradient", "moved", "others"):
        arrays, others = getattr(got, field), getattr(want, field)
        assert arrays.keys() == others.keys()
        for name, x in arrays.items():
            np.testing.assert_array_equal(x, others[name], err_msg=f"{field}: {name}")


@pytest.mark.mesh
@pytest.mark.parametrize("what", ["optimizer", "optimizer+activations"])
def test_steps_are_the_same_bitwise(what):  # case 71
    assert_same_bits(steps("adafactor", f"{MESH},offload={what}"), steps("adafactor", MESH))


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", [MESH, "data=4,expert=2,zero=2"])
def test_steps_that_update_period_after_period_are_the_same_bitwise(mesh, report_deviations):
    got, want = steps("adamw", f"{mesh},offload=optimizer"), steps("adamw", mesh)  # case 71
    rows = compare(got, want)
    report_deviations(f"{mesh},offload=optimizer", rows)
    assert not [row for row in rows if not row.holds]
    if CAN_ROUND_TWICE:
        assert_same_bits(got, want)


@pytest.mark.mesh
def test_memory_changes_no_bit_of_an_update():  # case 71
    """The same update, a period after another, of a state that is on the device or on the host."""
    config, layout = CONFIGS["adamw"], builders.layout(f"{MESH},offload=optimizer")
    turns = jax.jit(partial(update, config.optim, layout.storage))
    with jax.set_mesh(builders.mesh(MESH)):
        state = jax.jit(partial(init_state, config, layout))()
        model, there = state.model, state.opt_state
        here = offload.to_device(there)
        for _ in range(2):
            (_, there), (model, here) = turns(model, there, model), turns(model, here, model)
    memory = {x.sharding.memory_kind for x in jax.tree.leaves(here)}
    assert memory == {"device"}
    for (name, x), y in zip(named_leaves(there).items(), jax.tree.leaves(here), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


@pytest.mark.mesh
def test_the_host_holds_what_periods_receive():  # case 71
    """Between the passes: of two periods, 16 rows of 8 tokens of width 16."""
    config = CONFIGS["adafactor"]
    received = "f32<host>[2,16@(data,expert),8,16]"
    for what in ("optimizer", "optimizer+activations"):
        layout = builders.layout(f"{MESH},offload={what}")
        with jax.set_mesh(builders.mesh(MESH)):
            batch = layout.place(builders.random_batch(MODEL, 16))
            step = jax.jit(partial(train_step, config, layout))
            program = str(step.trace(abstract_state(config, layout), batch).jaxpr)
        assert (received in program) == (what == "optimizer+activations")


def test_what_is_not_finite_is_found_on_the_host():
    config, layout = CONFIGS["adamw"], builders.layout(f"{MESH},offload=optimizer")
    name = "opt_state.0.nu.decoder.periods.blocks.1.switch.experts.w_in_EDF"
    with jax.set_mesh(builders.mesh(MESH)):
        state = jax.jit(partial(init_state, config, layout))()
        leaves, tree = jax.tree.flatten(state)
        index = list(named_leaves(state)).index(name)
        array = leaves[index]
        spoiled = np.asarray(array).copy()
        spoiled[1, -1, -1, -1] = np.nan
        leaves[index] = jax.device_put(spoiled, array.sharding)
        finite = named_leaves(jax.jit(offload.are_finite)(tree.unflatten(leaves)))
    assert [name for name, flag in finite.items() if not flag] == [name]


# --- Bad input --------------------------------------------------------------------------------


def refused(config, mesh: str) -> str:
    with pytest.raises(UserError) as refusal:
        setup.check_sizes(config, read_mesh(mesh))
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_unknown_values_are_refused():
    assert "offload must be one of none, optimizer, optimizer+activations, got 'disk'" in refused(
        CONFIGS["adamw"], "data=8,offload=disk"
    )


def test_what_would_do_nothing_is_refused():
    config = builders.run_config(MODEL, rows=16, optimizer="sgd")
    assert "sgd has none" in refused(config, "data=8,offload=optimizer")
    setup.check_sizes(config, read_mesh("data=8,offload=optimizer+activations"))


@pytest.mark.parametrize("remat", ["none", "moe", "dots"])
def test_periods_that_keep_more_than_they_receive_are_refused(remat):
    config = replace(CONFIGS["adamw"], model=replace(MODEL, remat=remat))
    said = refused(config, "data=8,offload=optimizer+activations")
    assert f"model.remat {remat} keeps more" in said and "choose model.remat full" in said


def test_devices_without_host_memory_are_refused():  # case 71
    """Those of a GPU that is not there; a simulated CPU device has some."""
    shape = read_mesh("data=8,offload=optimizer")
    offload.check_memory(shape, make_submesh(shape))
    absent = absent_mesh(read_hardware("h200"), shape)
    offload.check_memory(read_mesh("data=8"), absent)
    with pytest.raises(UserError, match="needs memory of kind pinned_host") as refusal:
        offload.check_memory(shape, absent)
    assert "\n" not in str(refusal.value)
