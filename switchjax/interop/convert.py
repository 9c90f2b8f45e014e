"""The two conversions: a Hugging Face directory to a weights directory here, and back.

One tensor at a time, so that a model of any size converts beside little memory. What there is to
refuse is refused before anything is written, and a directory gets its name once it is complete.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from switchjax.config import DataConfig, ModelConfig, RunConfig
from switchjax.data.tokenizer import load_tokenizer
from switchjax.errors import UserError
from switchjax.interop.huggingface import (
    UNUSED,
    Family,
    Tensor,
    tensors_of,
    tied_copies,
    to_ours,
    to_theirs,
)
from switchjax.interop.options import FromHuggingFace, ToHuggingFace
from switchjax.interop.tensors import Stored, Tensors, write_tensors
from switchjax.interop.their_config import model_of, optim_of, read_theirs, slots_of, theirs_of
from switchjax.saved_steps import misfit
from switchjax.state import model_shapes
from switchjax.tensor_files import new_directory, require_empty
from switchjax.weights import open_weights, write_weights

_SHARD_BYTES = 2 * 10**9
_TOKENIZER = "spiece.model"
_TRAINED_LENGTH = 512  # tokens of an encoder row: T5, arXiv:1910.10683, section 3.1.2
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
_SLICES = 16  # of a table that is compared with another one

Say = Callable[[str], None]


def from_hugging_face(options: FromHuggingFace, say: Say = print) -> None:
    """Writes a weights directory.

    Raises:
        UserError: no model of theirs, or one that there is not here; tensors are missing, extra or
            misshaped (all are listed); a file is damaged; the directory to make is taken.
    """
    directory, out = Path(options.directory), Path(options.out)
    require_empty(out)
    family, theirs = read_theirs(directory)
    model = model_of(family, theirs, hf_semantics=options.hf_semantics)
    stored = Tensors(directory)
    shapes = model_shapes(model)
    wanted = {
        name: list(tensors_of(name, leaf.shape, model, family)) for name, leaf in shapes.items()
    }
    _require_all(stored, [tensor for tensors in wanted.values() for tensor in tensors], model)
    _require_tied(stored, model)
    for line in _notes(family, theirs, stored, options):
        say(line)

    data = DataConfig(sequence_length=_TRAINED_LENGTH)
    if (directory / _TOKENIZER).is_file():
        data = replace(data, tokenizer=str(directory / _TOKENIZER))
    else:
        say(f"there is no {_TOKENIZER}: training and generation need a --data.tokenizer")
    config = RunConfig(model=model, data=data, optim=optim_of(theirs), mesh="single", out=str(out))
    with _progress(shapes) as advance:

        def pieces(name: str) -> Iterator[np.ndarray]:
            for tensor in wanted[name]:
                piece = to_ours(tensor, stored.read(tensor.name))
                yield piece
                advance(piece.nbytes)

        write_weights(out, config, shapes, pieces)
    say(f"{out}: {_count(shapes):,} parameters; train with --init-from {out}")


def to_hugging_face(
    options: ToHuggingFace, say: Say = print, *, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Writes a directory that transformers loads.

    Raises:
        UserError: transformers has no such model; there are no weights, or damaged ones; the
            directory to make is taken.
    """
    out = Path(options.out)
    require_empty(out)
    weights = open_weights(options.directory, options.step)
    config, model = weights.config, weights.config.model
    if weights.router_bias is not None:
        raise UserError("Hugging Face has no such model: their routers have no bias on the choice")
    tokenizer = load_tokenizer(config.data.tokenizer)
    theirs = theirs_of(
        config, pad_id=tokenizer.pad_id, eos_id=tokenizer.eos_id, dtype=options.dtype
    )
    family: Family = theirs["model_type"]
    sources = {
        tensor.name: (name, tensor)
        for name, leaf in weights.shapes.items()
        for tensor in tensors_of(name, leaf.shape, model, family)
    }
    for line in _notes_back(family, config):
        say(line)

    dtype = _DTYPES[options.dtype]
    tensor_shapes = {name: tensor.shape for name, (_, tensor) in sources.items()}
    with new_directory(out) as temporary, _progress(weights.shapes) as advance:

        def read(name: str) -> np.ndarray:
            ours, tensor = sources[name]
            part = weights.read(ours, tensor.index)
            advance(part.nbytes)
            return to_theirs(tensor, part)

        write_tensors(temporary, tensor_shapes, dtype, read, shard_bytes=shard_bytes)
        (temporary / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")
        if config.data.tokenizer != "bytes":
            shutil.copy(config.data.tokenizer, temporary / _TOKENIZER)
    say(f"{out}: {_count(weights.shapes):,} parameters of {weights.source}, in {options.dtype}")


def _count(shapes: dict[str, jax.ShapeDtypeStruct]) -> int:
    return sum(leaf.size for leaf in shapes.values())


def _require_all(stored: Tensors, tensors: list[Tensor], model: ModelConfig) -> None:
    """Raises UserError unless the files hold exactly a model's tensors."""
    wanted = {tensor.name: Stored("float32", tensor.shape) for tensor in tensors}
    besides = {UNUSED, *tied_copies(model)} - wanted.keys()
    found = {
        name: leaf._replace(dtype="float32") if leaf.is_read else leaf
        for name, leaf in stored.stored.items()
        if name not in besides
    }
    if different := misfit(wanted, found):
        raise UserError(f"the tensors are not those of config.json: {different}")


def _require_tied(stored: Tensors, model: ModelConfig) -> None:
    """Raises UserError if a tensor that is a copy of the shared table differs from it."""
    shape = (model.vocab_size, model.d_model)
    for name in tied_copies(model):
        if name not in stored.stored:
            continue
        step = -(-model.vocab_size // _SLICES)
        slices = (slice(start, start + step) for start in range(0, model.vocab_size, step))
        if stored.stored[name].shape != shape or not all(
            np.array_equal(stored.read(name, rows), stored.read("shared.weight", rows))
            for rows in slices
        ):
            raise UserError(f"{name} differs from shared.weight, and here they are one table")


def _notes(
    family: Family, theirs: dict, stored: Tensors, options: FromHuggingFace
) -> Iterator[str]:
    """What a user should know of what comes out."""
    narrow = {leaf.dtype for leaf in stored.stored.values()} - {"float32"}
    if narrow:
        yield f"tensors in {' and '.join(sorted(narrow))} become float32"
    if UNUSED in stored.stored:
        yield f"left out, since no version of transformers uses it: {UNUSED}"
    if family == "t5":
        return
    if options.hf_semantics:
        yield (
            f"as in transformers: {theirs['expert_capacity']} slots an expert and row, in training "
            "and evaluation, and padding takes slots (--hf-semantics)"
        )
    else:
        slots = theirs.get("expert_capacity", "a fixed number of")
        yield (
            "padding takes no slot, evaluation drops nothing, training has "
            f"{ModelConfig().capacity_factor} times the fair share of slots; transformers has "
            f"{slots} slots an expert and row, padding included: --hf-semantics keeps that"
        )
    yield "released Switch Transformers are pre-trained alone: they fill in <extra_id_0>, no more"


def _notes_back(family: Family, config: RunConfig) -> Iterator[str]:
    if config.data.tokenizer == "bytes":
        yield "no tokenizer is written: transformers has none of bytes as here"
    if family == "t5":
        return
    if not config.model.padding_is_routed:
        yield (
            f"transformers routes padding too and has a fixed number of slots: {slots_of(config)} "
            "an expert and row, as evaluation has here in rows of data.sequence_length "
            f"{config.data.sequence_length}"
        )
    if config.model.activation == "geglu":
        yield (
            "the Switch Transformers of transformers have no gated layers: these tensors are "
            "named as T5's (wi_0, wi_1), and its classes do not load them"
        )


@contextmanager
def _progress(shapes: dict[str, jax.ShapeDtypeStruct]) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal; gives what advances it."""
    console = Console()
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes.values())
    columns = (TextColumn("converting"), BarColumn(bar_width=None), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)
