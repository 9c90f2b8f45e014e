"""Several processes of one run, started as a user starts them, against one process.

A launch compiles for seconds: few are made, and all that share a shape share compiled programs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from switchjax import cluster, mesh, processes
from switchjax.config import read_config
from switchjax.distributed_config import DistributedConfig
from switchjax.errors import UserError
from switchjax.layout import Layout
from switchjax.saved_steps import SavedSteps, checkpoint_directory, named_leaves
from switchjax.state import abstract_state

LIMIT = 150  # seconds: a launch that takes longer hangs
STEPS = 6
MORE_STEPS = 8
# A step's evaluation, checkpoint and report fall together.
SMALL = """
    --model.architecture decoder_only --model.d-model 8 --model.d-ff 8 --model.num-heads 8
    --model.d-kv 2 --model.num-layers 1 --model.moe-every 1 --model.dropout 0.1
    --optim.optimizer sgd --optim.learning-rate 0.3 --optim.warmup-steps 2
    --data.batch-size 8 --data.sequence-length 16
    --eval-every 2 --checkpoint-every 2 --eval-batches 2 --keep 9
""".split()
CLOCK = {"seconds", "tokens_per_second"}


class Ended(NamedTuple):
    """How one process ended."""

    status: int
    out: str
    errors: str


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """As a user has it, but that programs are compiled in a hurry, and once."""
    without = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS"}
    return {name: value for name, value in os.environ.items() if name not in without} | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(" ".join(str(n * n % 97) for n in range(3000)))
    return path


@pytest.fixture(scope="module")
def start(environment):
    """Starts `switchjax WORDS` in several processes.

    Args:
        each: further words of each process.
        late: seconds between the first process and the others.
        small_files: the process that cannot write a file of more than a few kB.
        cluster: gives the environment of each, in place of flags.
    """
    started = []

    def run(count, *words, each=None, late=0, small_files=None, cluster=None):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        group = []
        for process in range(count):
            flags = distributed(f"127.0.0.1:{port}", count, process)
            flags = flags if count > 1 and cluster is None else []
            around = {} if cluster is None else cluster(count, process)
            around = environment | around | {"JAX_COORDINATOR_PORT": str(port)}
            own = [] if each is None else each[process]
            command = [sys.executable, "-c", "from switchjax.cli import main; main()"]
            command += [*map(str, words), *flags, *own]
            if process == small_files:
                command = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *command]
            time.sleep(late if process else 0)
            pipe = subprocess.PIPE
            group.append(subprocess.Popen(command, env=around, stdout=pipe, stderr=pipe, text=True))
            started.append(group[-1])
        return group

    yield run
    for process in started:
        process.kill()


def distributed(address, count, process):
    return [
        f"--distributed.coordinator={address}",
        f"--distributed.num-processes={count}",
        f"--distributed.process-id={process}",
    ]


def ended(group) -> list[Ended]:
    deadline = time.monotonic() + LIMIT
    results = []
    for process in group:
        out, errors = process.communicate(timeout=deadline - time.monotonic())
        results.append(Ended(process.returncode, out, errors))
    return results


@pytest.fixture(scope="module")
def begin(start, text):
    """Starts to train."""

    def run(count, out, *words, **how):
        return start(count, "train", *SMALL, "--data.files", text, "--out", out, *words, **how)

    return run


@pytest.fixture(scope="module")
def one(begin, tmp_path_factory):
    """The run of a single process with all eight devices: what the others must equal."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert_well(ended(begin(1, out, "--steps", MORE_STEPS)))
    return out


@pytest.fixture(scope="module")
def two(begin, tmp_path_factory):
    """A shorter run of two processes with four devices each, one late; and what they said."""
    out = tmp_path_factory.mktemp("two") / "run"
    results = ended(begin(2, out, "--steps", STEPS, late=3))  # case 54
    assert_well(results)
    return out, results


@pytest.fixture
def copy(two, tmp_path):
    return Path(shutil.copytree(two[0], tmp_path / "run"))


def assert_well(results):
    assert [result.status for result in results] == [0] * len(results), results


def lines_of(out, name="metrics.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def assert_same_lines(out, other, steps):
    """The same numbers but for rounding, and the same routing and drops exactly."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = [line for line in lines_of(out, name) if line["step"] in steps]
        others = [line for line in lines_of(other, name) if line["step"] in steps]
        assert len(lines) == len(others) > 0
        for line, expected in zip(lines, others, strict=True):
            assert line.keys() == expected.keys()
            for key in line.keys() - CLOCK:
                exact = isinstance(line[key], int) or key in ("drop_fraction", "load_max")
                close = pytest.approx(expected[key], rel=1e-4 if key == "grad_norm" else 1e-5)
                assert line[key] == (expected[key] if exact else close), (key, line, expected)


def read_state(out, step):
    config = read_config(out)
    with jax.set_mesh(mesh.make_mesh(mesh.read_mesh(config.mesh))):
        target = abstract_state(config, Layout())
        state, position = SavedSteps(checkpoint_directory(out)).restore(step, target)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}, position


def assert_same_state(out, other, step):
    (state, position), (expected, other_position) = read_state(out, step), read_state(other, step)
    assert position == other_position
    assert state.keys() == expected.keys()
    for name in state:
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


# --- The same run ---------------------------------------------------------------------------


@pytest.mark.mesh
def test_two_processes_give_the_numbers_of_one(one, two):  # cases 36, 54, 55
    """Report, evaluation and checkpoint fall on the same steps, and no process waits for good."""
    out, _ = two
    assert_same_lines(out, one, range(1, STEPS + 1))
    assert_same_state(out, one, STEPS)


def test_one_process_alone_writes_and_prints(one, two):
    out, (first, second) = two
    assert f"step {STEPS} saved" in first.out and "step 2 saved" in first.out
    assert second.out == "" and first.errors == second.errors == ""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        steps = [line["step"] for line in lines_of(out, name)]
        assert steps == sorted(set(steps))
    assert (out / "expert_load.png").exists()
    found, expected = ({path.name for path in run.iterdir()} for run in (out, one))
    assert found == expected
    assert {int(path.name) for path in (out / "checkpoints").iterdir()} == {2, 4, 6}


def test_four_processes_go_on_where_two_stopped(begin, one, copy):  # cases 55, 56
    """On a mesh on which two processes each hold the same rows."""
    words = ("--resume", "--steps", MORE_STEPS, "--mesh", "data=2,model=4")
    results = ended(begin(4, copy, *words))
    assert_well(results)
    assert f"resuming after step {STEPS}" in results[0].out
    assert_same_lines(copy, one, range(1, MORE_STEPS + 1))
    assert_same_state(copy, one, MORE_STEPS)


def test_one_process_goes_on_where_two_stopped(begin, one, copy):  # case 56
    assert_well(ended(begin(1, copy, "--resume", "--steps", MORE_STEPS)))
    assert_same_lines(copy, one, range(1, MORE_STEPS + 1))
    assert_same_state(copy, one, MORE_STEPS)


def test_evaluation_by_two_processes(start, two):
    out, _ = two
    first, second = ended(start(2, "eval", out, "--batches", 2))
    assert_well([first, second])
    found = {name: float(line[16:]) for line in first.out.splitlines() for name in [line[:16]]}
    last = lines_of(out, "evaluations.jsonl")[-1]
    assert last["step"] == found["step".ljust(16)] == STEPS
    for name in ("ce", "accuracy", "targets", "load_max"):
        assert found[name.replace("_", " ").ljust(16)] == pytest.approx(last[name], rel=1e-5)
    assert second.out == ""


# --- Ends -----------------------------------------------------------------------------------


def test_a_signal_to_one_process_stops_all_after_the_same_step(begin, copy):
    group = begin(2, copy, "--resume", "--steps", 10**6, "--eval-every", 10**6)
    wait_for_step(copy, STEPS + 3)
    group[1].send_signal(signal.SIGTERM)
    results = ended(group)
    assert [result.status for result in results] == [128 + signal.SIGTERM] * 2, results
    last = lines_of(copy)[-1]["step"]
    assert f"stopped after step {last}, which is saved" in results[0].out
    assert SavedSteps(checkpoint_directory(copy)).latest() == last
    assert [result.errors for result in results] == ["", ""]


def wait_for_step(out, step):
    deadline = time.monotonic() + LIMIT
    while lines_of(out)[-1]["step"] < step:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.usefixtures("two")  # its programs are cached whole; these would be cut off
@pytest.mark.parametrize("process", [0, 1])
def test_a_failed_write_in_one_process_ends_all_with_one_line(begin, tmp_path, process):  # case 45
    results = ended(begin(2, tmp_path / "run", "--steps", 10**6, small_files=process))
    failed, other = results[process], results[1 - process]
    assert failed.status == other.status == 2, results
    (line,) = failed.errors.splitlines()
    assert "File too large" in line
    assert other.errors == f"switchjax: process {process}: {line.removeprefix('switchjax: ')}\n"


@pytest.mark.parametrize(
    ("each", "line"),
    [
        ([["--seed=1"], ["--seed=2"]], r"processes 0 and 1 disagree: run.seed is 1 and 2"),
        (
            [[], ["--distributed.num-processes=3"]],
            "processes 0 and 1 disagree: num_processes is 2 and 3",
        ),
    ],
)
def test_processes_that_disagree(begin, tmp_path, each, line):
    results = ended(begin(2, tmp_path / "run", each=each))
    assert [result.status for result in results] == [2, 2]
    assert {result.errors for result in results} == {f"switchjax: {line}\n"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("process", [0, 1])
def test_the_others_do_not_come(start, text, tmp_path, process):
    words = ["--distributed.timeout", "2", *distributed("127.0.0.1:1", 2, process)]
    if not process:
        with socket.create_server(("127.0.0.1", 0)) as free:
            words[2] = f"--distributed.coordinator=127.0.0.1:{free.getsockname()[1]}"
    (result,) = ended(start(1, "train", *SMALL, "--out", tmp_path / "run", *words))
    assert result.status == 2
    (line,) = result.errors.splitlines()
    assert "not all processes of this run have come together at 127.0.0.1:" in line
    assert "within 2 s" in line


def test_an_address_that_cannot_be():
    def refused(coordinator, process_id=1):
        config = DistributedConfig(
            coordinator=coordinator, num_processes=2, process_id=process_id, timeout=1
        )
        with pytest.raises(UserError) as error:
            cluster.join(config, {})
        return str(error.value)

    line = refused("no-such-machine.invalid:1234")
    assert line.startswith("distributed.coordinator no-such-machine.invalid:1234: ")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(f"127.0.0.1:{port}", process_id=0)
    assert f"port {port} of this machine: Address already in use" in line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"coordinator": "a:1"}, r"each needs --distributed.num-processes, .*process-id too"),
        ({"num_processes": 2}, r"each needs --distributed.coordinator, .*process-id too"),
        ({"coordinator": "a"}, r"coordinator must be host:port, got 'a'"),
        ({"coordinator": "a:70000"}, r"coordinator must be host:port, got 'a:70000'"),
        ({"process_id": 2}, r"process_id must be .* below distributed.num_processes 2, got 2"),
        ({"num_processes": 0}, r"num_processes must be positive, got 0"),
        ({"timeout": 0}, r"timeout must be positive, got 0"),
    ],
)
def test_options_that_cannot_be(values, line):
    whole = {"coordinator": "a:1", "num_processes": 2, "process_id": 0}
    partial = line.startswith("each")
    with pytest.raises(UserError, match=line):
        DistributedConfig(**(values if partial else whole | values))


def test_devices_of_each_process():  # case 25
    shape = mesh.read_mesh("data8")
    with pytest.raises(UserError, match="but --devices is 8 in each of 2 processes"):
        mesh.simulate_devices(8, shape, num_processes=2)
    with pytest.raises(UserError, match="needs 8 devices .* which 3 processes cannot share"):
        mesh.simulate_devices(None, shape, num_processes=3)


# --- Clusters -------------------------------------------------------------------------------


def slurm(count, process):
    """What `srun` gives a task."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "127.0.0.1,node2",
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


def open_mpi(count, process):
    """What `mpirun` of Open MPI 4 gives a process."""
    return {
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(process),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
    }


@pytest.mark.parametrize("cluster", [slurm, open_mpi])
def test_processes_of_a_cluster_find_each_other(begin, tmp_path, cluster):
    """They know it when they tell of each other's mistakes."""
    results = ended(begin(2, tmp_path, each=[["--seed=1"], ["--seed=2"]], cluster=cluster))
    assert {result.errors for result in results} == {
        "switchjax: processes 0 and 1 disagree: run.seed is 1 and 2\n"
    }


SLURM = slurm(8, 3)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (SLURM, "slurm"),
        # A tool in a job's script, and a step of one task in a job of many.
        ({name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID")}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "ompi"),
        (SLURM | {"OMPI_COMM_WORLD_SIZE": "2"}, "ompi"),  # mpirun starts its own step
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "k8s"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a notebook in a pod
    ],
)
def test_clusters_by_their_environment(environment, expected):
    assert cluster.cluster_of(environment) == expected


def test_a_cluster_that_needs_a_package(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # as where it is not installed
    with pytest.raises(UserError, match="needs the package kubernetes: install it, or give"):
        cluster.join(None, {})
    cluster.join(DistributedConfig(num_processes=1), {})  # alone, in a sweep of pods
    assert processes.count() == 1
