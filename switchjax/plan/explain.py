"""One layout in detail: what fills a device and what would make it less, what is sent and where."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from rich.table import Table

from switchjax.config import Offload, ParamDtype
from switchjax.plan.candidates import Candidate, half_of_the_experts, remats
from switchjax.plan.collectives import Collective
from switchjax.plan.compiling import Program
from switchjax.plan.hardware import Hardware
from switchjax.plan.memory import Memory
from switchjax.plan.ranking import MEMORY_FRACTION, Row, estimate, timed_collectives
from switchjax.plan.schedule import EXCHANGES

_SMALL = 1e-6
"""Seconds: collectives that take less are counted, not listed."""


def memory_table(row: Row, program: Program | None, hardware: Hardware) -> Table:
    """Bytes of a device by class."""
    out = Table("class", "GB", "of the device", "what would make it less", title="memory, GB")
    on_host = row.memory.on_host
    for name, size in classes(row.memory).items():
        share = f"{size / hardware.memory:.1%}"
        out.add_row(name, f"{size / 1e9:.2f}", share, advice(name, row.candidate))
    out.add_section()
    if on_host:
        out.add_row("on the host, by formula", f"{on_host / 1e9:.2f}", "", "")
    total = row.memory.total
    out.add_row("all, by formula", f"{total / 1e9:.2f}", f"{total / hardware.memory:.1%}", "")
    if program is not None:
        for name, size in (
            ("state, by the compiler", program.argument_bytes),
            ("temporaries", program.temp_bytes),
            ("all, by the compiler", program.device_bytes),
            *[("… less what is on the host", program.device_bytes - on_host)] * (on_host > 0),
        ):
            out.add_row(name, f"{size / 1e9:.2f}", f"{size / hardware.memory:.1%}", "")
    return out


def classes(memory: Memory) -> dict[str, float]:
    """Bytes on the device, by class."""
    return {name: size for name, size in vars(memory).items() if name != "on_host"}


def advice(name: str, candidate: Candidate) -> str:
    """What would make a class of memory less: the next key that this layout has not used up."""
    shape, model = candidate.shape, candidate.config.model
    zero = shape.storage.zero if shape.data > 1 else 3  # nothing to split
    fewer = "more devices, or fewer or narrower experts"
    match name:
        case "parameters":
            return "zero = 3 in the mesh file" if zero < 3 else fewer
        case "optimizer" if zero < 1:
            return "zero = 1 in the mesh file, or optim.optimizer adafactor, which keeps least"
        case "optimizer" if shape.storage.offload == "none":
            return "offload = optimizer in the mesh file, or optim.optimizer adafactor"
        case "optimizer":
            return "optim.optimizer adafactor, which keeps least, or more devices"
        case "gradients":
            return "zero = 2 in the mesh file" if zero < 2 else fewer
        case "gathered":
            return "more of expert or model, which split it too"
        case "activations" if model.remat != "full":
            return "--model.remat full, more accumulation or shorter rows"
        case _:
            return "more accumulation or shorter rows"


def rungs(candidate: Candidate, hardware: Hardware) -> Iterator[tuple[str, Candidate]]:
    """What could be set otherwise on this mesh, for memory: each name with the layout it gives.

    Of these the dtype of parameters alone changes numbers.
    """
    config, shape = candidate.config, candidate.shape

    def stored(**keys: Any) -> Candidate:
        return replace(candidate, shape=replace(shape, storage=replace(shape.storage, **keys)))

    for zero in range(4) if shape.data > 1 else ():
        yield f"zero = {zero}", stored(zero=zero, hot_experts=0)
    if hot := half_of_the_experts(config, shape):
        yield f"zero = 3, hot_experts = {hot}", stored(zero=3, hot_experts=hot)
    offloads = get_args(Offload) if hardware.host_bandwidth is not None else ()
    for offload in offloads if config.optim.optimizer != "sgd" else ():
        if offload != "optimizer+activations" or config.model.remat == "full":
            yield f"offload = {offload}", stored(offload=offload)
    for remat in remats(config, shape.storage):
        changed = replace(config, model=replace(config.model, remat=remat))
        yield f"remat {remat}", replace(candidate, config=changed)
    for dtype in get_args(ParamDtype):
        changed = replace(config, model=replace(config.model, param_dtype=dtype))
        yield f"param_dtype {dtype}", replace(candidate, config=changed)


def rung_table(candidate: Candidate, hardware: Hardware) -> Table:
    """Bytes of each class with each rung alone changed, by formula; `*` marks those in use."""
    rows = [(name, estimate(changed, hardware)) for name, changed in rungs(candidate, hardware)]
    names = list(vars(rows[0][1].memory))
    out = Table(title="what each rung would leave, GB by formula; * = in use")
    out.add_column("rung")
    for name in (*names, "all", "fits", "step ms"):
        out.add_column(name, justify="right")
    kind = rows[0][0].split()[0]
    for name, row in rows:
        if name.split()[0] != kind:
            out.add_section()
        kind, used = name.split()[0], row.candidate == candidate
        sizes = [f"{size / 1e9:.2f}" for size in (*vars(row.memory).values(), row.device_bytes)]
        fits, step = "yes" if row.fits else "no", f"{row.cost.step * 1e3:.1f}"
        out.add_row(f"{name}{' *' * used}", *sizes, fits, step)
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
    parts = classes(row.memory)
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    said = (
        f"{row.candidate.name} does not fit: {row.device_bytes / 1e9:.1f} GB of the "
        f"{limit / 1e9:.1f} GB that XLA may use of a {hardware.name}; most are "
        + " and ".join(f"{name} ({parts[name] / 1e9:.1f} GB)" for name in largest)
    )
    if program is not None:
        buffers = (f"{kind} {size / 1e9:.1f} GB" for size, kind, _ in program.largest[:3])
        said += f"; the largest arrays: {', '.join(buffers)}"
    return f"{said}; less of them: {advice(largest[0], row.candidate)}"
