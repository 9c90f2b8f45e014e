"""What is computed while a collective is under way, read off a scheduled program.

XLA:GPU prints a collective in two parts, and the instructions between `-start` and `-done` in the
order in which the schedule launches them. What stands between is launched while bytes travel. How
long either takes is another question.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from switchjax.mesh import MeshShape
from switchjax.plan.collectives import Collective, collective_at
from switchjax.plan.hlo import (
    Computation,
    Instruction,
    Program,
    Visit,
    array_types,
    below,
    in_scope,
    parse,
    visits,
)

EXCHANGES = ("all-to-all", "ragged-all-to-all")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A collective, and what one run of it has between its start and its done.

    A matmul is an expert's if its name has the scope "experts". XLA keeps the names of matmuls, so
    that is known; one without a name counts among all matmuls alone. A matmul between the parts of
    several collectives counts for each.
    """

    collective: Collective
    matmul_flops: int
    """Of all matmuls; 2 for each multiply-add."""
    expert_flops: int


def overlaps(text: str, shape: MeshShape, kinds: Iterable[str] = EXCHANGES) -> list[Overlap]:
    """The collectives of these kinds that reach another device, each with what it overlaps.

    A collective in one part, or one that the compiler chose to wait for, overlaps nothing.

    Raises:
        ValueError: as `collectives`.
    """
    program = parse(text)
    found = []
    for visit in visits(program):
        collective = collective_at(program, visit, shape)
        if collective is not None and collective.kind in kinds:
            matmuls = _matmuls(program, visit)
            experts = (flops for flops, name in matmuls if in_scope(name, "experts"))
            found.append(
                Overlap(
                    collective=collective,
                    matmul_flops=sum(flops for flops, _ in matmuls),
                    expert_flops=sum(experts),
                )
            )
    return found


def overlapped_share(overlaps: Iterable[Overlap]) -> float:
    """Share of the bytes sent that have an expert's matmul under way; NaN if nothing is sent.

    Raises:
        ValueError: a collective stands in a loop of unknown length.
    """
    total = covered = 0.0
    for overlap in overlaps:
        collective = overlap.collective
        if collective.runs is None:
            raise ValueError(f"{collective.op_name} stands in a loop of unknown length")
        sent = collective.wire_bytes * collective.runs
        total += sent
        covered += sent * (overlap.expert_flops > 0)
    return covered / total if total else math.nan


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of a dot or of a call of cuBLAS, from its shapes; 0 for anything else.

    Padding that XLA added counts. A kernel written by hand shows no matmul.
    """
    if instruction.opcode == "dot":
        dims = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    elif '"__cublas$' in instruction.rest and instruction.opcode == "custom-call":
        dims = re.search(r'"lhs_contracting_dimensions":\[([^]]*)\]', instruction.rest)
    else:
        return 0
    out = array_types(instruction.type)[0]  # beside it may stand a workspace
    lhs = array_types(computation[instruction.operands[0]].type)[0]
    contracted = [int(dim) for dim in re.findall(r"\d+", dims[1])] if dims else []
    return 2 * out.elements * math.prod(lhs.shape[dim] for dim in contracted)


def program_flops(text: str) -> int:
    """Of all matrix products of one run of a program, by one device; of both branches of a
    conditional, and once of what stands in a loop of unknown length."""
    return sum(
        (visit.runs or 1) * matmul_flops(visit.instruction, visit.computation)
        for visit in visits(parse(text))
    )


def _matmuls(program: Program, visit: Visit) -> list[tuple[int, str]]:
    """FLOPs and name of each matmul that is launched while the collective is under way.

    One in a loop of unknown length counts once.
    """
    found = []
    for launched in _between(visit):
        for inner in below(program, launched):
            flops = matmul_flops(inner.instruction, inner.computation)
            if flops:
                name = inner.instruction.op_name or launched.instruction.op_name
                found.append((flops * (inner.runs or 1), name))
    return found


def _between(visit: Visit) -> list[Visit]:
    """What is launched from the start to the done; nothing if the done is not in sight."""
    waits = '"is_sync":true' in visit.instruction.rest
    # XLA prints some collectives as a computation of their own that `async-start` calls.
    if visit.caller is not None and visit.caller.instruction.opcode == "async-start":
        visit = visit.caller
    start = visit.instruction
    if waits or '"is_sync":true' in start.rest or not start.opcode.endswith("-start"):
        return []
    instructions = list(visit.computation.values())
    first = instructions.index(start) + 1
    handle = start.name
    for last, instruction in enumerate(instructions[first:], first):
        if handle in instruction.operands and instruction.opcode.endswith("-update"):
            handle = instruction.name
        if handle in instruction.operands and instruction.opcode.endswith("-done"):
            return [Visit(between, visit.computation) for between in instructions[first:last]]
    return []
