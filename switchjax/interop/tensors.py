"""A directory of safetensors files, read and written one tensor at a time.

Knows nothing of models. Only safetensors are read: a pickle would run what is in it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from switchjax.errors import UserError
from switchjax.tensor_files import DTYPES, write_tensor_file

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_read(self) -> bool:
        """Whether `Tensors.read` makes float32 of it."""
        return self.dtype in DTYPES.values()


class Tensors:
    """The tensors of a directory.

    One file is open at a time: what has been read of an open file counts as this process's memory.
    """

    def __init__(self, directory: Path) -> None:
        self._open: tuple[Path, Any] | None = None
        self._files: dict[str, Path] = {}
        self.stored: dict[str, Stored] = {}
        index = _index_of(directory)
        for path in sorted(set(index.values())) if index else [directory / _SINGLE]:
            file = self._opened(path)
            for name in file.keys():
                part = file.get_slice(name)
                dtype = str(part.get_dtype())
                self.stored[name] = Stored(DTYPES.get(dtype, dtype), tuple(part.get_shape()))
                self._files[name] = path
        lost = [name for name, path in index.items() if self._files.get(name) != path]
        if lost:
            raise UserError(f"{directory / _INDEX} promises what is not there: {', '.join(lost)}")

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or some rows of it, in float32."""
        path = self._files[name]
        try:
            return self._opened(path).get_slice(name)[rows].astype(np.float32, copy=False)
        except SafetensorError as error:
            raise UserError(f"cannot read {path}: {error}") from None

    def _opened(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._open = None  # closes the other one first
            try:
                self._open = (path, safe_open(path, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"cannot read {path}: {error}") from None
        return self._open[1]


def _index_of(directory: Path) -> dict[str, Path]:
    """The file of each tensor, of a directory that has several; empty where there is one."""
    path = directory / _INDEX
    if (directory / _SINGLE).exists():
        return {}
    if not path.exists():
        files = sorted(directory.glob("*"))
        pickles = [file.name for file in files if file.suffix in (".bin", ".pt", ".ckpt")]
        if pickles:
            raise UserError(
                f"{directory} holds a pickle ({pickles[0]}), and a pickle can run anything: only "
                "safetensors are read; save_pretrained of transformers writes them"
            )
        raise UserError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")
    try:
        files = json.loads(path.read_text())["weight_map"]
        return {str(name): directory / Path(file).name for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {error!r}") from None


def write_tensors(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    read: Callable[[str], np.ndarray],
    *,
    shard_bytes: int,
) -> None:
    """Writes tensors to one file, or to several of at most `shard_bytes` (or one tensor) each.

    Args:
        read: gives a tensor by its name; called once for each, in order.
    """
    shards = list(_shards(shapes, dtype.itemsize, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = _SINGLE
        if len(shards) > 1:
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        files |= dict.fromkeys(names, file)
        write_tensor_file(
            directory / file,
            {name: jax.ShapeDtypeStruct(shapes[name], dtype) for name in names},
            lambda name: [read(name).astype(dtype, copy=False)],
            metadata={"format": "pt"},
        )
    if len(shards) > 1:
        total = sum(_bytes(shape, dtype.itemsize) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / _INDEX).write_text(json.dumps(index, indent=1))


def _bytes(shape: tuple[int, ...], itemsize: int) -> int:
    return int(np.prod(shape, dtype=np.int64)) * itemsize


def _shards(
    shapes: dict[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> Iterator[list[str]]:
    """Names in order, cut before a file would grow over its size."""
    names, size = [], 0
    for name, shape in shapes.items():
        more = _bytes(shape, itemsize)
        if names and size + more > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += more
    yield names
