"""Reading what a run has saved: which steps are complete, their config, their arrays.

One directory a step. `state/` holds the arrays under names made from the tree path, so that a
file says what it holds; `run.json` the config, the position in the data and the evaluation loss;
`manifest.json` size and checksum of every file. What the manifest contradicts was damaged after
the save; orbax alone would load most damaged arrays without a word.

Knows nothing of models, optimizers or the training loop: a state is any pytree of arrays.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
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


def checkpoint_directory(out: str | Path) -> Path:
    """Where the run in this directory keeps its checkpoints."""
    return Path(out) / "checkpoints"


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

    def newest(self) -> int:
        """As `latest`, where there must be one.

        Raises:
            UserError: there is none; says what was passed over.
        """
        step = self.latest()
        if step is None:
            none = f"{self.directory} holds no complete checkpoint"
            raise UserError("; ".join([none, *self.skipped]))
        return step

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
        if different := misfit(wanted, _metadata(directory)):
            raise UserError(f"step {step} in {self.directory} does not fit: {different}")
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore(directory, wanted)
        state = jax.tree.unflatten(jax.tree.structure(target), [arrays[n] for n in wanted])
        return state, run["data_state"]

    def open_arrays(self, step: int) -> dict[str, ts.TensorStore]:
        """The arrays of `step` by name, to be read in parts; no devices needed.

        Raises:
            UserError: the step is absent or damaged.
        """
        self._read_run(step)
        directory = self.path(step) / STATE

        def opened(name: str, cache: ts.Context) -> ts.TensorStore:
            store = {"driver": "ocdbt", "base": f"file://{directory}", "path": name}
            spec = {"driver": "zarr", "kvstore": store, "recheck_cached_data": "open"}
            return ts.open(spec, open=True, context=cache).result()

        # A part of an array is decoded with all that its device held. One such chunk is kept (and
        # a quarter more, for what is known of it), so that reading expert after expert of it does
        # not decode it for each.
        names = list(_metadata(directory))
        largest = max(_chunk_bytes(opened(name, ts.Context())) for name in names)
        cache = ts.Context({"cache_pool": {"total_bytes_limit": largest * 5 // 4}})
        return {name: opened(name, cache) for name in names}

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


def _chunk_bytes(array: ts.TensorStore) -> int:
    """Of the smallest part that is read at once."""
    shape: Any = array.chunk_layout.read_chunk.shape or ()  # None of a single number
    return math.prod(shape) * array.dtype.numpy_dtype.itemsize


def _metadata(directory: Path) -> dict[str, Any]:
    """Shape and dtype of each array that orbax saved there."""
    # Annotated with orbax's own path class; any path will do.
    handler = ocp.StandardCheckpointHandler()
    return handler.metadata(directory).tree  # pyright: ignore[reportArgumentType]


def misfit(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """How stored arrays differ from those wanted, all of them; empty if they do not."""

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
