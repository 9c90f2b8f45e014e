"""How several processes end: if one fails so do all, each with one line and none waiting for good.

A process that fails tells the others, beside the devices, where they may wait for it in a
collective; each has a thread that listens. With one process nothing here does anything.
"""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from jax.errors import JaxRuntimeError

from switchjax import processes
from switchjax.errors import ElsewhereError, NonFiniteError, UserError

# Seconds.
GRACE = 5  # for a process to fail by itself once another one has
UNWINDING = 10  # for a process that has failed to close its files
LAST_WORDS = 1  # between a process's word that it goes, and its end

_ONE_LINE = (UserError, NonFiniteError, ElsewhereError)
_SAYS_LOST = re.compile(r"gloo|NCCL|coordination", re.IGNORECASE)

_listener: "_Listener | None" = None
_last_line_said = threading.Lock()


def listen() -> None:
    """From now on a failure of any process ends this one."""
    global _listener
    _listener = _Listener(processes.new_place("end"))


@contextmanager
def telling_others() -> Iterator[None]:
    """If this process fails in here, all others end: none waits for it in a collective.

    They have `GRACE` seconds to fail by themselves. This one has `UNWINDING` seconds for what
    follows, and then ends whatever it waits for.

    Raises:
        ElsewhereError: in place of an error that only says that another process is gone.
    """
    try:
        yield
    except BaseException as error:
        failure = error if _listener is None else _listener.failed(error)
        if failure is error:
            raise
        raise failure from error


def finish() -> None:
    """The good end: waits until all processes are here, and listens no more."""
    global _listener
    if _listener is not None:
        processes.meet()
        _listener.stop()
        _listener = None


@contextmanager
def leaving() -> Iterator[None]:
    """Of a command: if it fails in here as one of several processes, it leaves with its line."""
    try:
        yield
    except Exception as error:
        if _listener is None:
            raise
        if not isinstance(error, _ONE_LINE):
            traceback.print_exc()
        _leave(_status_of(error), _line_of(error))


def last_line(line: str) -> None:
    """Prints it on stderr, unless another thread has already said why this process ends."""
    if _last_line_said.acquire(blocking=False):
        print(f"switchjax: {line}", file=sys.stderr, flush=True)


def after(seconds: float, act: Callable[[], None]) -> threading.Timer:
    """Will call `act`, in a thread that does not keep the process alive."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


class _Listener:
    """Hears of the failure of any process, and tells the others of one here."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._failing = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def failed(self, error: BaseException) -> BaseException:
        """What this process shall raise once it has failed with `error`; begins its end."""
        if self._failing.is_set():
            return error
        self._failing.set()
        with suppress(JaxRuntimeError):  # process 0 may be gone, and the store with it
            if isinstance(error, JaxRuntimeError) and _SAYS_LOST.search(str(error)):
                # The process that is gone has said why, if it could; that may be under way.
                error = _elsewhere(self._first_note(GRACE)) or _gone(error)
            self._tell(error)
        after(UNWINDING, lambda: _leave(_status_of(error), _line_of(error)))
        return error

    def stop(self) -> None:
        """Ends listening, in all processes."""
        if processes.is_writer():
            processes.store().key_value_set(self._place, json.dumps(None))
        self._thread.join()

    def part(self) -> None:
        """Says that this process is as good as gone; process 0 waits for the others to say so.

        JAX would end the others with a stack of C++ frames if process 0 went first.
        """
        store = processes.store()
        if not processes.is_writer():
            store.key_value_set(f"{self._place}/gone/{processes.index()}", "")
            return
        deadline = time.monotonic() + GRACE + UNWINDING
        for other in range(1, processes.count()):
            left = max(deadline - time.monotonic(), 0.001)
            store.blocking_key_value_get(f"{self._place}/gone/{other}", int(left * 1000))
        time.sleep(LAST_WORDS)

    def _tell(self, error: BaseException) -> None:
        note = {"line": _line_of(error), "status": _status_of(error)}
        with suppress(JaxRuntimeError):  # another process has told first
            text = json.dumps(note | {"process": processes.index()})
            processes.store().key_value_set(self._place, text)

    def _listen(self) -> None:
        try:
            while (note := self._first_note(processes.PATIENCE)) is None:
                pass
        except JaxRuntimeError:
            return  # JAX was shut down
        failure = _elsewhere(note)
        if failure is not None and not self._failing.wait(GRACE):
            _leave(failure.status, str(failure))

    def _first_note(self, seconds: float) -> dict | None:
        """What was told first, by now or within these seconds; an empty one for a good end."""
        try:
            text = processes.store().blocking_key_value_get(self._place, int(seconds * 1000))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return json.loads(text) or {}


def _elsewhere(note: dict | None) -> ElsewhereError | None:
    if not note or note["process"] == processes.index():
        return None
    return ElsewhereError(f"process {note['process']}: {note['line']}", status=note["status"])


def _gone(error: BaseException) -> ElsewhereError:
    return ElsewhereError(f"another process is gone: {first_line(error)}", status=1)


def _leave(status: int, line: str) -> NoReturn:
    """Ends this process. Python itself would wait for threads that wait for other processes."""
    last_line(line)
    with suppress(JaxRuntimeError):
        if _listener is not None:
            _listener.part()
    sys.stdout.flush()
    os._exit(status)


def _status_of(error: BaseException) -> int:
    if isinstance(error, ElsewhereError):
        return error.status
    return 2 if isinstance(error, UserError) else 1


def _line_of(error: BaseException) -> str:
    if isinstance(error, _ONE_LINE):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Of what an error says."""
    return (str(error).splitlines() or [""])[0]
