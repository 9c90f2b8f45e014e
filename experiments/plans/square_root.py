"""Is TP = EP = sqrt(N) a law? The rule's layout against the best one, by devices and model.

Claim: it does not hold at any N. The rule's layout often does not exist (12 heads do not divide by
8), and where it does a step takes 1.2 to 2.1 times as long as with the best, or fits no device. The
planner splits experts over all devices that it can and tensors only where memory asks for it.
Command: python experiments/plans/square_root.py
Printed (2026-11-30, Python 3.11, jax 0.10.2):

           H200, by formula; 16 K tokens a device; data x expert x model; ms a step
     N    model            best                ms    TP x EP  its rank         ms    fits
     8    switch-base-32   1 x 8 x 1           31    2 x 2    8 of 32          41    yes
     8    switch-base-256  1 x 8 x 1           34    2 x 2    13 of 32         70    yes
     8    switch-large     1 x 8 x 1           105   2 x 2    9 of 34          163   yes
     8    switch-xxl       none fits           -     2 x 2    17 of 34         2695  no
     16   switch-base-32   1 x 16 x 1          42    4 x 4    24 of 47         70    yes
     16   switch-base-256  1 x 16 x 1          47    4 x 4    5 of 47          77    yes
     16   switch-large     1 x 16 x 1          136   4 x 4    5 of 55          212   yes
     16   switch-xxl       none fits           -     4 x 4    1 of 55          2386  no
     64   switch-base-32   4 x 16 x 1          51    8 x 8    does not divide
     64   switch-base-256  1 x 64 x 1          59    8 x 8    does not divide
     64   switch-large     1 x 64 x 1          163   8 x 8    18 of 97         338   yes
     64   switch-xxl       1 x 16 x 4 folded   2232  8 x 8    3 of 97          2605  yes
     256  switch-base-32   256 x 1 x 1 local   52    16 x 16  does not divide
     256  switch-base-256  1 x 256 x 1 ragged  53    16 x 16  does not divide
     256  switch-large     2 x 128 x 1 ragged  172   16 x 16  does not divide
     256  switch-xxl       1 x 128 x 2         2023  16 x 16  does not divide
"""

import math
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import Row, layouts_by_formula
from switchjax.presets import PRESETS

H200 = read_hardware("h200")
PRESET_NAMES = ("switch-base-32", "switch-base-256", "switch-large", "switch-xxl")


def sizes(row: Row) -> str:
    """data x expert x model, and what else differs from the defaults."""
    shape, exchange = row.candidate.shape, row.candidate.shape.exchange
    words = [f"{shape.data} x {shape.expert} x {shape.model}"]
    words += [exchange.dispatcher] * (exchange.dispatcher != "all_to_all")
    words += [exchange.experts] * (exchange.experts != "separate")
    return " ".join(words)


if __name__ == "__main__":
    columns = ("N", "model", "best", "ms", "TP x EP", "its rank", "ms", "fits")
    title = "H200, by formula; 16 K tokens a device; data x expert x model; ms a step"
    table = Table(*columns, title=title, box=None)
    for devices in (8, 16, 64, 256):
        root = 2 ** int(math.log2(math.sqrt(devices)))
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
            words = [f"{devices}", name, sizes(best), f"{best.cost.step * 1e3:.0f}"]
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
    Console(width=98).print(table)
