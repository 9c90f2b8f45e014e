"""Which dim of which array goes over which mesh axes. The only `PartitionSpec`s.

A spec carries the name of the array it lays out, in lower case: `w_in_edf` for `w_in_EDF`.
Parameters of stacked layers get a leading dim that is never split (`jax.vmap` puts it there).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from switchjax.axes import AXES, DATA, EXPERT, MODEL, TOKENS
from switchjax.batch import Batch, Prompts
from switchjax.config import ModelConfig
from switchjax.errors import UserError
from switchjax.mesh import Exchange, MeshShape, Storage

Rows = TypeVar("Rows", Batch, Prompts)


class Held(NamedTuple):
    """How the state holds a weight."""

    spec: P
    width: int | None
    """Its dim of size d_model, counted from the last, which ZeRO splits over `data`; None: it is
    small, and stays whole."""

    def split(self) -> "Held":
        """With the width over `data`."""
        if self.width is None:
            return self
        return self._replace(spec=with_entry(self.spec, self.width, DATA))


def with_entry(spec: P, dim: int, axis: str | None) -> P:
    """The spec with another axis, or none, for a dim."""
    entries = list(spec.partitions)
    entries[dim] = axis
    return P(*entries)


def reduced_over(spec: P, axes: tuple[str, ...]) -> P:
    """Of an array that is equal along these axes, whose gradient comes as parts of a sum."""
    return P(*spec.partitions, reduced=frozenset(axes))


def unreduced_over(spec: P, axes: tuple[str, ...]) -> P:
    """Of an array that is the sum of what devices along these axes hold."""
    return P(*spec.partitions, unreduced=frozenset(axes))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Tokens over `(data, expert)`, experts over `expert`, and their hidden dim over `model`.

    `Layout.of` gives another one where the mesh file asks for it: with folded experts, which are
    over `(expert, model)`, a group of devices that shares tensors is a group of experts too.
    """

    devices_n: P = P(AXES)

    # Activations.
    rows_b: P = P(TOKENS)
    tokens_bl: P = P(TOKENS, None)
    tokens_bld: P = P(TOKENS, None, None)
    heads_blhk: P = P(TOKENS, None, MODEL, None)
    hidden_blf: P = P(TOKENS, None, MODEL)
    logits_blv: P = P(TOKENS, None, MODEL)
    bias_hls: P = P(MODEL, None, None)
    kept_nbshk: P = P(None, TOKENS, None, MODEL, None)

    # Parameters.
    norm_d: P = P(None)
    relative_uh: Held = Held(P(None, MODEL), None)
    embed_vd: Held = Held(P(MODEL, None), -1)
    w_q_dhk: Held = Held(P(None, MODEL, None), -3)
    w_o_hkd: Held = Held(P(MODEL, None, None), -1)
    w_in_df: Held = Held(P(None, MODEL), -2)
    w_out_fd: Held = Held(P(MODEL, None), -1)
    router_de: Held = Held(P(None, None), -2)
    w_in_edf: Held = Held(P(EXPERT, None, MODEL), -2)
    w_out_efd: Held = Held(P(EXPERT, MODEL, None), -1)

    # What every device holds whole.
    whole: P = P()

    # What travels between the devices of the expert axis, and how.
    exchange: Exchange = Exchange()
    # Where the parts of the state are.
    storage: Storage = Storage()

    @classmethod
    def of(cls, shape: MeshShape) -> "Layout":
        """The layout that the mesh file asks for."""
        layout = cls(exchange=shape.exchange, storage=shape.storage)
        if shape.exchange.experts == "folded":
            experts = P((EXPERT, MODEL), None, None)
            layout = replace(layout, w_in_edf=Held(experts, -2), w_out_efd=Held(experts, -1))
        if shape.storage.zero == 3:
            values = {field.name: getattr(layout, field.name) for field in fields(layout)}
            split = {name: held.split() for name, held in values.items() if isinstance(held, Held)}
            layout = replace(layout, **split)
        return layout

    def expert_parts(self) -> int:
        """Parts that the experts of a layer are split into, on the mesh in use."""
        axes = self.w_in_edf.spec.partitions[0]
        sizes = jax.sharding.get_abstract_mesh().shape
        return math.prod(sizes[axis] for axis in (axes if isinstance(axes, tuple) else (axes,)))

    def rows(self, num_dims: int) -> P:
        """Of an array whose first dim is batch rows."""
        return P(TOKENS, *(None,) * (num_dims - 1))

    def rows_here(self, num_rows: int) -> list[int]:
        """Which of the rows of a batch this process's devices hold, on the mesh in use.

        Processes hold the same rows where their devices differ in `model` alone.
        """
        sharding = NamedSharding(jax.sharding.get_mesh(), self.rows_b)
        parts: Any = sharding.addressable_devices_indices_map((num_rows,)).values()
        return sorted({row for part in parts for row in range(num_rows)[part[0]]})

    def place(self, batch: Rows) -> Rows:
        """The rows of a batch that are `rows_here`, as arrays over the mesh in use."""
        mesh = jax.sharding.get_mesh()
        if jax.process_count() == 1:  # the same, faster
            return jax.tree.map(
                lambda x: jax.device_put(x, NamedSharding(mesh, self.rows(x.ndim))), batch
            )
        num_parts = math.prod(mesh.shape[axis] for axis in TOKENS)
        num_rows = len(batch.row_B) * num_parts // len(self.rows_here(num_parts))
        here = {row: place for place, row in enumerate(self.rows_here(num_rows))}

        def put(x: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:  # of slices
                rows = range(num_rows)[index[0]]
                return x[here[rows[0]] : here[rows[-1]] + 1]

            sharding = NamedSharding(mesh, self.rows(x.ndim))
            return _assemble((num_rows, *x.shape[1:]), sharding, part)

        return jax.tree.map(put, batch)

    def place_words(self, word: int) -> jax.Array:
        """A number of each process, int32, on each of its devices of the mesh in use."""
        sharding = NamedSharding(jax.sharding.get_mesh(), self.devices_n)
        one = np.array([word], np.int32)
        return _assemble((sharding.mesh.size,), sharding, lambda _: one)


def _assemble(
    shape: tuple[int, ...], sharding: NamedSharding, part: Callable[[Any], np.ndarray]
) -> jax.Array:
    """The array of which this process's devices hold `part(index)`.

    Equivalent to: `jax.make_array_from_callback`, but that its transfers count as meant.
    """
    places = sharding.addressable_devices_indices_map(shape)
    parts = jax.device_put([part(index) for index in places.values()], list(places))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def and_lone_axes(spec: P) -> P:
    """The spec of an experts' weight, of which the mesh axes of size 1 also split the first dim.

    The same layout; but the gradient of a weight is summed over the axes that its spec lacks, and
    a sum over one device is a copy of all of it.
    """
    lone = [axis for axis, size in jax.sharding.get_abstract_mesh().shape.items() if size == 1]
    first, *others = spec.partitions
    if not isinstance(first, tuple):
        first = () if first is None else (first,)
    lone = [axis for axis in lone if axis not in (*first, *others)]
    return P((*first, *lone), *others, reduced=spec.reduced)


def check(
    model: ModelConfig,
    shape: MeshShape,
    *,
    batch_size: int,
    accumulation: int,
    row_lengths: tuple[int, ...],
) -> None:
    """Do the sizes divide over the mesh?

    Args:
        batch_size: rows of one optimizer step.
        accumulation: micro-batches that the rows are cut into.
        row_lengths: tokens of an encoder row and of a decoder row, or of a decoder row alone.

    Raises:
        UserError: naming the two numbers of the first rule that is broken.
    """
    if model.moe_every:
        _check_experts(model, shape)
    _check_storage(model, shape)
    _divides(shape, "model", shape.model, "model.num_heads", model.num_heads)
    _divides(shape, "model", shape.model, "model.d_ff", model.d_ff)
    _divides(shape, "model", shape.model, "model.vocab_size", model.vocab_size)
    devices = shape.data * shape.expert
    micro_rows = batch_size // accumulation
    rows = (
        f"rows of a micro-batch (data.batch_size {batch_size} / optim.accumulation {accumulation})"
    )
    _divides(shape, "data * expert", devices, rows, micro_rows)
    if model.moe_every:
        for length in row_lengths:
            _check_groups(shape, micro_rows // devices * length, model.group_size or length)


def _check_experts(model: ModelConfig, shape: MeshShape) -> None:
    exchange = shape.exchange
    name = "expert" if exchange.experts == "separate" else "with folded experts expert * model"
    _divides(shape, name, shape.expert_parts, "model.num_experts", model.num_experts)
    if exchange.dispatcher == "ragged" and model.encoder_router == "expert_choice":
        raise UserError(
            f"mesh {shape.name}: dispatcher ragged is for experts that take whatever chooses them; "
            "model.encoder_router expert_choice fills a fixed number of slots: choose all_to_all"
        )
    for name in ("eval_capacity_factor", "expert_capacity"):
        if exchange.dispatcher == "ragged" and (value := getattr(model, name)) is not None:
            raise UserError(
                f"mesh {shape.name}: dispatcher ragged drops nothing, so leave out "
                f"model.{name} {value}"
            )


def _check_storage(model: ModelConfig, shape: MeshShape) -> None:
    zero, offload = shape.storage.zero, shape.storage.offload
    if offload == "optimizer+activations" and model.remat != "full":
        raise UserError(
            f"mesh {shape.name}: offload = {offload} moves to the host what each period receives, "
            f"and model.remat {model.remat} keeps more than that: choose model.remat full"
        )
    if zero and shape.data == 1:
        raise UserError(
            f"mesh {shape.name}: zero = {zero} splits the state over data, and data = 1: it would "
            "do nothing, so leave it out"
        )
    if zero:
        _divides(shape, f"with zero = {zero} data", shape.data, "model.d_model", model.d_model)
    if hot := shape.storage.hot_experts:
        _check_hot_experts(model, shape, hot)


def _check_hot_experts(model: ModelConfig, shape: MeshShape, hot: int) -> None:
    if not model.moe_every:
        raise UserError(
            f"mesh {shape.name}: hot_experts = {hot}, and a model with model.moe_every 0 has none"
        )
    if hot >= model.num_experts:
        raise UserError(
            f"mesh {shape.name}: hot_experts = {hot} must be less than model.num_experts = "
            f"{model.num_experts}: to keep them all gathered is zero = 2"
        )
    name = "expert" if shape.exchange.experts == "separate" else "expert * model"
    _divides(shape, name, shape.expert_parts, "hot_experts", hot)


def _divides(shape: MeshShape, axis: str, size: int, name: str, number: int) -> None:
    if number % size:
        raise UserError(f"mesh {shape.name}: {axis} = {size} must divide {name} = {number}")


def _check_groups(shape: MeshShape, tokens: int, group_size: int) -> None:
    if tokens % group_size:
        raise UserError(
            f"mesh {shape.name}: model.group_size = {group_size} must divide the tokens of one "
            f"device's micro-batch = {tokens}, so that no group spans two devices"
        )
    groups = tokens // group_size
    if groups % shape.exchange.chunks:
        raise UserError(
            f"mesh {shape.name}: chunks = {shape.exchange.chunks} must divide the groups of one "
            f"device's micro-batch = {groups} ({tokens} tokens / {group_size} a group)"
        )
