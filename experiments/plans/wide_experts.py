"""Experts 1.5 times as wide (6144 for 4096, at width 1024) under all-gather: what they cost.

Claim: what is sent stays the same, so wider experts are cheapest where sending is most of the step.
Command: python experiments/plans/wide_experts.py
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
    remat=True,
)
H200 = read_hardware("h200")
WAYS = ("all_to_all", "all_gather")
MESHES = ("data=2,expert=8", "expert=16", "data=2,expert=4,model=2")

if __name__ == "__main__":
    columns = ("mesh", "way", "hidden", "step ms", "compute ms", "sending ms", "GB")
    table = Table(*columns, title="16 H200, by formula")
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
    Console(width=110).print(table)
