"""Does length / experts against 512 tell whether to split tensors or experts first?

Claim: not what it says. Among layouts of 16 H200 that fit, the planner splits experts first almost
everywhere, or nothing where there are few; tensors come first only where the attention scores of
long rows must be shared out, however many experts there are.
Command: python experiments/plans/length_per_expert.py
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
    table = Table("length", *map(str, EXPERTS), title="split first: the planner / the rule")
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
            cells.append(f"{planned} ({shape.data},{shape.expert},{shape.model}) / {rule}")
        table.add_row(f"{length}", *cells)
    console = Console(width=200)
    console.print(table)
    console.print(f"the rule agrees in {agree} of {asked} cells ({agree / asked:.0%})")
