"""Saving a run: when a step counts as saved, and which saved steps stay.

A step is written under a temporary name, with a manifest of its files, and renamed at the end: a
directory named by a plain number was complete when it got that name. `saved_steps` reads it.
"""

import atexit
import contextlib
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import PreservationContext

from switchjax import processes
from switchjax.config import RunConfig, to_dict
from switchjax.errors import UserError
from switchjax.saved_steps import (
    MANIFEST,
    RUN,
    STATE,
    PyTree,
    SavedSteps,
    damage_in,
    digests,
    eval_loss_of,
    named_leaves,
)

_TEMPORARY = ocp.path.atomicity.TMP_DIR_SUFFIX


@dataclass(frozen=True)
class _Pending:
    """A save that may not be on disk yet."""

    step: int
    run: str


class Checkpoints(SavedSteps):
    """Saves in the background; keeps the newest steps and the best. One run a directory.

    All processes of the run save together, each its own part of the arrays; process 0 seals.
    `on_commit(step)` is called once a step is on disk, from `poll`, `save`, `wait` or `close`;
    a failed write is raised from the first of them that comes after it.
    """

    def __init__(self, directory: Path, *, keep: int, on_commit: Callable[[int], None]) -> None:
        super().__init__(directory)
        _require_writable(self.directory)
        self._require_shared()
        logging.getLogger("absl").addFilter(_is_news)
        self._interrupted = self._remove_temporary()
        self._on_commit = on_commit
        self._barrier = ocp.multihost.get_barrier_sync_fn()
        self._failed_here = False
        self._pending: _Pending | None = None
        self._losses = {step: eval_loss_of(self.path(step)) for step in self._steps()}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_NewestAndBest(keep, self._losses, self._is_sound),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._seal,
                barrier_sync_fn=self._wait_for_others if processes.count() > 1 else None,
                # Else threads that wait for a directory hold up the exit of a failed run
                # for five minutes.
                create_directories_asynchronously=False,
            ),
            # Its own bookkeeping is not needed, and must not fail on a damaged step.
            lightweight_initialize=True,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        # Too late to save anything, but not to say that something was lost.
        atexit.register(self._finish)

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data_state: dict,
        config: RunConfig,
        eval_loss: float | None,
    ) -> None:
        """Starts saving; `state` may be donated as soon as this returns.

        Waits for an earlier save first. A damaged checkpoint of the same step is replaced.
        """
        self._finish()
        run = {"config": to_dict(config), "data_state": data_state, "eval_loss": eval_loss}
        pending = _Pending(step, json.dumps(run, indent=1))
        if processes.from_writer(self.path(step).exists):
            if processes.from_writer(partial(self._damage, step)) is None:
                raise UserError(f"step {step} is already saved in {self.directory}")
            self._manager.delete(step)
        self._checked.pop(step, None)
        self._pending = pending
        self._losses[step] = eval_loss
        args = ocp.args.Composite(**{STATE: ocp.args.StandardSave(named_leaves(state))})
        try:
            # The training loop may forbid implicit transfers; this one is meant.
            with jax.transfer_guard("allow"):
                self._manager.save(step, args=args, force=True)
        except Exception as error:
            self._pending = None
            raise self._failure(step, error) from error

    def poll(self) -> None:
        """Reports a save that has ended, well or not. Cheap: call it every step."""
        if self._pending is None:
            return
        if self._failed_here or not self._manager.is_saving_in_progress():
            self._finish()

    def wait(self) -> None:
        """Blocks until nothing is pending, and reports as `poll` does."""
        self._finish()

    def close(self) -> None:
        """Like `wait`; needed before Python ends, which lets no thread finish a save."""
        atexit.unregister(self._finish)
        try:
            self._finish()
        finally:
            self._manager.close()

    def _finish(self) -> None:
        if self._pending is None:
            return
        step, error = self._pending.step, None
        try:
            self._manager.wait_until_finished()
        except Exception as raised:
            error = raised
        self._pending = None
        # Orbax takes its own word for it; the disk has the last one, which a network may show
        # late to processes other than the one that seals.
        manifest = self.path(step) / MANIFEST
        committed = manifest.is_file() if processes.is_writer() else error is None
        if committed:
            self._on_commit(step)
        if committed and error is not None:
            raise UserError(
                f"step {step} is saved, but an older one could not be deleted: {_cause(error)}"
            ) from error
        if not committed:
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: Exception | None) -> UserError:
        """One line for the user; also makes room for the next try.

        Of several processes there is none: all end, and one that still writes must not fail for
        want of the directory before it hears why. The next start removes what is left.
        """
        if processes.count() == 1:
            self._remove_temporary()
        self._losses.pop(step, None)
        with contextlib.suppress(RuntimeError):  # Python is ending, and there is no next try
            self._manager.reload()
        good = max((s for s in self._steps() if s != step and self._is_sound(s)), default=None)
        kept = (
            "there is no earlier checkpoint"
            if good is None
            else f"the last good checkpoint is step {good} in {self.path(good)}"
        )
        cause = "it is not on disk" if error is None else _cause(error)
        return UserError(f"step {step} could not be saved: {cause}; {kept}")

    def _seal(self) -> None:
        """Completes the step, in orbax's thread, just before it gets its final name."""
        assert self._pending is not None
        temporary = self.directory / f"{self._pending.step}{_TEMPORARY}"
        (temporary / RUN).write_text(self._pending.run)
        (temporary / MANIFEST).write_text(json.dumps({"files": digests(temporary)}, indent=1))

    def _wait_for_others(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier, in its threads; one whose save has failed comes by and must not wait.

        The others would not come, and the failure is known only after the barrier.
        """
        error = sys.exc_info()[1]
        if error is not None:
            self._failed_here = True
            raise error
        self._barrier(key=key, timeout_ms=timeout_ms)

    def _is_sound(self, step: int) -> bool:
        """Whether `step` may count among those kept: not damaged as far as a glance shows."""
        return self._checked.get(step) is None and damage_in(self.path(step), glance=True) is None

    def _require_shared(self) -> None:
        """Each process must see what process 0 writes, and must have its own writes seen.

        Raises:
            UserError: in the process that does not.
        """
        with tempfile.NamedTemporaryFile(dir=self.directory) as mark:
            for process, path in enumerate(processes.gather(mark.name)):
                if not Path(path).exists():
                    raise UserError(
                        f"process {processes.index()} does not see what process {process} writes "
                        f"to {self.directory}: all need the same directory"
                    )
            processes.meet()  # before the file goes

    def _remove_temporary(self) -> set[int]:
        """The steps whose save was cut off; removes what it left."""
        left = list(self.directory.glob(f"*{_TEMPORARY}*"))
        if processes.is_writer():
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
        names = (path.name.partition(_TEMPORARY)[0] for path in left)
        return {int(name) for name in names if name.isdecimal()}


@dataclass(frozen=True)
class _NewestAndBest:
    """Which steps stay once the newest of `checkpoints`, still being written, is committed.

    Damaged steps neither count nor go: a user may want to look at them.
    """

    keep: int
    losses: dict[int, float | None]
    is_sound: Callable[[int], bool]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        steps = [info.step for info in checkpoints]
        saving = steps[-1]
        sound = sorted(s for s in steps[:-1] if s < saving and self.is_sound(s)) + [saving]
        scored = {s: loss for s in sound if (loss := self.losses.get(s)) is not None}
        scored = {s: loss for s, loss in scored.items() if math.isfinite(loss)}
        best = {min(scored, key=scored.__getitem__)} if scored else set()
        stay = {*sound[-self.keep :], *best}
        return [step in stay or step not in sound for step in steps]


def _cause(error: BaseException) -> str:
    """The operating system's words for `error` where it has any, else its first line."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        # Tensorstore puts the errno into the text of a ValueError.
        if number := re.search(r"os_error_code='(\d+)'", str(link)):
            return os.strerror(int(number[1]))
        link = link.__cause__ or link.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_news(record: logging.LogRecord) -> bool:
    """False for the traces that orbax logs of failures, which we raise as one line."""
    return not (record.exc_info and "orbax" in record.pathname)


def _require_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"cannot write checkpoints to {directory}: {error.strerror}") from None
