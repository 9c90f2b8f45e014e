"""What each rung of ZeRO and of remat leaves on a device: train steps compiled for 64 absent H200.

A million tokens in two micro-batches, Adam, bfloat16; 7.4 B and 105 B parameters. Columns param to
grad are by formula, state to TFLOP the compiler's, formula is all bytes over the compiler's.

Claim: with a data degree of 8 and of 4, optimizer bytes are an eighth and a quarter from zero 1 on,
gradients from 2 on, parameters with 3: param + optim is the compiler's state. Of the temporaries
beyond gradients that `none` has, `full` leaves 22 % and next to nothing; `moe` costs 5 % and 7 %
more FLOPs. Bytes sent and FLOPs by formula are the compiler's.
Command: python experiments/plans/rungs.py
Printed (2026-11-30, Python 3.11, jax 0.10.2):

                                      64 H200, GB of a device
     model     zero  remat  param  optim   grad   state    temp     all    sent  TFLOP  formula
     base-128  0     none    4.29   8.59   8.59   12.88   16.89   29.77    9.80   15.2     1.04
     base-128  0     moe     4.29   8.59   8.59   12.88   16.38   29.26    9.80   16.0     1.05
     base-128  0     dots    4.29   8.59   8.59   12.88   11.90   24.78    9.23   15.6     1.01
     base-128  0     full    4.29   8.59   8.59   12.88   10.43   23.31    9.69   20.1     1.00
     base-128  1     full    4.29   1.07   8.59    5.37   10.46   15.82   13.45   20.1     0.99
     base-128  2     full    4.29   1.07   1.07    5.37    3.75    9.11    9.28   20.1     1.12
     base-128  3     full    0.54   1.07   1.07    1.61    4.04    5.65   12.96   20.1     0.92
     xxl       0     none   40.14  80.28  80.28  120.42  178.95  299.37  137.37  719.7     1.06
     xxl       0     moe    40.14  80.28  80.28  120.42  166.47  286.89  137.37  771.3     1.06
     xxl       0     dots   40.14  80.28  80.28  120.42  111.81  232.23  121.62  724.0     1.03
     xxl       0     full   40.14  80.28  80.28  120.42   79.06  199.48  143.67  958.7     1.06
     xxl       1     full   40.14  20.07  80.28   60.21   79.05  139.26  173.78  958.7     1.08
     xxl       2     full   40.14  20.07  20.07   60.21   32.43   92.64  142.53  958.7     1.19
     xxl       3     full   10.04  20.07  20.07   30.11   39.70   69.81  172.46  958.7     0.92
    largest deviation of formulas: sent 0.0%, FLOPs 0.1%
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
from switchjax.plan.ranking import Row, estimate
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


def sent_bytes(program: Program) -> float:
    """By one device in a step."""
    return sum(c.wire_bytes * (c.runs or 1) for c, _ in program.collectives)


def cells(row: Row, program: Program) -> list[str]:
    """Classes by formula, then the compiler's, and all bytes by formula over them."""
    used = row.memory
    sizes = (used.parameters, used.optimizer, used.gradients)
    sizes += (program.argument_bytes, program.temp_bytes, program.device_bytes)
    words = [f"{size / 1e9:.2f}" for size in (*sizes, sent_bytes(program))]
    words.append(f"{program.flops / 1e12:.1f}")
    return [*words, f"{used.total / program.device_bytes:.2f}"]


def deviations(row: Row, program: Program) -> tuple[float, float]:
    """Of the formulas for bytes sent and for FLOPs from the compiler's."""
    sizes = Sizes(row.candidate.config, row.candidate.shape)
    sent = sum(send.wire_bytes for send in row.sends) / sent_bytes(program)
    return abs(sent - 1), abs(step_flops(sizes, H200) / program.flops - 1)


if __name__ == "__main__":
    asked = [candidate(*model, *rung) for model in MODELS for rung in RUNGS]
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=len(asked))
        answers = compile_all(asked, H200, on_done=lambda: progress.advance(task))
    rows = [estimate(candidate, H200) for candidate in asked]
    table = Table("model", "zero", "remat", title="64 H200, GB of a device", box=None)
    for column in ("param", "optim", "grad", "state", "temp", "all", "sent", "TFLOP", "formula"):
        table.add_column(column, justify="right")
    names = [name.removeprefix("switch-") for name, _, _ in MODELS for _ in RUNGS]
    worst = [0.0, 0.0]
    for name, row, answer in zip(names, rows, answers, strict=True):
        assert isinstance(answer, Program), answer
        zero, remat = row.candidate.shape.storage.zero, row.candidate.config.model.remat
        table.add_row(name, f"{zero}", remat, *cells(row, answer))
        worst = [max(pair) for pair in zip(worst, deviations(row, answer), strict=True)]
    console = Console(width=98)
    console.print(table)
    console.print("largest deviation of formulas: sent {:.1%}, FLOPs {:.1%}".format(*worst))
