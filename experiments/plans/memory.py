"""The ladder of memory, 10 to 1,571 B parameters on 64 to 1,024 H200: bytes of a device by rung.

Command: python experiments/plans/memory.py
"""

from dataclasses import replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from switchjax.config import RunConfig
from switchjax.plan.candidates import candidates
from switchjax.plan.compiling import Program, compile_all
from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import Row, by_formula, with_program
from switchjax.presets import PRESETS
from switchjax.state import model_shapes

H200 = read_hardware("h200")
# Presets, or a preset with more hidden units or fewer experts.
MODELS = {
    "switch-base-128": {"d_ff": 4096},
    "switch-xxl": {"num_experts": 32},
    "switch-xxl ": {"d_ff": 12800},
    "switch-c": {},
}
DEVICES = (64, 256, 1024)
# Name, what is computed again, what `data` splits. Each on the mesh that suits it best.
RUNGS = (
    ("baseline", "none", 0),
    ("+ remat moe", "moe", 0),
    ("remat full", "full", 0),
    ("+ zero 1", "full", 1),
    ("+ zero 2", "full", 2),
    ("+ zero 3", "full", 3),
)
COMPILED = {("switch-base-128", 64, "baseline"), ("switch-xxl", 64, "+ zero 3")}


def run(name: str, devices: int) -> RunConfig:
    """16 K tokens a device, computed in bfloat16, and Adam's two float32 for each parameter."""
    preset = PRESETS[name.strip()]
    return replace(
        preset,
        model=replace(preset.model, dtype="bfloat16", **MODELS[name]),
        data=replace(preset.data, batch_size=32 * devices),
        optim=replace(preset.optim, optimizer="adamw"),
    )


def ladder(config: RunConfig, devices: int) -> list[tuple[str, Row]]:
    """The best layout for each rung, by formula."""
    found = candidates(config, devices, H200)
    return [
        (
            name,
            by_formula(
                (c for c in found if (c.config.model.remat, c.shape.storage.zero) == (remat, zero)),
                H200,
            )[0],
        )
        for name, remat, zero in RUNGS
    ]


def confirmed(rows: dict[tuple[str, int, str], Row]) -> dict[tuple[str, int, str], Row]:
    """With the compiler's bytes where they are asked for."""
    asked = [at for at in rows if at in COMPILED]
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=len(asked))
        answers = compile_all(
            [rows[at].candidate for at in asked], H200, on_done=lambda: progress.advance(task)
        )
    for at, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Program), answer
        rows[at] = with_program(rows[at], answer, H200)
    return rows


if __name__ == "__main__":
    rows = {
        (name, devices, rung): row
        for name in MODELS
        for devices in DEVICES
        for rung, row in ladder(run(name, devices), devices)
    }
    # rows = confirmed(rows)
    classes = list(vars(next(iter(rows.values())).memory))
    console = Console(width=100)
    for name in MODELS:
        shapes = model_shapes(run(name, 64).model).values()
        billions = sum(shape.size for shape in shapes) / 1e9
        words = " ".join(f"{key} {value}" for key, value in MODELS[name].items())
        table = Table(
            *("N", "rung", "mesh", *(c[:6] for c in classes), "all", "fits", "ms"),
            title=f"{billions:,.1f} B parameters ({name.strip()} {words}), GB of a device",
            box=None,
        )
        for (model, devices, rung), row in rows.items():
            if model != name:
                continue
            sizes = "x".join(map(str, row.candidate.shape.sizes))
            micros = row.candidate.config.optim.accumulation
            numbers = [f"{size / 1e9:.1f}" for size in vars(row.memory).values()]
            table.add_row(
                *(f"{devices}", rung, sizes + f"/{micros}" * (micros > 1), *numbers),
                f"{row.device_bytes / 1e9:.1f}{'*' * row.compiled}",
                "yes" if row.fits else "no",
                f"{row.cost.step * 1e3:.0f}",
            )
        console.print(table)
