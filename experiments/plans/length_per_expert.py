"""Does length / experts against 512 tell whether to split tensors or experts first?

Claim: two times in three, and for another reason. Among layouts of 16 H200 that fit, the planner
splits experts first almost everywhere, or nothing (n) where there are few; tensors (t) come first
only where the attention scores of long rows must be shared out, however many experts there are.
Rows of 64 K tokens fit with `remat dots`, which keeps the scores of one layer at a time.
Command: python experiments/plans/length_per_expert.py
Printed (2026-11-30, Python 3.11, jax 0.10.2):

                   data expert model, and split first: planner / rule
     length  8           16          32          64          128         256
     512     16 1 1 n/e  16 1 1 n/e  2 8 1 e/e   2 8 1 e/e   1 16 1 e/e  1 16 1 e/e
     2048    16 1 1 n/e  16 1 1 n/e  16 1 1 n/e  2 8 1 e/e   1 16 1 e/e  1 16 1 e/e
     8192    16 1 1 n/t  16 1 1 n/e  1 16 1 e/e  1 16 1 e/e  1 16 1 e/e  1 16 1 e/e
     16384   8 1 2 t/t   16 1 1 n/t  2 8 1 e/e   1 16 1 e/e  1 16 1 e/e  1 16 1 e/e
     32768   8 1 2 t/t   8 1 2 t/t   2 4 2 e/t   1 8 2 e/e   1 8 2 e/e   1 4 4 e/e
     65536   2 1 8 t/t   2 1 8 t/t   2 1 8 t/t   1 2 8 t/t   1 2 8 t/e   1 2 8 t/e
    the rule agrees in 25 of 36 cells (69%)
"""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from switchjax.config import DataConfig, ModelConfig, RunConfig
from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import Row, layouts_by_formula

MODEL = ModelConfig(
    architecture="decoder_only",
    vocab_size=32128,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    d_kv=64,
    num_layers=24,
    dtype="bfloat16",
)
TOKENS = 2**20
H200 = read_hardware("h200")
LENGTHS, EXPERTS = (512, 2048, 8192, 16384, 32768, 65536), (8, 16, 32, 64, 128, 256)


def first_split(row: Row) -> str:
    """What the layout splits more ways."""
    if not row.fits:
        return "-"
    shape = row.candidate.shape
    if shape.model == shape.expert == 1:
        return "neither"
    return "tensors" if shape.model > shape.expert else "experts"


if __name__ == "__main__":
    table = Table(
        "length",
        *map(str, EXPERTS),
        title="data expert model, and split first: planner / rule",
        box=None,
    )
    agree = asked = 0
    for length in LENGTHS:
        cells = []
        for experts in EXPERTS:
            config = RunConfig(
                model=replace(MODEL, num_experts=experts),
                data=DataConfig(batch_size=TOKENS // length, sequence_length=length),
            )
            best = layouts_by_formula(config, 16, H200)[0]
            planned, rule = first_split(best), "tensors" if length / experts > 512 else "experts"
            if planned != "-":
                agree, asked = agree + (planned == rule), asked + 1
            shape = best.candidate.shape
            cells.append(f"{shape.data} {shape.expert} {shape.model} {planned[0]}/{rule[0]}")
        table.add_row(f"{length}", *cells)
    console = Console(width=98)
    console.print(table)
    console.print(f"the rule agrees in {agree} of {asked} cells ({agree / asked:.0%})")
