"""What is saved of a run, when a step counts as saved, and which saved steps stay.

One directory a step. `state/` holds the arrays under names made from the tree path, so that a
file says what it holds; `run.json` the config, the position in the data and the evaluation loss;
`manifest.json` size and checksum of every file. All of it is written under a temporary name and
renamed at the end: a directory named by a plain number was complete when it got that name, and
what the manifest contradicts was damaged later. Orbax alone would load most damaged arrays
without a word.

Knows nothing of models, optimizers or the training loop: a state is any pytree of arrays.
"""

import atexit
import json
import logging
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import PreservationContext

from switchjax.config import RunConfig, from_dict, to_dict
from switchjax.errors import UserError

PyTree = Any

_STATE = "state"
_RUN = "run.json"
_MANIFEST = "manifest.json"
_TEMPORARY = ocp.path.atomicity.TMP_DIR_SUFFIX


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves of `tree` by dotted path, as `model.encoder.w_in_EDF`, in flattening order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    # A Variable is itself a tree of one leaf; its inner path element says nothing.
    named = dict(zip(names, jax.tree.leaves(tree), strict=True))
    assert len(named) == len(names), "two leaves of the state have the same name"
    return named


class SavedSteps:
    """Read-only view of the steps saved in a directory; safe beside a run that is writing it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.skipped: list[str] = []
        """What the last call of `latest` passed over, one line a step."""
        self._interrupted: set[int] = set()
        self._checked: dict[int, str | None] = {}

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def latest(self) -> int | None:
        """The newest complete step; the broken ones passed over are in `skipped`."""
        self.skipped = []
        for step in sorted({*self._steps(), *self._interrupted}, reverse=True):
            damage = self._damage(step)
            if damage is None:
                return step
            self.skipped.append(f"step {step}: {damage}")
        return None

    def read_config(self, step: int) -> RunConfig:
        """The config of the run that saved `step`."""
        return from_dict(self._read_run(step)["config"])

    def restore(self, step: int, target: PyTree) -> tuple[PyTree, dict]:
        """State and data position of `step`, bit for bit, on the shardings of `target`.

        `target` has a `jax.ShapeDtypeStruct` with a concrete sharding for every array. The
        devices that the step was saved on need not exist.

        Raises:
            UserError: the step is absent or damaged, or names, shapes and dtypes are not exactly
                those of `target`.
        """
        run = self._read_run(step)
        wanted = named_leaves(target)
        # Without a sharding orbax would look for the devices that saved the file.
        assert all(leaf.sharding is not None for leaf in wanted.values())
        directory = self.path(step) / _STATE
        # Annotated with orbax's own path class; any path will do.
        handler = ocp.StandardCheckpointHandler()
        found = handler.metadata(directory).tree  # pyright: ignore[reportArgumentType]
        misfit = _misfit(wanted, found)
        if misfit:
            raise UserError(f"step {step} in {self.directory} does not fit: {misfit}")
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore(directory, wanted)
        state = jax.tree.unflatten(jax.tree.structure(target), [arrays[n] for n in wanted])
        return state, run["data_state"]

    def _steps(self) -> Iterator[int]:
        if self.directory.is_dir():
            for entry in self.directory.iterdir():
                if entry.name.isdecimal():
                    yield int(entry.name)

    def _read_run(self, step: int) -> dict:
        damage = self._damage(step)
        if damage is not None:
            raise UserError(f"step {step}: {damage}, in {self.directory}")
        return json.loads((self.path(step) / _RUN).read_text())

    def _damage(self, step: int) -> str | None:
        """What is wrong with `step`, or None; reads all of it, once."""
        if not self.path(step).is_dir():
            interrupted = step in self._interrupted
            return "its save was interrupted" if interrupted else "there is no such checkpoint"
        if step not in self._checked:
            self._checked[step] = _damage_in(self.path(step))
        return self._checked[step]


@dataclass(frozen=True)
class _Pending:
    """A save that may not be on disk yet."""

    step: int
    run: str


class Checkpoints(SavedSteps):
    """Saves in the background; keeps the newest steps and the best. One writer a directory.

    `on_commit(step)` is called once a step is on disk, from `poll`, `save`, `wait` or `close`;
    a failed write is raised from the first of them that comes after it.
    """

    def __init__(self, directory: Path, *, keep: int, on_commit: Callable[[int], None]) -> None:
        super().__init__(directory)
        _require_writable(self.directory)
        logging.getLogger("absl").addFilter(_is_news)
        self._interrupted = self._remove_temporary()
        self._on_commit = on_commit
        self._pending: _Pending | None = None
        self._losses = {step: _eval_loss(self.path(step)) for step in self._steps()}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_NewestAndBest(keep, self._losses, self._is_sound),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._seal,
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
        if self.path(step).exists():
            if self._damage(step) is None:
                raise UserError(f"step {step} is already saved in {self.directory}")
            self._manager.delete(step)
        self._checked.pop(step, None)
        self._pending = pending
        self._losses[step] = eval_loss
        args = ocp.args.Composite(**{_STATE: ocp.args.StandardSave(named_leaves(state))})
        try:
            # The training loop may forbid implicit transfers; this one is meant.
            with jax.transfer_guard("allow"):
                self._manager.save(step, args=args, force=True)
        except Exception as error:
            self._pending = None
            raise self._failure(step, error) from error

    def poll(self) -> None:
        """Reports a save that has ended, well or not. Cheap: call it every step."""
        if self._pending is not None and not self._manager.is_saving_in_progress():
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
        # Orbax takes its own word for it; the disk has the last one.
        committed = (self.path(step) / _MANIFEST).is_file()
        if committed:
            self._on_commit(step)
        if committed and error is not None:
            raise UserError(
                f"step {step} is saved, but an older one could not be deleted: {_cause(error)}"
            ) from error
        if not committed:
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: Exception | None) -> UserError:
        """One line for the user; also makes room for the next try."""
        self._remove_temporary()
        self._losses.pop(step, None)
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
        (temporary / _RUN).write_text(self._pending.run)
        (temporary / _MANIFEST).write_text(json.dumps({"files": _digests(temporary)}, indent=1))

    def _is_sound(self, step: int) -> bool:
        """Whether `step` may count among those kept: not damaged as far as a glance shows."""
        return self._checked.get(step) is None and _damage_in(self.path(step), glance=True) is None

    def _remove_temporary(self) -> set[int]:
        """The steps whose save was cut off; removes what it left."""
        left = list(self.directory.glob(f"*{_TEMPORARY}*"))
        if jax.process_index() == 0:
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


def _digests(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file below `directory` that orbax does not touch any more."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {
        path.relative_to(directory).as_posix(): (path.stat().st_size, _crc32(path))
        for path in files
        if path.parent != directory or path.name == _RUN
    }


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _damage_in(directory: Path, *, glance: bool = False) -> str | None:
    """How `directory` differs from its manifest, or None; at a glance by file sizes alone."""
    try:
        files = json.loads((directory / _MANIFEST).read_text())["files"]
        for name, (size, crc) in files.items():
            path = directory / name
            if not path.is_file():
                return f"file {name} is missing"
            if path.stat().st_size != size or not (glance or _crc32(path) == crc):
                return f"file {name} is damaged"
    except FileNotFoundError:
        return f"file {_MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"file {_MANIFEST} is damaged"
    return None


def _eval_loss(directory: Path) -> float | None:
    """The evaluation loss that a step was saved with; None if it cannot be read."""
    try:
        return json.loads((directory / _RUN).read_text())["eval_loss"]
    except (OSError, ValueError, KeyError):
        return None  # `latest` and `restore` say what is wrong with the step


def _misfit(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    """How the arrays in a file differ from those wanted; empty if they do not."""

    def describe(leaf: Any) -> str:
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"

    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    other = [
        f"{name} is {describe(found[name])}, not {describe(leaf)}"
        for name, leaf in wanted.items()
        if name in found and describe(found[name]) != describe(leaf)
    ]
    parts = [f"missing {', '.join(missing)}"] if missing else []
    parts += [f"extra {', '.join(extra)}"] if extra else []
    return "; ".join(parts + other)


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
