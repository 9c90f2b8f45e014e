"""Files of tensors, and directories of files, that are whole or not there.

Tensors are written in parts, so that a model needs no room in memory: the library for safetensors
writes what is in memory as a whole. It reads what this writes.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from switchjax.config import config_file
from switchjax.errors import UserError

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""By the names that safetensors has for them."""


def write_tensor_file(
    path: Path,
    tensors: dict[str, jax.ShapeDtypeStruct],
    pieces: Callable[[str], Iterable[np.ndarray]],
    *,
    metadata: dict[str, str] | None = None,
) -> None:
    """A safetensors file: length of the header, header, bytes.

    Args:
        pieces: of a tensor by name: its values in C order, cut anywhere. Asked once for each, in
            order.
    """
    names = {ours: theirs for theirs, ours in DTYPES.items()}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end, ends = 0, {}
    for name, tensor in tensors.items():
        start, end = end, end + tensor.size * tensor.dtype.itemsize
        ends[name] = end
        header[name] = {
            "dtype": names[str(tensor.dtype)],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            for piece in pieces(name):
                assert piece.dtype == tensor.dtype, (name, piece.dtype, tensor.dtype)
                # As bytes, since a buffer of bfloat16 is none that Python knows.
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            written = file.tell() - 8 - len(text)
            assert written == ends[name], (name, written, ends[name])


def require_empty(directory: str | Path) -> None:
    """Raises UserError unless a new directory may have this name."""
    directory = Path(directory)
    if config_file(directory).exists():
        raise UserError(f"{directory} holds a run or weights already: choose another name")
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} exists and is no empty directory: choose another name")


@contextmanager
def new_directory(directory: str | Path) -> Iterator[Path]:
    """A directory to fill, which gets its name once all went well.

    Raises:
        UserError: the name is taken, or it cannot be written; all is then as before.
    """
    directory = Path(directory)
    require_empty(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".writing-") as made:
            temporary = Path(made) / directory.name
            temporary.mkdir()
            yield temporary
            os.replace(temporary, directory)
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error}") from error
