"""The ladder of memory, 10 to 1,571 B parameters on 64 to 1,024 H200: bytes of a device by rung.

Command: python experiments/plans/memory.py
"""

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from switchjax.config import RunConfig
from switchjax.mesh import Storage
from switchjax.plan.candidates import candidates
from switchjax.plan.compiling import Program, compile_all
from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import Row, by_formula, with_program
from switchjax.presets import PRESETS
from switchjax.state import model_shapes

H200 = read_hardware("h200")
# Billions of parameters, about; a preset, and what makes it as large.
MODELS = {
    10: ("switch-base-128", {"d_ff": 4096}),
    100: ("switch-xxl", {"num_experts": 32}),
    500: ("switch-xxl", {"d_ff": 12800}),
    1571: ("switch-c", {}),
}
DEVICES = (64, 256, 1024)
# Name, what is computed again, where the state is.
RUNGS = (
    ("baseline", "none", [Storage()]),
    ("remat moe", "moe", [Storage()]),
    ("remat full", "full", [Storage()]),
    ("+ zero 1", "full", [Storage(zero=1)]),
    ("+ zero 2", "full", [Storage(zero=2)]),
    ("+ zero 3", "full", [Storage(zero=3)]),
    ("+ offload", "full", [Storage(zero=zero, offload="optimizer") for zero in (0, 3)]),
)
COMPILED = ((10, 64, "remat full"), (100, 64, "+ zero 3"))


def run(billions: int, devices: int) -> RunConfig:
    """16 K tokens a device, computed in bfloat16; Adam."""
    name, changes = MODELS[billions]
    preset = PRESETS[name]
    return replace(
        preset,
        model=replace(preset.model, dtype="bfloat16", **changes),
        data=replace(preset.data, batch_size=32 * devices),
        optim=replace(preset.optim, optimizer="adamw"),
    )


def ladder(billions: int) -> Iterator[tuple[tuple, Row]]:
    """For each number of devices and rung, the best layout: a mesh, and how many micro-batches."""
    for devices in DEVICES:
        found = candidates(run(billions, devices), devices, H200)
        for rung, remat, storages in RUNGS:
            those = [
                candidate
                for candidate in found
                if candidate.config.model.remat == remat and candidate.shape.storage in storages
            ]
            yield (billions, devices, rung), by_formula(those, H200)[0]


def compiled(rows: dict[tuple, Row]) -> dict[tuple, Row]:
    """Some of the rows, with the compiler's bytes."""
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=len(COMPILED))
        asked = [rows[at].candidate for at in COMPILED]
        answers = compile_all(asked, H200, on_done=lambda: progress.advance(task))
    assert all(isinstance(answer, Program) for answer in answers), answers
    pairs = zip(COMPILED, answers, strict=True)
    return {at: with_program(rows[at], answer, H200) for at, answer in pairs}


def table(billions: int, rows: dict[tuple, Row]) -> Table:
    """Of one model."""
    shapes = model_shapes(run(billions, DEVICES[0]).model)
    number = sum(shape.size for shape in shapes.values()) / 1e9
    name, changes = MODELS[billions]
    words = ", ".join([name, *(f"{key} {value}" for key, value in changes.items())])
    out = Table(title=f"{number:,.1f} B parameters ({words}): GB of a device", box=None)
    for column in ("N", "rung", "mesh / micros"):
        out.add_column(column)
    for column in ("param", "optim", "grad", "gath", "act", "buff", "host", "all", "fits", "ms"):
        out.add_column(column, justify="right")
    for (model, devices, rung), row in rows.items():
        if model != billions:
            continue
        shape, micros = row.candidate.shape, row.candidate.config.optim.accumulation
        mesh = "x".join(map(str, shape.sizes)) + f" / {micros}" * (micros > 1)
        sizes = [f"{size / 1e9:.1f}" for size in vars(row.memory).values()]
        total = f"{row.device_bytes / 1e9:.1f}{'*' * row.compiled}"
        fits, step = "yes" if row.fits else "no", f"{row.cost.step * 1e3:.0f}"
        out.add_row(f"{devices}", rung, mesh, *sizes, total, fits, step)
    return out


if __name__ == "__main__":
    rows = {at: row for billions in MODELS for at, row in ladder(billions)}
    rows |= compiled(rows)
    console = Console(width=98)
    for billions in MODELS:
        console.print(table(billions, rows))
