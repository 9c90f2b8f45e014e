"""Is TP = EP = sqrt(N) a law? The rule's layout against the best one, by devices and model.

Claim: it is one point. The rule's layout is never the first of those that the planner ranks for
H200, and costs more the more devices there are: `model` is worth its sums only where a device would
otherwise be full.
Command: python experiments/plans/square_root.py
"""

import math
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import layouts_by_formula
from switchjax.presets import PRESETS

H200 = read_hardware("h200")
PRESET_NAMES = ("switch-base-32", "switch-base-256", "switch-large", "switch-xxl")

if __name__ == "__main__":
    columns = ("devices", "model", "best", "step ms", "sqrt(N)", "rank", "step ms", "fits")
    table = Table(*columns, title="H200, by formula; 16 K tokens a device")
    for devices in (8, 16, 64, 256):
        root = 2 ** round(math.log2(math.sqrt(devices)))
        for name in PRESET_NAMES:
            preset = PRESETS[name]
            config = replace(
                preset,
                model=replace(preset.model, dtype="bfloat16"),
                data=replace(preset.data, batch_size=32 * devices),
            )
            rows = layouts_by_formula(config, devices, H200)
            best = rows[0]
            rule = [
                (rank, row)
                for rank, row in enumerate(rows, 1)
                if row.candidate.shape.model == row.candidate.shape.expert == root
            ]
            words = [f"{devices}", name, best.candidate.name, f"{best.cost.step * 1e3:.0f}"]
            if not best.fits:
                words[2:] = ["none fits", "-"]
            if not rule:
                table.add_row(*words, f"{root} x {root}", "does not divide", "", "")
                continue
            rank, row = rule[0]
            table.add_row(
                *words,
                f"{root} x {root}",
                f"{rank} of {len(rows)}",
                f"{row.cost.step * 1e3:.0f}",
                "yes" if row.fits else "no",
            )
    Console(width=140).print(table)
