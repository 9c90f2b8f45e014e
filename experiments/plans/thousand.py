"""Switch-C (1.57 T parameters) and Switch-XXL on 1,024 H200: the documents' layout and the best.

Claim: the train step of either compiles on a laptop for 1,024 GPUs in a minute. The documents'
layout (data 32 x expert 8 x model 4) takes 403 GB a device for Switch-C and does not fit; one that
splits experts over all devices takes 47 GB, and 4 to 50 times less time by the planner's clock.
Command: python experiments/plans/thousand.py
Printed (2026-11-30, Python 3.11, jax 0.10.2):

                                               1,024 H200
    model       layout                                GB     fits  state GB  step ms  MFU  compile s
    switch-c    data=32,expert=8,model=4 all_to_all   402.6  no    198.6     5680     0%   38
                remat full
    switch-c    data=1,expert=1024,model=1 ragged     47.1   yes   13.1      101      13%  51
                remat dots
    switch-xxl  data=32,expert=8,model=4 all_to_all   122.0  yes   61.2      1711     5%   72
                remat full
    switch-xxl  data=4,expert=128,model=2 all_to_all  64.0   yes   31.7      416      20%  67
                remat dots
"""

from dataclasses import replace

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from switchjax.mesh import read_mesh
from switchjax.plan.candidates import Candidate
from switchjax.plan.compiling import Program, compile_all
from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import estimate, layouts_by_formula, with_program
from switchjax.presets import PRESETS

H200 = read_hardware("h200")
DOCUMENTS = "data=32,expert=8,model=4"

if __name__ == "__main__":
    asked = []
    for name in ("switch-c", "switch-xxl"):
        preset = PRESETS[name]
        config = replace(
            preset,
            model=replace(preset.model, dtype="bfloat16", remat="full"),
            data=replace(preset.data, batch_size=4096),
        )
        asked.append((name, Candidate(config=config, shape=read_mesh(DOCUMENTS))))
        asked.append((name, layouts_by_formula(config, 1024, H200)[0].candidate))
    with Progress(transient=True) as progress:
        task = progress.add_task("compiling", total=len(asked))
        candidates = [candidate for _, candidate in asked]
        answers = compile_all(candidates, H200, on_done=lambda: progress.advance(task))
    columns = ("model", "layout", "GB", "fits", "state GB", "step ms", "MFU", "compile s")
    table = Table(*columns, title="1,024 H200", box=None)
    for (name, candidate), answer in zip(asked, answers, strict=True):
        if not isinstance(answer, Program):
            table.add_row(name, candidate.name, answer.message)
            continue
        row = with_program(estimate(candidate, H200), answer, H200)
        table.add_row(
            name,
            candidate.name,
            f"{row.device_bytes / 1e9:.1f}",
            "yes" if row.fits else "no",
            f"{answer.argument_bytes / 1e9:.1f}",
            f"{row.cost.step * 1e3:.0f}",
            f"{row.utilisation:.0%}",
            f"{answer.seconds:.0f}",
        )
    Console(width=98).print(table)
