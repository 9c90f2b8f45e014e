"""Layouts in the order of their step time: by formula, and by the compiler where it was asked."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from switchjax.config import RunConfig
from switchjax.plan.candidates import Candidate, candidates
from switchjax.plan.collectives import Collective
from switchjax.plan.compiling import Program
from switchjax.plan.cost import MATMUL_SHARE, Cost, cost, model_flops, send_seconds
from switchjax.plan.hardware import Hardware
from switchjax.plan.memory import Memory, memory
from switchjax.plan.sizes import Sizes
from switchjax.plan.wire import Send, sends

MEMORY_FRACTION = 0.92
"""Of a device's memory, what XLA may take; the rest is the driver's and NCCL's."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout and what it costs."""

    candidate: Candidate
    memory: Memory
    """By formula, by class."""
    device_bytes: float
    """By formula, or by the compiler."""
    sends: list[Send]
    cost: Cost
    fits: bool
    tokens_per_second: float
    """Of all devices: tokens of encoder and decoder rows, padding included."""
    utilisation: float
    """Model FLOPs over the peak of the devices for the time of a step."""
    compiled: bool = False
    failure: str | None = None
    """What the compiler said, where it failed."""

    @property
    def sending_share(self) -> float:
        return self.cost.exposed / self.cost.step


def estimate(candidate: Candidate, hardware: Hardware) -> Row:
    """By formula alone."""
    sizes = Sizes(candidate.config, candidate.shape)
    used, sent = memory(sizes), sends(sizes)
    seconds = cost(sizes, used, sent, hardware)
    return _row(sizes, hardware, used, used.total, sent, seconds)


def _row(
    sizes: Sizes,
    hardware: Hardware,
    used: Memory,
    device_bytes: float,
    sent: list[Send],
    seconds: Cost,
    *,
    compiled: bool = False,
) -> Row:
    config, shape = sizes.config, sizes.shape
    tokens = config.optim.accumulation * sum(stack.tokens for stack in sizes.stacks)
    tokens *= shape.data * shape.expert
    peak = hardware.peak[sizes.model.dtype]
    return Row(
        candidate=Candidate(config=config, shape=shape),
        memory=used,
        device_bytes=device_bytes,
        sends=sent,
        cost=seconds,
        fits=device_bytes <= hardware.memory * MEMORY_FRACTION,
        tokens_per_second=tokens / seconds.step,
        utilisation=model_flops(sizes) / (peak * seconds.step),
        compiled=compiled,
    )


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Those that fit by step time, then the others by how far they are from fitting."""
    return sorted(
        rows,
        key=lambda row: (
            row.failure is not None,
            not row.fits,
            row.cost.step if row.fits else row.device_bytes,
        ),
    )


def layouts_by_formula(config: RunConfig, num_devices: int, hardware: Hardware) -> list[Row]:
    """The best way to run each mesh that divides, in order.

    Raises:
        UserError: none divides.
    """
    return by_formula(candidates(config, num_devices, hardware), hardware)


def by_formula(found: Iterable[Candidate], hardware: Hardware) -> list[Row]:
    """The best of these for each mesh, in order.

    More micro-batches never make a step shorter, so of candidates that differ in nothing else, and
    stand next to each other, only the first that fits is looked for.
    """
    rows = []
    for _, same in groupby(found, lambda c: (c.shape, c.config.model.remat)):
        rows += _first_that_fits(list(same), hardware)
    return best_of_each(ranked(rows))


def _first_that_fits(candidates: list[Candidate], hardware: Hardware) -> list[Row]:
    """Of candidates that take ever less memory; the first and the last if none fits."""
    first, *others = (partial(estimate, candidate, hardware) for candidate in candidates)
    row = first()
    if row.fits or not others:
        return [row]
    last = others[-1]()
    if not last.fits:
        return [row, last]
    while len(others) > 1:
        middle = len(others) // 2
        row = others[middle - 1]()
        others, last = (others[:middle], row) if row.fits else (others[middle:], last)
    return [last]


def best_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of the ways to run each mesh (ZeRO, remat, accumulation), the first; `rows` are ranked."""
    first: dict[object, Row] = {}
    for row in rows:
        shape = row.candidate.shape
        first.setdefault((shape.sizes, shape.exchange), row)
    return list(first.values())


class Timed(NamedTuple):
    """A collective of a program, all its runs together."""

    collective: Collective
    send: Send
    link: str
    """That limits it: "inside" a node, or "between" nodes."""
    seconds: float
    hidden: float
    """Of the seconds, behind the matrix products that are scheduled beside it."""


def timed_collectives(
    candidate: Candidate, program: Program, hardware: Hardware
) -> Iterator[Timed]:
    """What a program sends, with the time that the hardware takes for it."""
    rate = hardware.peak[candidate.config.model.dtype] * MATMUL_SHARE
    for collective, flops in program.collectives:
        runs = collective.runs or 1
        send = Send(
            purpose=collective.phase,
            kind=collective.kind,
            axes=collective.axes,
            wire_bytes=collective.wire_bytes * runs,
            runs=runs,
        )
        link, seconds = send_seconds(
            send.kind, send.axes, send.wire_bytes, runs, candidate.shape, hardware
        )
        yield Timed(collective, send, link, seconds, min(seconds, runs * flops / rate))


def with_program(row: Row, program: Program, hardware: Hardware) -> Row:
    """The row with the compiler's bytes, collectives and schedule in place of the formulas'."""
    sizes = Sizes(row.candidate.config, row.candidate.shape)
    of_host = row.cost.sending["host"]
    sending, hidden, sent = {"inside": 0.0, "between": 0.0, "host": of_host}, 0.0, []
    for timed in timed_collectives(row.candidate, program, hardware):
        sending[timed.link] += timed.seconds
        hidden += timed.hidden
        sent.append(timed.send)
    # What a product stands beside is no more than all products, however many collectives it is.
    hidden = min(hidden, row.cost.compute)
    seconds = replace(row.cost, sending=sending, hidden=hidden)
    # XLA knows one memory of an absent GPU; what is on the host is taken off by our own account.
    device_bytes = program.device_bytes - row.memory.on_host
    return _row(sizes, hardware, row.memory, device_bytes, sent, seconds, compiled=True)
