"""Experts 1.5 times as wide (6144 for 4096, at width 1024) under all-gather: what they cost.

Claim: the tokens that are sent stay the same, so half as much width again costs 28 % of a step with
all-to-all in a node, and 12 % with all-gather across nodes, where sending is most of it. (The rest
of what is sent is the gradients of the experts, where `data` is more than 1.)
Command: python experiments/plans/wide_experts.py
Printed (2026-11-30, Python 3.11, jax 0.10.2):

                                    16 H200, by formula
     mesh                     way         hidden  step ms  compute ms  sending ms  GB
     data=2,expert=8          all_to_all  4096    218      178         40          29.1
     data=2,expert=8          all_to_all  6144    278      228         50          33.4
     data=2,expert=8          all_gather  4096    297      178         120         30.1
     data=2,expert=8          all_gather  6144    358      228         130         34.5
     expert=16                all_to_all  4096    259      178         81          25.8
     expert=16                all_to_all  6144    310      228         82          28.6
     expert=16                all_gather  4096    411      178         233         28.0
     expert=16                all_gather  6144    462      228         234         30.8
     data=2,expert=4,model=2  all_to_all  4096    280      178         102         28.8
     data=2,expert=4,model=2  all_to_all  6144    340      228         112         32.8
     data=2,expert=4,model=2  all_gather  4096    336      178         158         29.9
     data=2,expert=4,model=2  all_gather  6144    396      228         168         33.9
"""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from switchjax.config import DataConfig, ModelConfig, RunConfig
from switchjax.mesh import read_mesh
from switchjax.plan.candidates import Candidate
from switchjax.plan.hardware import read_hardware
from switchjax.plan.ranking import estimate

MODEL = ModelConfig(
    architecture="decoder_only",
    vocab_size=32128,
    d_model=1024,
    d_ff=4096,
    num_heads=16,
    d_kv=64,
    num_layers=24,
    num_experts=32,
    dtype="bfloat16",
    remat="full",
)
H200 = read_hardware("h200")
WAYS = ("all_to_all", "all_gather")
MESHES = ("data=2,expert=8", "expert=16", "data=2,expert=4,model=2")

if __name__ == "__main__":
    columns = ("mesh", "way", "hidden", "step ms", "compute ms", "sending ms", "GB")
    table = Table(*columns, title="16 H200, by formula", box=None)
    for mesh in MESHES:
        for way in WAYS:
            for hidden in (4096, 6144):
                config = RunConfig(
                    model=replace(MODEL, d_ff=hidden),
                    data=DataConfig(batch_size=512, sequence_length=1024),
                )
                shape = read_mesh(f"{mesh},dispatcher={way}")
                row = estimate(Candidate(config=config, shape=shape), H200)
                numbers = (row.cost.step, row.cost.compute, row.cost.exposed)
                cells = [f"{seconds * 1e3:.0f}" for seconds in numbers]
                table.add_row(mesh, way, f"{hidden}", *cells, f"{row.device_bytes / 1e9:.1f}")
    Console(width=98).print(table)
