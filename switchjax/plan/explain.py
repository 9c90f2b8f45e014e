"""One compiled layout in detail: what fills a device, and what is sent when, over which link."""

import os
from collections.abc import Iterator

from rich.table import Table

from switchjax.plan.candidates import Candidate
from switchjax.plan.collectives import Collective
from switchjax.plan.compiling import Program
from switchjax.plan.hardware import Hardware
from switchjax.plan.ranking import MEMORY_FRACTION, Row, timed_collectives
from switchjax.plan.schedule import EXCHANGES

_SMALL = 1e-6
"""Seconds: collectives that take less are counted, not listed."""

ADVICE = {
    "parameters": "more devices, or fewer or narrower experts",
    "optimizer": "another optimizer (adafactor keeps least), or more devices",
    "gradients": "more devices, or fewer or narrower experts",
    "activations": "--model.remat full, more accumulation or shorter rows",
    "buffers": "more accumulation or shorter rows",
}


def memory_table(row: Row, program: Program | None, hardware: Hardware) -> Table:
    """Bytes of a device by class."""
    out = Table("class", "GB", "of the device", "what would make it less", title="memory, GB")
    for name, size in vars(row.memory).items():
        out.add_row(name, f"{size / 1e9:.2f}", f"{size / hardware.memory:.1%}", ADVICE[name])
    out.add_section()
    total = row.memory.total
    out.add_row("all, by formula", f"{total / 1e9:.2f}", f"{total / hardware.memory:.1%}", "")
    if program is not None:
        for name, size in (
            ("state, by the compiler", program.argument_bytes),
            ("temporaries", program.temp_bytes),
            ("all, by the compiler", program.device_bytes),
        ):
            out.add_row(name, f"{size / 1e9:.2f}", f"{size / hardware.memory:.1%}", "")
    return out


def collective_table(candidate: Candidate, program: Program, hardware: Hardware) -> Table:
    """Each collective that takes time, those of one source line together, the longest first."""
    columns = ("purpose", "kind", "axes", "link", "source", "runs", "MB", "ms", "exposed ms")
    out = Table(*columns, title="sent in a step by one device")
    lines = sorted(_lines(candidate, program, hardware), key=lambda line: -line[-2])
    small = [line for line in lines if line[-2] < _SMALL]
    for line in lines[: len(lines) - len(small)]:
        *words, runs, megabytes, seconds, exposed = line
        numbers = (f"{megabytes:.1f}", f"{seconds * 1e3:.2f}", f"{exposed * 1e3:.2f}")
        out.add_row(*words, f"{runs:g}", *numbers)
    if small:
        out.caption = f"and {len(small)} of less than a microsecond"
    return out


def _lines(candidate: Candidate, program: Program, hardware: Hardware) -> Iterator[tuple]:
    """(purpose, kind, axes, link, source, runs, megabytes, seconds, exposed seconds)."""
    sums: dict[tuple, list[float]] = {}
    for collective, send, link, seconds, hidden in timed_collectives(candidate, program, hardware):
        source = os.path.basename(collective.source or "")
        key = purpose(collective), collective.kind, ",".join(collective.axes), link, source
        numbers = sums.setdefault(key, [0.0] * 4)
        for i, number in enumerate((send.runs, send.wire_bytes / 1e6, seconds, seconds - hidden)):
            numbers[i] += number
    for key, numbers in sums.items():
        yield *key, *numbers


def purpose(collective: Collective) -> str:
    """What a collective is for, by where it stands in the program."""
    if collective.phase:
        return f"tokens: {collective.phase}"
    if collective.kind in EXCHANGES:  # XLA loses the names of ragged ones
        return "tokens"
    if collective.axes == ("model",):
        return "activations"
    return "gradients" if "transpose" in collective.op_name or not collective.source else ""


def out_of_memory(row: Row, program: Program | None, hardware: Hardware) -> str:
    """How much too large a layout is, what fills the device and what would help; one line."""
    limit = hardware.memory * MEMORY_FRACTION
    parts = vars(row.memory)
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    said = (
        f"{row.candidate.name} does not fit: {row.device_bytes / 1e9:.1f} GB of the "
        f"{limit / 1e9:.1f} GB that XLA may use of a {hardware.name}; most are "
        + " and ".join(f"{name} ({parts[name] / 1e9:.1f} GB)" for name in largest)
    )
    if program is not None:
        buffers = (f"{kind} {size / 1e9:.1f} GB" for size, kind, _ in program.largest[:3])
        said += f"; the largest arrays: {', '.join(buffers)}"
    return f"{said}; less of them: {ADVICE[largest[0]]}"
