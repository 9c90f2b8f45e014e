"""A model's weights by name, of a run or of a directory of files, read and written in parts.

So a model converts without room in memory for it, and a device reads what it will hold and no more.

A *weights directory* has a run's `config.json`, one file an array in `weights/`, and a manifest of
their checksums; it gets its name once it is complete. Names are those of `named_leaves(model)`.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from switchjax.config import ParamDtype, RunConfig, read_config, write_config
from switchjax.errors import UserError
from switchjax.saved_steps import (
    MANIFEST,
    SavedSteps,
    checkpoint_directory,
    damage_in,
    digests,
    misfit,
    named_leaves,
)
from switchjax.tensor_files import DTYPES, new_directory, write_tensor_file

Index = tuple[int | slice, ...]
Shapes = dict[str, jax.ShapeDtypeStruct]

ROUTER_BIAS = "router_bias_XE"
_FILES = "weights"


@dataclass(frozen=True)
class Weights:
    """Arrays of a model that are still where they were stored."""

    source: str
    """In words, for messages."""
    config: RunConfig
    shapes: Shapes
    """Of the model's arrays, by name."""
    router_bias: jax.ShapeDtypeStruct | None
    """Of the balancing bias; None if the run has none. `read` knows it as ROUTER_BIAS."""
    read: Callable[..., np.ndarray]
    """`read(name, index=())`: an array, or the part of it at an index such as (3, slice(0, 8))."""


def open_weights(path: str | Path, step: int | None = None) -> Weights:
    """The weights of a run, or of a weights directory.

    Args:
        step: of a run; None = its newest complete checkpoint.

    Raises:
        UserError: there are none, or they are damaged.
    """
    path, config = Path(path), config_of(path)
    if checkpoint_directory(path).is_dir():
        return _of_run(SavedSteps(checkpoint_directory(path)), config, step)
    if not (path / _FILES).is_dir():
        raise UserError(f"{path} holds neither checkpoints nor weights")
    if step is not None:
        raise UserError(f"{path} holds weights without steps: leave out step {step}")
    return _of_directory(path, config)


def config_of(path: str | Path) -> RunConfig:
    """The config of a run or weights directory, with the tokenizer where it is.

    Raises:
        UserError: as `config.read_config`.
    """
    config = read_config(path)
    beside = Path(path).absolute() / config.data.tokenizer
    if not beside.is_file():
        return config
    return replace(config, data=replace(config.data, tokenizer=str(beside)))


def _of_run(saved: SavedSteps, config: RunConfig, step: int | None) -> Weights:
    step = saved.newest() if step is None else step
    arrays = saved.open_arrays(step)
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype.numpy_dtype) for n, a in arrays.items()}
    of_model = "model."

    def read(name: str, index: Index = ()) -> np.ndarray:
        full_name = name if name == ROUTER_BIAS else of_model + name
        return np.asarray(arrays[full_name][index].read().result())

    return Weights(
        source=f"step {step} in {saved.directory}",
        config=config,
        shapes={n[len(of_model) :]: s for n, s in shapes.items() if n.startswith(of_model)},
        router_bias=shapes.get(ROUTER_BIAS),
        read=read,
    )


def _of_directory(path: Path, config: RunConfig) -> Weights:
    if damage := damage_in(path):
        raise UserError(f"{path}: {damage}")
    files = {file.stem: file for file in sorted((path / _FILES).glob("*.safetensors"))}

    def stored(name: str) -> Any:
        try:
            return safe_open(files[name], framework="numpy")
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {files[name]}: {error}") from None

    def shape(name: str) -> jax.ShapeDtypeStruct:
        with stored(name) as file:
            part = file.get_slice(name)
            dtype = np.dtype(DTYPES[part.get_dtype()])
            return jax.ShapeDtypeStruct(tuple(part.get_shape()), dtype)

    def read(name: str, index: Index = ()) -> np.ndarray:
        with stored(name) as file:
            return file.get_slice(name)[index] if index else file.get_tensor(name)

    shapes = {name: shape(name) for name in files}
    router_bias = shapes.pop(ROUTER_BIAS, None)
    return Weights(str(path), config, shapes, router_bias, read)


def load_model(weights: Weights, target: Any) -> Any:
    """The model, each device reading its own parts.

    Args:
        target: a model of `jax.ShapeDtypeStruct`s, each with a concrete sharding, as
            `state.abstract_state(...).model`.

    Raises:
        UserError: as `require_fit`.
    """
    require_fit(weights, target)
    arrays = [load_array(weights, name, leaf) for name, leaf in named_leaves(target).items()]
    return jax.tree.unflatten(jax.tree.structure(target), arrays)


def in_dtypes_of(target: Any, weights: Weights) -> tuple[Weights, str]:
    """The weights for a model of another `param_dtype`, and what was done to them, in words.

    Args:
        target: as for `load_model`; only dtypes are looked at.
    """
    wanted = {name: leaf.dtype for name, leaf in named_leaves(target).items()}

    def dtype(name: str) -> np.dtype:
        stored = weights.shapes[name].dtype
        both = {stored.name, wanted.get(name, stored).name}
        return wanted[name] if both == set(get_args(ParamDtype)) else stored

    def read(name: str, index: Index = ()) -> np.ndarray:
        values = weights.read(name, index)
        return values if name == ROUTER_BIAS else values.astype(dtype(name), copy=False)

    shapes = {n: jax.ShapeDtypeStruct(s.shape, dtype(n)) for n, s in weights.shapes.items()}
    changed = Counter((weights.shapes[n].dtype.name, s.dtype.name) for n, s in shapes.items())
    words = [
        f"{count} arrays {'widened' if new == 'float32' else 'rounded'} from {old} to {new}"
        for (old, new), count in changed.items()
        if old != new
    ]
    return replace(weights, shapes=shapes, read=read), ", ".join(words)


def require_fit(weights: Weights, target: Any) -> None:
    """Raises UserError unless names, shapes and dtypes are exactly those of a model."""
    if different := misfit(named_leaves(target), weights.shapes):
        raise UserError(f"the weights of {weights.source} do not fit: {different}")


def load_array(weights: Weights, name: str, target: Any) -> jax.Array:
    """One array on the sharding of `target`."""

    def part(index: Any) -> np.ndarray:
        return weights.read(name, index)

    return jax.make_array_from_callback(target.shape, target.sharding, part)


def write_weights(
    directory: str | Path,
    config: RunConfig,
    shapes: Shapes,
    pieces: Callable[[str], Iterator[np.ndarray]],
) -> None:
    """Writes a weights directory, its tokenizer with it, one piece in memory at a time.

    Args:
        config: whose model this is. Its tokenizer's file is copied to the weights.
        pieces: of an array by name: its values in C order, cut anywhere.

    Raises:
        UserError: the directory exists and is not empty, or cannot be written.
    """
    with new_directory(directory) as temporary:
        (temporary / _FILES).mkdir()
        for name, shape in shapes.items():
            file = temporary / _FILES / f"{name}.safetensors"
            write_tensor_file(file, {name: shape}, pieces)
        if config.data.tokenizer != "bytes":
            tokenizer = shutil.copy(Path(config.data.tokenizer).expanduser(), temporary)
            config = replace(config, data=replace(config.data, tokenizer=Path(tokenizer).name))
        write_config(replace(config, out=str(directory)), temporary)
        manifest = {"files": digests(temporary)}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
