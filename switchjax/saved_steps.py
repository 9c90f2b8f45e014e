"""Reading what a run has saved: which steps are complete, their config, their arrays.

One directory a step. `state/` holds the arrays under names made from the tree path, so that a
file says what it holds; `run.json` the config, the position in the data and the evaluation loss;
`manifest.json` size and checksum of every file. What the manifest contradicts was damaged after
the save; orbax alone would load most damaged arrays without a word.

Knows nothing of models, optimizers or the training loop: a state is any pytree of arrays.
"""

import json
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from switchjax import processes
from switchjax.config import RunConfig, from_dict
from switchjax.errors import UserError

PyTree = Any

STATE = "state"
RUN = "run.json"
MANIFEST = "manifest.json"


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
    """Read-only view of the steps saved in a directory; safe beside a run that is writing it.

    Of several processes the writer looks at the directory, and all go by what it finds.
    """

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
        step, self.skipped = processes.from_writer(self._latest)
        if step is not None:
            self._checked[step] = None  # in all processes, of which one has read it
        return step

    def _latest(self) -> tuple[int | None, list[str]]:
        skipped = []
        for step in sorted({*self._steps(), *self._interrupted}, reverse=True):
            damage = self._damage(step)
            if damage is None:
                return step, skipped
            skipped.append(f"step {step}: {damage}")
        return None, skipped

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
        directory = self.path(step) / STATE
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
        damage = processes.from_writer(partial(self._damage, step))
        if damage is not None:
            raise UserError(f"step {step}: {damage}, in {self.directory}")
        return json.loads((self.path(step) / RUN).read_text())

    def _damage(self, step: int) -> str | None:
        """What is wrong with `step`, or None; reads all of it, once."""
        if not self.path(step).is_dir():
            interrupted = step in self._interrupted
            return "its save was interrupted" if interrupted else "there is no such checkpoint"
        if step not in self._checked:
            self._checked[step] = damage_in(self.path(step))
        return self._checked[step]


def digests(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file below `directory` that orbax does not touch any more."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {
        path.relative_to(directory).as_posix(): (path.stat().st_size, _crc32(path))
        for path in files
        if path.parent != directory or path.name == RUN
    }


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def damage_in(directory: Path, *, glance: bool = False) -> str | None:
    """How `directory` differs from its manifest, or None; at a glance by file sizes alone."""
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
        for name, (size, crc) in files.items():
            path = directory / name
            if not path.is_file():
                return f"file {name} is missing"
            if path.stat().st_size != size or not (glance or _crc32(path) == crc):
                return f"file {name} is damaged"
    except FileNotFoundError:
        return f"file {MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"file {MANIFEST} is damaged"
    return None


def eval_loss_of(directory: Path) -> float | None:
    """The evaluation loss that a step was saved with; None if it cannot be read."""
    try:
        return json.loads((directory / RUN).read_text())["eval_loss"]
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
