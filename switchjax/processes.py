"""Several processes of one run: how they find each other, agree, and end together.

Where there is only one, which is the usual case, nothing is started and all answers are at hand.
Process 0 is the *writer*: files of the run's directory and lines on the console are its own.
What all must do in step, collectives above all, no process may leave out.

Words go through the service that JAX runs for its own start, beside the devices: they arrive
before there is a device, from any thread, and while a collective hangs.
"""

import importlib.util
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import jax

# JAX has no public name for its key-value store; orbax takes it from the same place.
from jax._src import distributed
from jax.errors import JaxRuntimeError

from switchjax.config import DistributedConfig
from switchjax.errors import ElsewhereError, NonFiniteError, UserError

# Seconds.
PATIENCE = 1800  # for a process that reads, compiles or saves longer than the others
NAME_PATIENCE = 30  # for a coordinator's name, which a cluster may publish late
GRACE = 5  # for a process to end by itself once another one has failed
UNWINDING = 10  # for a process that has failed to close its files

_OMPI, _SLURM, _KUBERNETES = "ompi", "slurm", "k8s"  # JAX's names
_SLURM_NEEDS = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")

_ONE_LINE = (UserError, NonFiniteError, ElsewhereError)
_SAYS_LOST = re.compile(r"gloo|NCCL|coordination", re.IGNORECASE)

_rounds = itertools.count()
_end: "_End | None" = None
_line_said = threading.Lock()


def count() -> int:
    """Processes of this run. Starts no device, unlike JAX's function."""
    return distributed.global_state.num_processes


def index() -> int:
    """Number of this process, from 0."""
    return distributed.global_state.process_id


def is_writer() -> bool:
    """Whether this process writes and prints for all."""
    return index() == 0


# --- Start ----------------------------------------------------------------------------------


def join(config: DistributedConfig | None, agreed: Mapping[str, Any]) -> None:
    """Finds the other processes of this run, if it has any, and waits until all are there.

    Before the first use of a device. A failure of any process then ends all of them.

    Args:
        agreed: what must be the same in all of them; nested, of plain values.

    Raises:
        UserError: the coordinator cannot be, or two processes disagree. Where the others are
            silent for `config.timeout` seconds the process ends, with status 2 and one line.
    """
    global _end
    if not jax.distributed.is_initialized():  # the program around us may have done it
        config = config or DistributedConfig()
        arguments = _arguments(config, os.environ)
        if arguments is None:
            return
        _initialize(arguments, config.timeout)
    _end = _End(f"switchjax/end/{next(_rounds)}")
    agree({"num_processes": count(), "jax": jax.__version__, **agreed})


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
            "--distributed.process-id (--distributed.num-processes 1 to train alone)"
        )


def _check_coordinator(coordinator: str, process_id: int | None, timeout: int) -> None:
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + min(timeout, NAME_PATIENCE)
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"distributed.coordinator {coordinator}: {error.strerror}"
                ) from None
            time.sleep(1)
    if process_id == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise UserError(
                f"distributed.coordinator {coordinator}: port {port} of this machine: "
                f"{os.strerror(error.errno or 0)}"
            ) from None


def _initialize(arguments: dict, timeout: int) -> None:
    _keep_stdout_for_python()
    # Its handler would swallow SIGTERM; ours stops all processes after the same step.
    jax.config.update("jax_enable_preemption_service", False)
    where = arguments.get("coordinator_address") or arguments["cluster_detection_method"]

    def give_up() -> None:
        _say_last(
            f"not all processes of this run have come together at {where} within {timeout} s: "
            "are all of them started, each with its own number, and can they reach process 0?"
        )
        os._exit(2)

    timer = _in_thread_after(timeout, give_up)
    try:
        # JAX would end the process by its own time-out with a stack of C++ frames.
        jax.distributed.initialize(**arguments, initialization_timeout=2 * timeout)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot start several processes: {_first_line(error)}") from error
    finally:
        timer.cancel()


def _keep_stdout_for_python() -> None:
    """Gloo reports every connection on C's stdout, in pieces, in the midst of our lines."""
    if sys.stdout.fileno() != 1:
        return  # a notebook's own, or a test's
    sys.stdout.flush()
    ours, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = open(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


# --- Agreement ------------------------------------------------------------------------------


def agree(values: Mapping[str, Any]) -> None:
    """Compares nested plain values over all processes.

    Raises:
        UserError: in all of them, with the first difference: its name and both values.
    """
    texts = gather(json.dumps(values, default=str))
    if len(set(texts)) <= 1:
        return
    other = next(p for p, text in enumerate(texts) if text != texts[0])
    one, two = (dict(_flat(json.loads(texts[p]))) for p in (0, other))
    name = next(n for n in {**one, **two} if one.get(n) != two.get(n))
    raise UserError(
        f"processes 0 and {other} disagree: {name} is {one.get(name)!r} and {two.get(name)!r}"
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def gather(text: str) -> list[str]:
    """What each process hands in, in their order; waits for all."""
    if count() == 1:
        return [text]
    place = f"switchjax/gather/{next(_rounds)}"
    _client().key_value_set(f"{place}/{index():09}", text)
    _wait(f"{place}/all")
    return [text for _, text in sorted(_client().key_value_dir_get(f"{place}/"))]


def from_writer(compute: Callable[[], Any]) -> Any:
    """What `compute` gives in process 0, in all of them; a value for JSON."""
    if count() == 1:
        return compute()
    place = f"switchjax/from_writer/{next(_rounds)}"
    if is_writer():
        value = compute()
        _client().key_value_set(place, json.dumps(value))
        return value
    return json.loads(_client().blocking_key_value_get(place, PATIENCE * 1000))


def meet() -> None:
    """Waits until all processes are here.

    On CPU the first collective of two processes fails if one comes 30 seconds after the other,
    whatever is configured: they meet before it.
    """
    if count() > 1:
        _wait(f"switchjax/meet/{next(_rounds)}")


def _wait(barrier: str) -> None:
    try:
        _client().wait_at_barrier(barrier, PATIENCE * 1000)
    except JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise UserError(f"another process did not come within {PATIENCE} s") from error


def _client() -> Any:
    return distributed.global_state.client


# --- End ------------------------------------------------------------------------------------


@contextmanager
def telling_others() -> Iterator[None]:
    """If this process fails in here all others end, too: none waits for it in a collective.

    They have `GRACE` seconds to fail by themselves, and this one has `UNWINDING` seconds after
    which it ends whatever it waits for.

    Raises:
        ElsewhereError: in place of an error that only says that another process is gone.
    """
    try:
        yield
    except BaseException as error:
        failure = error if _end is None else _end.failed(error)
        if failure is error:
            raise
        raise failure from error


def finish() -> None:
    """The good end: waits until all processes are here, and listens for failures no more."""
    global _end
    if _end is not None:
        meet()
        _end.all_is_well()
        _end = None


@contextmanager
def leaving() -> Iterator[None]:
    """Of a command: one of several processes that fails in here leaves with its line."""
    try:
        yield
    except Exception as error:
        if _end is None:
            raise
        if not isinstance(error, _ONE_LINE):
            traceback.print_exc()
        leave(_status_of(error), _line_of(error))


def leave(status: int, line: str) -> NoReturn:
    """Ends this process with a last line on stderr, one of several at once.

    Python would wait for threads that wait for processes that are gone. Process 0 goes last: JAX
    ends the others with a stack of C++ frames when it is gone.
    """
    _say_last(line)
    with suppress(JaxRuntimeError):
        if _end is not None:
            _end.part()
    sys.stdout.flush()
    os._exit(status)


class _End:
    """Listens for the failure of any process, and tells the others of one here."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._failing = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def failed(self, error: BaseException) -> BaseException:
        """What this process shall say once it has failed with `error`; begins its end."""
        if self._failing.is_set():
            return error
        self._failing.set()
        lost = isinstance(error, JaxRuntimeError) and _SAYS_LOST.search(str(error))
        note = {"process": index(), "line": _line_of(error), "status": _status_of(error)}
        with suppress(JaxRuntimeError):
            # The process that is gone had its reason told before; it may be under way.
            first = self._note(GRACE if lost else 0)
            if first is None:
                with suppress(JaxRuntimeError):  # another one was faster
                    _client().key_value_set(self._place, json.dumps(note))
            elif lost:
                error = _elsewhere(first)
        if lost and not isinstance(error, ElsewhereError):
            error = ElsewhereError(f"another process is gone: {_first_line(error)}", status=1)
        _in_thread_after(UNWINDING, lambda: leave(_status_of(error), _line_of(error)))
        return error

    def all_is_well(self) -> None:
        """Ends listening, in all processes."""
        if is_writer():
            _client().key_value_set(self._place, json.dumps(None))
        self._thread.join()

    def part(self) -> None:
        """Says that this process is gone; process 0 waits for the others to say so."""
        if not is_writer():
            _client().key_value_set(f"{self._place}/gone/{index()}", "")
            return
        deadline = time.monotonic() + GRACE + UNWINDING
        for other in range(1, count()):
            left = max(deadline - time.monotonic(), 0.001)
            _client().blocking_key_value_get(f"{self._place}/gone/{other}", int(left * 1000))

    def _listen(self) -> None:
        try:
            while (note := self._note(PATIENCE)) is None:
                pass
        except JaxRuntimeError:
            return  # JAX was shut down
        if not note or note["process"] == index() or self._failing.wait(GRACE):
            return
        failure = _elsewhere(note)
        leave(failure.status, str(failure))

    def _note(self, seconds: float) -> dict | None:
        """What the first process that failed told within these seconds; {} for a good end."""
        try:
            text = _client().blocking_key_value_get(self._place, int(seconds * 1000) + 1)
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return json.loads(text) or {}


def _elsewhere(note: dict) -> ElsewhereError:
    return ElsewhereError(f"process {note['process']}: {note['line']}", status=note["status"])


def _status_of(error: BaseException) -> int:
    if isinstance(error, ElsewhereError):
        return error.status
    return 2 if isinstance(error, UserError) else 1


def _line_of(error: BaseException) -> str:
    if isinstance(error, _ONE_LINE):
        return str(error)
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _say_last(line: str) -> None:
    """Prints it, unless another thread has already said why this process ends."""
    if _line_said.acquire(blocking=False):
        print(f"switchjax: {line}", file=sys.stderr, flush=True)


def _in_thread_after(seconds: float, act: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer
