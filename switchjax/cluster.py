"""How several processes of one run find each other: by flags, or as a cluster has started them.

A process that nothing says is one of several starts nothing.
"""

import importlib.util
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from switchjax import ending, processes
from switchjax.distributed_config import DistributedConfig
from switchjax.errors import UserError

NAME_PATIENCE = 30  # seconds, for a coordinator's name, which a cluster may publish late

_OMPI, _SLURM, _KUBERNETES = "ompi", "slurm", "k8s"  # JAX's names
_SLURM_NEEDS = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")


def join(config: DistributedConfig | None, agreed: Mapping[str, Any]) -> None:
    """Finds the other processes of this run, if it has any, and waits until all are there.

    Before the first use of a device. A failure of any process then ends all of them.

    Args:
        config: None = as the environment says.
        agreed: what must be the same in all of them; nested, of plain values.

    Raises:
        UserError: the coordinator cannot be, or two processes disagree. Where the others do not
            come for `config.timeout` seconds the process ends, with status 2 and one line.
    """
    if not jax.distributed.is_initialized():  # the program around us may have done it
        config = config or DistributedConfig()
        arguments = _arguments(config, os.environ)
        if arguments is None:
            return
        _keep_stdout_for_python()
        _initialize(arguments, config.timeout)
    ending.listen()
    processes.agree({"num_processes": processes.count(), "jax": jax.__version__, **agreed})


def cluster_of(environment: Mapping[str, str]) -> str | None:
    """JAX's name of what started this process as one of several; None where it is alone."""
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return _OMPI
    # Of the step: a job of many tasks runs its script, and tools in it, once.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and all(name in environment for name in _SLURM_NEEDS):
        return _SLURM
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return _KUBERNETES
    return None


def _arguments(config: DistributedConfig, environment: Mapping[str, str]) -> dict | None:
    """Of `jax.distributed.initialize`; None for a process alone."""
    if config.num_processes == 1:
        return None
    if config.coordinator is not None:
        _check_coordinator(config.coordinator, config.process_id, config.timeout)
        return {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
            "cluster_detection_method": "deactivate",
        }
    cluster = cluster_of(environment)
    if cluster == _OMPI and "OMPI_MCA_orte_hnp_uri" not in environment:
        _require_package("mpi4py", "Open MPI 5")
        cluster = "mpi4py"
    if cluster == _KUBERNETES:
        _require_package("kubernetes", "an indexed Kubernetes job")
    return None if cluster is None else {"cluster_detection_method": cluster}


def _require_package(package: str, cluster: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"to find the other processes of {cluster}, JAX needs the package {package}: "
            "install it, or give --distributed.coordinator, --distributed.num-processes and "
            "--distributed.process-id (--distributed.num-processes 1 to run alone)"
        )


def _check_coordinator(coordinator: str, process_id: int | None, timeout: int) -> None:
    """Finds at once what JAX would find, or not say, at the end of its own patience."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + min(timeout, NAME_PATIENCE)
    while (problem := _name_problem(host.strip("[]"))) is not None:
        if time.monotonic() > deadline:
            raise UserError(f"distributed.coordinator {coordinator}: {problem}")
        time.sleep(1)
    if process_id == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise UserError(
                f"distributed.coordinator {coordinator}: port {port} of this machine: "
                f"{os.strerror(error.errno or 0)}"
            ) from None


def _name_problem(host: str) -> str | None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return error.strerror
    return None


def _initialize(arguments: dict, timeout: int) -> None:
    # JAX's handler would swallow SIGTERM; ours stops all processes after the same step.
    jax.config.update("jax_enable_preemption_service", False)
    where = arguments.get("coordinator_address") or arguments["cluster_detection_method"]

    def give_up() -> None:
        ending.last_line(
            f"not all processes of this run have come together at {where} within {timeout} s: "
            "are all of them started, each with its own number, and do they reach process 0?"
        )
        os._exit(2)

    timer = ending.after(timeout, give_up)
    try:
        # JAX's own time-out ends the process with a stack of C++ frames.
        jax.distributed.initialize(**arguments, initialization_timeout=2 * timeout)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot start several processes: {ending.first_line(error)}") from error
    finally:
        timer.cancel()


def _keep_stdout_for_python() -> None:
    """Gloo reports every connection on C's stdout, in pieces, in the midst of our lines."""
    if sys.stdout is not sys.__stdout__ or sys.stdout.fileno() != 1:
        return  # a notebook's own, or a test's
    sys.stdout.flush()
    ours, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = open(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
