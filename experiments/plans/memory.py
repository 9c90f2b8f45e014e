"""The ladder of memory, 10 to 1,571 B parameters on 64 to 1,024 H200: bytes of a device by rung.

Each rung has the mesh (data x expert x model) and the number of micro-batches (/, if more than one)
that suit it best, of those that fit. By formula, but * by the compiler.

Claim: with experts over all devices, 10 and 100 B fit on 64 GPUs without any rung, but 100 B in
many micro-batches only: there remat takes a third off the step. ZeRO leaves room and costs time.
492 B fit on 64 GPUs only with the optimizer's state on the host; 1,571 B need 256.
Command: python experiments/plans/memory.py
Printed (2026-11-30, Python 3.11, jax 0.10.2):

                9.9 B parameters (switch-base-128, d_ff 4096): GB of a device
    N     rung        mesh     param  optim  grad  gath   act  buff  host   all  fits   ms
    64    baseline    1x64x1     1.3    2.7   1.3   0.0  14.5   1.9   0.0  21.8   yes   59
    64    remat moe   1x64x1     1.3    2.7   1.3   0.0  13.1   2.1   0.0  20.6   yes   61
    64    remat full  1x64x1     1.3    2.7   1.3   0.0   0.2   3.4   0.0  8.9*   yes   77
    64    + zero 1    2x32x1     2.0    2.0   2.0   0.0   0.2   3.4   0.0   9.5   yes  115
    64    + zero 2    2x32x1     2.0    2.0   1.0   0.0   0.2   3.4   0.0   8.5   yes  112
    64    + zero 3    2x32x1     1.0    2.0   1.0   0.4   0.2   3.4   0.0   7.9   yes  112
    64    + offload   1x32x2     1.0    0.2   1.0   0.0   0.4   3.8   1.8   6.4   yes  165
    256   baseline    2x128x1    1.0    2.1   1.0   0.0  17.0   8.4   0.0  29.6   yes   62
    256   remat moe   2x128x1    1.0    2.1   1.0   0.0  13.0   8.9   0.0  26.2   yes   65
    256   remat full  2x128x1    1.0    2.1   1.0   0.0   0.2  10.2   0.0  14.6   yes   82
    256   + zero 1    2x128x1    1.0    1.0   1.0   0.0   0.2  10.2   0.0  13.6   yes   95
    256   + zero 2    2x128x1    1.0    1.0   0.5   0.0   0.2  10.2   0.0  13.1   yes   98
    256   + zero 3    2x128x1    0.5    1.0   0.5   0.2   0.2  10.2   0.0  12.8   yes   98
    256   + offload   2x64x2     0.3    0.1   0.3   0.1   0.4  10.6   0.6  11.9   yes  130
    1024  baseline    8x128x1    1.0    2.1   1.0   0.0  17.0   8.4   0.0  29.6   yes   65
    1024  remat moe   8x128x1    1.0    2.1   1.0   0.0  13.0   8.9   0.0  26.2   yes   68
    1024  remat full  8x128x1    1.0    2.1   1.0   0.0   0.2  10.2   0.0  14.6   yes   85
    1024  + zero 1    8x128x1    1.0    0.3   1.0   0.0   0.2  10.2   0.0  12.8   yes  108
    1024  + zero 2    8x128x1    1.0    0.3   0.1   0.0   0.2  10.2   0.0  11.9   yes  113
    1024  + zero 3    8x128x1    0.1    0.3   0.1   0.2   0.2  10.2   0.0  11.2   yes  112
    1024  + offload   8x64x2     0.1    0.0   0.1   0.1   0.4  10.6   0.2  11.4   yes  120
                 104.6 B parameters (switch-xxl, num_experts 32): GB of a device
    N     rung        mesh      param  optim  grad  gath   act  buff  host    all  fits    ms
    64    baseline    1x16x4/8   14.0   28.1  28.1   0.0  38.8   0.8   0.0  109.8   yes  3407
    64    remat moe   1x16x4/4   14.0   28.1  28.1   0.0  64.3   2.0   0.0  136.5   yes  3036
    64    remat full  2x16x2     28.1   56.1  28.1   0.0   4.3  16.5   0.0  133.0   yes  2294
    64    + zero 1    2x16x2     28.1   28.1  28.1   0.0   4.3  16.5   0.0  105.0   yes  2645
    64    + zero 2    2x16x2     28.1   28.1  14.0   7.3   4.3  16.5   0.0   98.2   yes  2619
    64    + zero 3    2x16x2     14.0   28.1  14.0   2.7   4.3  16.5   0.0  80.6*   yes  2406
    64    + offload   2x8x4      10.0    0.8  10.0   1.9   8.5  20.5  19.2   51.8   yes  3487
    256   baseline    2x32x4/4   11.0   22.0  22.0   0.0  69.1   1.6   0.0  125.8   yes  3188
    256   remat moe   2x32x4/4   11.0   22.0  22.0   0.0  62.8   2.0   0.0  119.9   yes  3274
    256   remat full  8x16x2     28.1   56.1  28.1   0.0   4.3  16.5   0.0  133.0   yes  2410
    256   + zero 1    8x16x2     28.1    7.0  28.1   0.0   4.3  16.5   0.0   83.9   yes  3024
    256   + zero 2    8x16x2     28.1    7.0   3.5   7.3   4.3  16.5   0.0   66.6   yes  2981
    256   + zero 3    8x16x2      3.5    7.0   3.5   2.7   4.3  16.5   0.0   37.6   yes  2979
    256   + offload   8x8x4       2.5    0.2   2.5   1.9   8.5  20.5   4.8   36.1   yes  3173
    1024  baseline    8x32x4/4   11.0   22.0  22.0   0.0  69.1   1.6   0.0  125.8   yes  3306
    1024  remat moe   8x32x4/4   11.0   22.0  22.0   0.0  62.8   2.0   0.0  119.9   yes  3393
    1024  remat full  32x16x2    28.1   56.1  28.1   0.0   4.3  16.5   0.0  133.0   yes  2439
    1024  + zero 1    32x16x2    28.1    1.8  28.1   0.0   4.3  16.5   0.0   78.7   yes  3118
    1024  + zero 2    32x8x4     20.1    1.3   0.6   0.0   8.5  20.5   0.0   51.0   yes  3047
    1024  + zero 3    32x8x4      0.6    1.3   0.6   1.9   8.5  20.5   0.0   33.4   yes  3047
    1024  + offload   32x8x4      0.6    0.1   0.6   1.9   8.5  20.5   1.2   32.2   yes  3094
                    491.9 B parameters (switch-xxl, d_ff 12800): GB of a device
    N     rung        mesh       param  optim  grad  gath   act  buff  host    all  fits      ms
    64    baseline    1x8x8/256   34.6   69.2  69.2   0.0  18.8   0.0   0.0  191.9    no   40733
    64    remat moe   1x8x8/256   34.6   69.2  69.2   0.0  18.6   0.0   0.0  191.8    no   40742
    64    remat full  1x8x8/256   34.6   69.2  69.2   0.0   0.1   0.1   0.0  173.3    no   40284
    64    + zero 1    2x4x8       64.8   64.8  64.8   0.0  17.1  29.4   0.0  240.9    no    4872
    64    + zero 2    2x4x8       64.8   64.8  32.4  17.2  17.1  30.5   0.0  226.9    no    6684
    64    + zero 3    4x2x8/256   31.3   62.6  62.6  10.5   0.1   0.1   0.0  167.2    no  945297
    64    + offload   1x16x4      39.0    3.2  39.0   0.0   8.5  21.3  74.7  111.1   yes    5740
    256   baseline    1x64x4/8    16.3   32.7  32.7   0.0  42.0   0.8   0.0  124.5   yes    3981
    256   remat moe   1x64x4/8    16.3   32.7  32.7   0.0  37.6   1.1   0.0  120.3   yes    4102
    256   remat full  1x128x2     25.1   50.2  25.1   0.0   4.3  17.5   0.0  122.0   yes    3004
    256   + zero 1    2x64x2      32.6   32.6  32.6   0.0   4.3  17.3   0.0  119.4   yes    3178
    256   + zero 2    2x64x2      32.6   32.6  16.3  11.1   4.3  17.3   0.0  114.2   yes    3139
    256   + zero 3    2x64x2      16.3   32.6  16.3   3.1   4.3  17.3   0.0   89.9   yes    3139
    256   + offload   2x32x4      11.9    1.0  11.9   2.2   8.5  21.3  22.9   56.9   yes    4140
    1024  baseline    2x128x4/4   12.6   25.1  25.1   0.0  74.0   1.6   0.0  138.4   yes    3675
    1024  remat moe   2x128x4/4   12.6   25.1  25.1   0.0  65.2   2.1   0.0  130.1   yes    3796
    1024  remat full  4x128x2     25.1   50.2  25.1   0.0   4.3  17.5   0.0  122.0   yes    3147
    1024  + zero 1    4x128x2     25.1   12.5  25.1   0.0   4.3  17.5   0.0   84.4   yes    3617
    1024  + zero 2    8x32x4      23.9    6.0   3.0   0.0   8.5  21.3   0.0   62.7   yes    3541
    1024  + zero 3    8x32x4       3.0    6.0   3.0   2.2   8.5  21.3   0.0   44.0   yes    3542
    1024  + offload   8x32x4       3.0    0.2   3.0   2.2   8.5  21.3   5.7   38.2   yes    3766
                            1,571.3 B parameters (switch-c): GB of a device
    N     rung        mesh        param  optim   grad   gath    act  buff   host    all  fits     ms
    64    baseline    1x64x1      102.0  204.0  102.0    0.0  110.1  12.3    0.0  530.4    no   5204
    64    remat moe   1x64x1      102.0  204.0  102.0    0.0  101.0   4.4    0.0  513.4    no   1431
    64    remat full  1x32x2      100.3  200.7  100.3    0.0    2.7   7.5    0.0  411.4    no   1966
    64    + zero 1    2x4x8       197.2  197.2  197.2   72.7   10.7  15.2    0.0  690.3    no  13529
    64    + zero 2    2x4x8       197.2  197.2   98.6  171.3   10.7  15.2    0.0  690.3    no  12293
    64    + zero 3    2x16x2       99.2  198.5   99.2   13.3    2.7   7.5    0.0  420.4    no   5537
    64    + offload   1x32x2      100.3    6.7  100.3    0.0    2.7   7.5  194.0  217.5    no   9543
    256   baseline    1x32x8/256   25.5   50.9   50.9    0.0   13.3   0.0    0.0  140.6    no  19861
    256   remat moe   1x32x8/256   25.5   50.9   50.9    0.0   13.2   0.0    0.0  140.5    no  19867
    256   remat full  1x256x1      28.4   56.8   28.4    0.0    1.3   6.5    0.0  121.3   yes   2020
    256   + zero 1    2x16x8       50.0   50.0   50.0    1.0   10.7  13.3    0.0  175.0    no   3641
    256   + zero 2    2x16x8       50.0   50.0   25.0   24.1   10.7  15.2    0.0  175.0    no  11376
    256   + zero 3    2x128x1      26.5   52.9   26.5    3.7    1.3   6.5    0.0  117.3   yes   2979
    256   + offload   1x128x2      26.7    1.8   26.7    0.0    2.7  42.2   51.7  100.1   yes   4075
    1024  baseline    1x1024x1/4   10.0   20.0   20.0    0.0   19.5  35.8    0.0  105.2   yes    658
    1024  remat moe   1x1024x1/4   10.0   20.0   20.0    0.0   15.8  36.0    0.0  101.7   yes    710
    1024  remat full  1x1024x1/2   10.0   20.0   20.0    0.0    0.7  73.0    0.0  123.5   yes    799
    1024  + zero 1    2x512x1      16.1   16.1   16.1    0.0    1.3  76.1    0.0  125.8   yes   1529
    1024  + zero 2    2x512x1      16.1   16.1    8.1    0.0    1.3  76.1    0.0  117.8   yes   1475
    1024  + zero 3    2x512x1       8.1   16.1    8.1    1.2    1.3  76.1    0.0  110.9   yes   1481
    1024  + offload   1x512x2/2     8.3    0.5   16.6    0.0    1.3  73.5   16.1  100.3   yes   1480
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
    for column in ("N", "rung", "mesh"):
        out.add_column(column)
    for column in ("param", "optim", "grad", "gath", "act", "buff", "host", "all", "fits", "ms"):
        out.add_column(column, justify="right")
    for (model, devices, rung), row in rows.items():
        if model != billions:
            continue
        shape, micros = row.candidate.shape, row.candidate.config.optim.accumulation
        mesh = "x".join(map(str, shape.sizes)) + f"/{micros}" * (micros > 1)
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
