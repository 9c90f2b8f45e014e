"""Saved steps come back bit for bit on any mesh, or are refused in one line."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from switchjax.axes import AXES
from switchjax.checkpoint import Checkpoints
from switchjax.config import ModelConfig, RunConfig
from switchjax.errors import UserError
from switchjax.saved_steps import SavedSteps, named_leaves
from switchjax.state import TrainState

EXPERTS = 8
CONFIG = RunConfig(model=ModelConfig(num_experts=EXPERTS), steps=7)
ROW_SPECS = {"w_in_EDF": P("expert", None, "model"), "router_DE": P()}


class Layer(nnx.Module):
    def __init__(self, w_in_EDF, router_DE):
        self.w_in_EDF = nnx.Param(w_in_EDF)
        self.router_DE = nnx.Param(router_DE)


class Model(nnx.Module):
    def __init__(self, layer):
        self.blocks = nnx.List([layer])


def make_state(fill: float, size: int = 4) -> dict:
    """Expert i is all `fill + i`; the Adam moments are ten and a hundred times that."""
    w_in_EDF = np.arange(EXPERTS, dtype=np.float32)[:, None, None] + np.full(
        (EXPERTS, 2, size), fill, np.float32
    )
    router_DE = np.random.default_rng(int(fill)).normal(size=(2, EXPERTS)).astype(jnp.bfloat16)
    model = Model(Layer(jnp.asarray(w_in_EDF), jnp.asarray(router_DE)))
    adam, rest = optax.adam(1e-3).init(model)
    adam = adam._replace(
        mu=jax.tree.map(lambda x: x * 10, model), nu=jax.tree.map(lambda x: x * 100, model)
    )
    return {"model": model, "optimizer": (adam, rest), "step": jnp.int32(fill)}


def make_mesh(shape, axis_type=AxisType.Explicit):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, AXES, (axis_type,) * 3, devices=devices)


def shardings(state, mesh):
    def of(name):
        return NamedSharding(mesh, ROW_SPECS.get(name.rpartition(".")[2], P()))

    return jax.tree.unflatten(jax.tree.structure(state), [of(n) for n in named_leaves(state)])


def put(state, mesh):
    return jax.tree.map(jax.device_put, state, shardings(state, mesh))


def target_like(state, mesh):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state,
        shardings(state, mesh),
    )


def assert_same(restored, expected):
    restored, expected = named_leaves(restored), named_leaves(expected)
    assert restored.keys() == expected.keys()
    for name, leaf in expected.items():
        assert restored[name].dtype == leaf.dtype, name
        assert np.asarray(restored[name]).tobytes() == np.asarray(leaf).tobytes(), name


@contextlib.contextmanager
def open_checkpoints(directory, keep=2, on_commit=lambda step: None):
    with contextlib.closing(Checkpoints(directory, keep=keep, on_commit=on_commit)) as checkpoints:
        yield checkpoints


def save(checkpoints, step, state=None, eval_loss=None):
    state = put(make_state(step), make_mesh((2, 2, 2))) if state is None else state
    data_state = {"position": step}
    checkpoints.save(step, state, data_state=data_state, config=CONFIG, eval_loss=eval_loss)


def saved(directory, *steps):
    with open_checkpoints(directory, keep=len(steps)) as checkpoints:
        for step in steps:
            save(checkpoints, step)
    return directory


def restore(steps: SavedSteps, step: int, shape=(2, 2, 2)):
    return steps.restore(step, target_like(make_state(step), make_mesh(shape)))


def poll_until(checkpoints, done):
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        checkpoints.poll()
        time.sleep(0.002)


def run_child(function: str, *args: object, devices: int = 8, **popen) -> subprocess.Popen:
    """Starts `function(*args)` of this file in a fresh process with that many devices."""
    here = Path(__file__)
    code = (
        f"import jax, sys; jax.config.update('jax_num_cpu_devices', {devices});"
        f"sys.path[:0] = [{str(here.parent)!r}, {str(here.parent.parent)!r}];"
        f"import {here.stem} as tests; tests.{function}(*sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *map(str, args)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(popen.pop("prefix", []) + command, env=env, **pipes, **popen)


# --- Any mesh ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 4)])
def test_restores_bitwise_on_another_mesh(tmp_path, shape):  # cases 7, 34
    steps = SavedSteps(saved(tmp_path, 5))
    state, data_state = restore(steps, 5, shape)
    assert_same(state, make_state(5))
    assert data_state == {"position": 5}
    wanted = named_leaves(target_like(make_state(5), make_mesh(shape)))
    for name, leaf in named_leaves(state).items():
        assert leaf.sharding == wanted[name].sharding, name
    assert isinstance(state["model"].blocks[0].w_in_EDF, nnx.Param)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 1), (8, 1, 1)])
def test_the_bias_of_the_router_comes_back(tmp_path, shape):  # case 63
    parts = make_state(5)
    bias_XE = jnp.asarray(np.random.default_rng(0).normal(size=(3, EXPERTS)), jnp.float32)
    state = TrainState(parts["step"], parts["model"], parts["optimizer"], bias_XE)
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 5, put(state, make_mesh((2, 2, 2))))
    restored, _ = SavedSteps(tmp_path).restore(5, target_like(state, make_mesh(shape)))
    assert_same(restored, state)
    assert "router_bias_XE" in named_leaves(restored)
    without = target_like(state._replace(router_bias_XE=None), make_mesh(shape))
    with pytest.raises(UserError, match=r"does not fit: extra router_bias_XE$"):
        SavedSteps(tmp_path).restore(5, without)


def child_restores(directory, devices):
    assert jax.device_count() == int(devices)
    steps = SavedSteps(Path(directory))
    assert steps.read_config(5) == CONFIG
    state, _ = restore(steps, 5, (1, int(devices), 1))
    assert_same(state, make_state(5))
    print("same")


@pytest.mark.parametrize("devices", [1, 4])
def test_restores_in_a_process_with_fewer_devices(tmp_path, devices):  # case 7
    saved(tmp_path, 5)
    child = run_child("child_restores", tmp_path, devices, devices=devices)
    out, err = child.communicate(timeout=60)
    assert (out, err) == ("same\n", "")


def test_every_expert_comes_back_as_itself(tmp_path):  # case 6
    state = put(make_state(0), make_mesh((1, 4, 1)))
    with open_checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 0, state)
    for shape in [(1, 1, 1), (1, 2, 1), (1, 8, 1)]:
        restored, _ = restore(SavedSteps(tmp_path), 0, shape)
        adam = restored["optimizer"][0]
        for factor, model in [(1, restored["model"]), (10, adam.mu), (100, adam.nu)]:
            w_in_EDF = np.asarray(model.blocks[0].w_in_EDF.get_value())
            for expert in range(EXPERTS):
                assert (w_in_EDF[expert] == factor * expert).all()


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("inside", [True, False])
def test_works_in_and_out_of_a_mesh_context(tmp_path, axis_type, inside):  # case 66
    mesh = make_mesh((2, 2, 2), axis_type)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        with jax.transfer_guard("disallow"), open_checkpoints(tmp_path) as checkpoints:
            with jax.transfer_guard("allow"):
                state = put(make_state(3), mesh)
            save(checkpoints, 3, state)
        restored, _ = SavedSteps(tmp_path).restore(3, target_like(make_state(3), mesh))
        assert_same(restored, make_state(3))


def test_names_in_the_file_are_paths_of_the_state(tmp_path):
    metadata = json.loads((saved(tmp_path, 5) / "5/state/_METADATA").read_text())
    names = {entry["key_metadata"][0]["key"] for entry in metadata["tree_metadata"].values()}
    assert names == {
        "model.blocks.0.router_DE",
        "model.blocks.0.w_in_EDF",
        "optimizer.0.count",
        "optimizer.0.mu.blocks.0.router_DE",
        "optimizer.0.mu.blocks.0.w_in_EDF",
        "optimizer.0.nu.blocks.0.router_DE",
        "optimizer.0.nu.blocks.0.w_in_EDF",
        "step",
    }


def test_what_does_not_fit_is_listed(tmp_path):
    saved(tmp_path, 5)
    target = target_like(make_state(5, size=6), make_mesh((2, 2, 2)))
    target["new"] = target["step"]
    target["step"] = jax.ShapeDtypeStruct((), jnp.float32, sharding=target["step"].sharding)
    target["optimizer"] = target["optimizer"][1:]
    with pytest.raises(UserError) as error:
        SavedSteps(tmp_path).restore(5, target)
    message = str(error.value)
    assert "\n" not in message
    assert "missing new" in message
    assert "extra optimizer.0.count, optimizer.0.mu.blocks.0.router_DE, " in message
    assert "model.blocks.0.w_in_EDF is float32[8,2,4], not float32[8,2,6]" in message
    assert "step is int32[], not float32[]" in message
    assert "model.blocks.0.router_DE is" not in message


# --- Saving --------------------------------------------------------------------------------


def test_a_state_may_be_donated_once_save_returns(tmp_path):  # case 45
    mesh = make_mesh((2, 2, 2))
    state = put(make_state(1, size=1 << 14), mesh)
    train_step = jax.jit(lambda s: jax.tree.map(lambda x: x * 2 + 1, s), donate_argnums=0)
    copies, committed = {}, []
    with open_checkpoints(tmp_path, keep=10, on_commit=committed.append) as checkpoints:
        for step in range(10):
            copies[step] = jax.tree.map(lambda x: np.array(x, copy=True), state)
            save(checkpoints, step, state)
            for _ in range(2):
                donated, state = state, train_step(state)
            assert donated["model"].blocks[0].w_in_EDF.get_value().is_deleted()
            checkpoints.poll()
    assert committed == list(range(10))
    target = target_like(state, mesh)
    for step, copy in copies.items():
        assert_same(SavedSteps(tmp_path).restore(step, target)[0], copy)


def test_a_step_is_reported_once_it_is_on_disk(tmp_path):
    committed = []

    def on_commit(step):
        assert SavedSteps(tmp_path).latest() == step
        committed.append(step)

    with open_checkpoints(tmp_path, on_commit=on_commit) as checkpoints:
        save(checkpoints, 1)
        assert committed == []
        poll_until(checkpoints, lambda: committed == [1])
        save(checkpoints, 2)
        checkpoints.wait()
        assert committed == [1, 2]
        checkpoints.wait()
        save(checkpoints, 3)
    assert committed == [1, 2, 3]
    assert SavedSteps(tmp_path).read_config(3) == CONFIG


def test_the_newest_and_the_best_are_kept(tmp_path):
    losses = {1: None, 2: 3.0, 3: float("nan"), 4: 2.0, 5: None, 6: 2.5, 7: None, 8: None}
    kept = {}
    for part in [(1, 2, 3, 4, 5), (6, 7, 8)]:  # a resumed run knows the earlier losses
        with open_checkpoints(tmp_path) as checkpoints:
            for step in part:
                save(checkpoints, step, eval_loss=losses[step])
                checkpoints.wait()
                kept[step] = sorted(int(path.name) for path in tmp_path.iterdir())
    assert kept[3] == [2, 3]
    assert kept[4] == [3, 4]
    assert kept[5] == [4, 5]
    assert kept[8] == [4, 7, 8]


def test_a_saved_step_is_not_overwritten(tmp_path):
    with open_checkpoints(saved(tmp_path, 5)) as checkpoints:
        with pytest.raises(UserError, match="step 5 is already saved"):
            save(checkpoints, 5)


# --- Failure -------------------------------------------------------------------------------


def test_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write checkpoints to .*: Not a directory"):
        Checkpoints(tmp_path / "file" / "below", keep=1, on_commit=print)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:  # whom permission bits do not stop
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="Permission denied"):
            Checkpoints(locked, keep=1, on_commit=print)
    finally:
        if root:
            os.seteuid(0)


def noise(mesh, megabytes):
    """A state that does not compress."""
    values = np.random.default_rng(0).normal(size=megabytes << 17)
    return {
        "x": jax.device_put(values.astype(np.float64).view(np.float32), NamedSharding(mesh, P()))
    }


def test_a_failed_write_is_said_at_poll(tmp_path, capfd):
    """No file may grow beyond 1 MB, as if the disk were full; earlier steps stay."""
    mesh = make_mesh((1, 1, 1))
    committed = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_checkpoints(tmp_path, keep=1, on_commit=committed.append) as checkpoints:
        save(checkpoints, 10)
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
            save(checkpoints, 20, noise(mesh, 4))
            with pytest.raises(UserError) as error:
                poll_until(checkpoints, lambda: False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(error.value) == (
            "step 20 could not be saved: File too large; "
            f"the last good checkpoint is step 10 in {tmp_path / '10'}"
        )
        assert committed == [10]
        assert [path.name for path in tmp_path.iterdir()] == ["10"]
        checkpoints.poll()  # said once
        save(checkpoints, 20, noise(mesh, 4))
    assert committed == [10, 20]
    assert capfd.readouterr() == ("", "")


def child_fills_the_disk(directory, mount):
    directory = Path(directory)
    if mount == "yes":
        mounted = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
        subprocess.run(mounted, check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with open_checkpoints(directory, on_commit=lambda step: print("saved", step)) as checkpoints:
        save(checkpoints, 10)
        checkpoints.wait()
        try:
            save(checkpoints, 20, noise(make_mesh((1, 1, 1)), 8))
            poll_until(checkpoints, lambda: False)
        except UserError as error:
            print(error)
    steps = SavedSteps(directory)
    assert_same(restore(steps, 10)[0], make_state(10))
    print("latest", steps.latest())


def test_full_disk(tmp_path):  # case 9
    # In a mount namespace of its own, which a kernel may refuse: then a limit on file size.
    mounts = ["unshare", "--map-root-user", "--mount"]
    probe = [*mounts, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    works = shutil.which("unshare") and subprocess.run(probe, capture_output=True).returncode == 0
    child = run_child(
        "child_fills_the_disk", tmp_path, "yes" if works else "no", prefix=mounts if works else []
    )
    out, err = child.communicate(timeout=60)
    assert out.splitlines() == [
        "saved 10",
        f"step 20 could not be saved: {'No space left on device' if works else 'File too large'}; "
        f"the last good checkpoint is step 10 in {tmp_path / '10'}",
        "latest 10",
    ]
    assert err == ""


def child_leaves_without_closing(directory):
    save(Checkpoints(Path(directory), keep=1, on_commit=print), 5)


def test_a_save_lost_at_exit_is_said(tmp_path):
    out, err = run_child("child_leaves_without_closing", tmp_path).communicate(timeout=60)
    lost = SavedSteps(tmp_path).latest() is None
    assert (out, "step 5 could not be saved: " in err) == (("", True) if lost else ("5\n", False))


def test_a_directory_that_vanishes_is_said(tmp_path):  # case 45
    directory = tmp_path / "checkpoints"
    with open_checkpoints(directory) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        directory.rename(tmp_path / "gone")
        directory.write_text("")
        with pytest.raises(UserError, match="step 2 could not be saved: .*no earlier checkpoint"):
            save(checkpoints, 2)
            checkpoints.wait()


# --- Damage --------------------------------------------------------------------------------


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def largest(directory):
    return max(directory.rglob("state/d/*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda d: truncate(largest(d)), "file state/d/[0-9a-f]+ is damaged"),
        (lambda d: largest(d).unlink(), "file state/d/[0-9a-f]+ is missing"),
        (lambda d: (d / "state/_METADATA").unlink(), "file state/_METADATA is missing"),
        (lambda d: shutil.rmtree(d / "state"), "file state/.* is missing"),
        (lambda d: truncate(d / "run.json"), "file run.json is damaged"),
        (lambda d: truncate(d / "manifest.json"), "file manifest.json is damaged"),
        (lambda d: (d / "manifest.json").unlink(), "file manifest.json is missing"),
        (lambda d: (shutil.rmtree(d), d.mkdir()), "file manifest.json is missing"),
    ],
)
def test_damaged_step(tmp_path, damage, complaint):  # case 9
    damage(saved(tmp_path, 10, 20) / "20")
    committed = []
    with open_checkpoints(tmp_path, keep=1, on_commit=committed.append) as checkpoints:
        for use in (lambda: restore(checkpoints, 20), lambda: checkpoints.read_config(20)):
            with pytest.raises(UserError, match=f"step 20: {complaint}"):
                use()
        assert checkpoints.latest() == 10
        assert len(checkpoints.skipped) == 1
        assert checkpoints.skipped[0].startswith("step 20: file ")
        save(checkpoints, 15)
        checkpoints.wait()
        # The damaged one took no place among those kept, and 15 is not behind it.
        assert {path.name for path in tmp_path.iterdir()} == {"15", "20"}
        save(checkpoints, 20)
    assert committed == [15, 20]
    assert_same(restore(SavedSteps(tmp_path), 20)[0], make_state(20))


def test_orbax_own_notes_are_not_needed(tmp_path):
    saved(tmp_path, 10)
    truncate(tmp_path / "10/_CHECKPOINT_METADATA")
    with open_checkpoints(tmp_path) as checkpoints:
        assert_same(restore(checkpoints, 10)[0], make_state(10))
        save(checkpoints, 20)


def test_no_flipped_bit_passes(tmp_path):
    """Orbax alone loads more than half of such files without a word."""
    saved(tmp_path, 5)
    random.seed(0)
    refused = 0
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in [path for path in files for _ in range(5)]:
        good = path.read_bytes()
        bad = bytearray(good)
        bad[random.randrange(len(bad))] ^= 1 << random.randrange(8)
        path.write_bytes(bad)
        try:
            assert_same(restore(SavedSteps(tmp_path), 5)[0], make_state(5))
        except UserError as error:
            assert str(error).startswith("step 5: file ")
            refused += 1
        else:
            # Nothing is read from the two files that orbax writes after the manifest.
            assert path.name in ("_CHECKPOINT_METADATA", "commit_success.txt"), path
        path.write_bytes(good)
    assert refused >= 5 * (len(files) - 2)


def test_absent_step(tmp_path):
    assert SavedSteps(tmp_path / "nothing").latest() is None
    with pytest.raises(UserError, match="step 7: there is no such checkpoint, in"):
        restore(SavedSteps(tmp_path), 7)


def test_what_a_killed_save_left_is_removed_and_said(tmp_path):  # case 9
    saved(tmp_path, 10)
    shutil.copytree(tmp_path / "10", tmp_path / "20.orbax-checkpoint-tmp")
    assert SavedSteps(tmp_path).latest() == 10  # looking on does not disturb a run that saves
    assert (tmp_path / "20.orbax-checkpoint-tmp").exists()
    with open_checkpoints(tmp_path) as checkpoints:
        assert [path.name for path in tmp_path.iterdir()] == ["10"]
        assert checkpoints.latest() == 10
        assert checkpoints.skipped == ["step 20: its save was interrupted"]
        save(checkpoints, 20)
        checkpoints.wait()
        assert (checkpoints.latest(), checkpoints.skipped) == (20, [])


def child_saves_for_ever(directory):
    mesh = make_mesh((2, 2, 2))

    def on_commit(step):
        print("saved", step, flush=True)

    with open_checkpoints(Path(directory), on_commit=on_commit) as checkpoints:
        step = (checkpoints.latest() or 0) + 1
        while True:
            save(checkpoints, step, put(make_state(step, size=1 << 12), mesh))
            checkpoints.wait()
            step += 1


def test_kill_while_saving(tmp_path):  # case 9
    random.seed(0)
    target = target_like(make_state(0, size=1 << 12), make_mesh((1, 1, 1)))
    newest = 0
    for _ in range(5):
        child = run_child("child_saves_for_ever", tmp_path)
        assert child.stdout.readline() == f"saved {newest + 1}\n"
        time.sleep(random.random() / 10)
        child.send_signal(signal.SIGKILL)
        out, err = child.communicate(timeout=30)
        reported = int(out.split()[-1]) if out else newest + 1
        newest = SavedSteps(tmp_path).latest()
        assert (newest in (reported, reported + 1), err) == (True, "")
        state, data_state = SavedSteps(tmp_path).restore(newest, target)
        assert_same(state, make_state(newest, size=1 << 12))
        assert data_state == {"position": newest}
    with open_checkpoints(tmp_path) as checkpoints:
        assert not list(tmp_path.glob("*tmp*"))
        save(checkpoints, newest + 1, put(make_state(newest + 1), make_mesh((2, 2, 2))))
