"""What a compiled program sends: each collective, its mesh axes, its bytes, how often it runs.

Reads the text of `jax.stages.Compiled.as_text()` of a program for CPUs or for GPUs: sends that
block, and sends in two parts, `-start` and `-done`. The program is one replica over all devices of
the mesh, as JAX compiles it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from switchjax.mesh import MeshShape
from switchjax.plan.groups import axes_of, replica_groups, source_target_pairs
from switchjax.plan.hlo import (
    ArrayType,
    Program,
    Visit,
    array_types,
    in_scope,
    parse,
    tuple_items,
    visits,
)

KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    "collective-broadcast",
)

# Named scopes of the Switch layer.
PHASES = ("route", "dispatch", "experts", "combine")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction. Bytes are those of one device and one run of the instruction."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes along which the members of a group differ."""
    group_size: int
    """Devices that exchange. Less than the product of the axes' sizes where a group is a part."""
    dtypes: tuple[str, ...]
    elements: int
    bytes: int
    """Of the operand or the result, whichever is larger."""
    runs: int | None
    """In one run of the program; None: in a loop whose length the compiler did not know."""
    conditional: bool
    """In a branch of a conditional: it may not run at all."""
    op_name: str
    """JAX's name, with its named scopes.

    XLA loses it where it puts several collectives in one, and on GPUs that of a ragged all-to-all.
    """
    source: str | None
    """`file:line` of the Python code."""

    @property
    def wire_bytes(self) -> float:
        """That one device sends to others in one run.

        Exact for an all-to-all, an all-gather, a reduce-scatter and a permute; for an all-reduce
        that of a ring. A ragged all-to-all sends what the routing asks for: its whole operand is
        the upper bound.
        """
        away = (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            return 2 * self.bytes * away
        if self.kind in ("all-to-all", "all-gather", "reduce-scatter"):
            return self.bytes * away
        return float(self.bytes)

    @property
    def phase(self) -> str:
        """Which of `PHASES` it belongs to, or an empty text."""
        return next((phase for phase in PHASES if in_scope(self.op_name, phase)), "")


def collectives(text: str, shape: MeshShape) -> list[Collective]:
    """The collectives of a compiled program that reach another device, in the order of the text.

    One that several calls lead to is listed once for each of them.

    Args:
        shape: the mesh that the program was compiled for.

    Raises:
        ValueError: the text cannot be read, or names devices outside the mesh.
    """
    program = parse(text)
    found = (collective_at(program, visit, shape) for visit in visits(program))
    return [collective for collective in found if collective is not None]


def bytes_by_kind_and_axes(
    collectives: Iterable[Collective],
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes that one device sends in one run of the program, for each kind and mesh axes.

    Both branches of a conditional count in full: leave out first what does not run, for example
    `not in_scope(collective.op_name, "fallback")`.

    Raises:
        ValueError: a collective stands in a loop of unknown length.
    """
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for collective in collectives:
        if collective.runs is None:
            raise ValueError(
                f"no total of bytes: {collective.kind} {collective.op_name} stands in a loop "
                f"whose length the compiler did not know"
            )
        key = collective.kind, collective.axes
        sums[key] = sums.get(key, 0.0) + collective.wire_bytes * collective.runs
    return sums


def collective_at(program: Program, visit: Visit, shape: MeshShape) -> Collective | None:
    """The collective that an instruction is, or starts; None if it is none or stays at home."""
    instruction = visit.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    if kind == "collective-permute":
        pairs = source_target_pairs(instruction.attributes)
        axes = axes_of(pairs, shape) if pairs else ()
        group_size = math.prod(getattr(shape, axis) for axis in axes)
    else:
        groups = replica_groups(instruction.attributes, shape.num_devices)
        axes = axes_of(groups, shape)
        group_size = max(map(len, groups))
    if group_size == 1:
        return None
    arrays = _payload(kind, visit)
    whole = group_size if kind == "reduce-scatter" else 1  # the result is one device's part
    return Collective(
        kind=kind,
        axes=axes,
        group_size=group_size,
        dtypes=tuple(dict.fromkeys(array.dtype for array in arrays)),
        elements=whole * sum(array.elements for array in arrays),
        bytes=whole * sum(array.bytes for array in arrays),
        runs=visit.runs,
        conditional=visit.conditional,
        op_name=instruction.op_name,
        source=program.source(instruction),
    )


def _payload(kind: str, visit: Visit) -> list[ArrayType]:
    """The result's arrays; of a ragged all-to-all, whose result is a buffer, the operand's."""
    instruction = visit.instruction
    if kind == "ragged-all-to-all":
        return array_types(visit.computation[instruction.operands[0]].type)
    items = tuple_items(instruction.type)
    # A start's type is (operands, results, ...), but an all-reduce's may be that of its results.
    if instruction.opcode.endswith("-start") and (kind != "all-reduce" or items[0].startswith("(")):
        return array_types(items[1])
    return array_types(instruction.type)
