"""What each rung of ZeRO and of remat leaves on a device: train steps compiled for 64 absent H200.

Claim: TBD
Command: python experiments/plans/rungs.py
"""

from dataclasses import replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from switchjax.mesh import read_mesh
from switchjax.plan.candidates import Candidate
from switchjax.plan.compiling import Program, compile_all
from switchjax.plan.cost import step_flops
from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import estimate
from switchjax.plan.sizes import Sizes
from switchjax.presets import PRESETS

H200 = read_hardware("h200")
# Preset, what differs, mesh. The second is 105 B parameters.
MODELS = (
    ("switch-base-128", {}, "data=8,expert=8"),
    ("switch-xxl", {"num_experts": 32}, "data=4,expert=8,model=2"),
)
RUNGS = ((0, "none"), (0, "moe"), (0, "dots"), (0, "full"), (1, "full"), (2, "full"), (3, "full"))


def candidate(name: str, changes: dict, mesh: str, zero: int, remat: str) -> Candidate:
    """A batch of a million tokens in two micro-batches, Adam, bfloat16."""
    preset = PRESETS[name]
    config = replace(
        preset,
        model=replace(preset.model, dtype="bfloat16", remat=remat, **changes),
        data=replace(preset.data, batch_size=2048),
        optim=replace(preset.optim, optimizer="adamw", accumulation=2),
    )
    return Candidate(config=config, shape=read_mesh(f"{mesh},zero={zero}"))


if __name__ == "__main__":
    asked = [candidate(*model, *rung) for model in MODELS for rung in RUNGS]
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=len(asked))
        answers = compile_all(asked, H200, on_done=lambda: progress.advance(task))
    columns = (
        "model",
        "zero",
        "remat",
        "state GB",
        "temporary",
        "all",
        "formula",
        "TFLOP",
        "sent GB",
    )
    table = Table(
        *columns, title="64 H200; formula: over compiler, of bytes, FLOPs, sent", box=None
    )
    for layout, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Program), answer
        row = estimate(layout, H200)
        sent = sum(c.wire_bytes * (c.runs or 1) for c, _ in answer.collectives)
        ratios = (
            row.device_bytes / answer.device_bytes,
            step_flops(Sizes(layout.config, layout.shape), H200) / answer.flops,
            sum(send.wire_bytes for send in row.sends) / sent,
        )
        table.add_row(
            layout.shape.name.split(",zero")[0],
            f"{layout.shape.storage.zero}",
            layout.config.model.remat,
            f"{answer.argument_bytes / 1e9:.2f}",
            f"{answer.temp_bytes / 1e9:.2f}",
            f"{answer.device_bytes / 1e9:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in ratios),
            f"{answer.flops / 1e12:.1f}",
            f"{sent / 1e9:.1f}",
        )
    Console(width=98).print(table)
