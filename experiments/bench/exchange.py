"""What each way to the experts sends, and what computes meanwhile, compiled for 16 absent H200.

Claim: `all_to_all` sends the tokens that must move and the empty slots of its capacity, and no
more; 8 bits on the wire halve that; with four chunks experts work beside most of the bytes.
Command: python experiments/bench/exchange.py
Expect: the README's table, in 5 minutes on 2 CPU cores (needs `pip install 'switchjax[plan]'`; no
GPU).

Bytes of one device over the expert axis, for one Switch layer and step, forward and backward:
`tokens` is what must move with balanced experts and no empty slots, `formula` what the dispatcher
sends by `plan.exchange`, `compiled` what the program says; beside them the bytes of the sums over
the model axis, and the share of the exchange that has an expert's product in flight. A ragged
exchange is counted with its whole operand, the most that it can send.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin compiles; it must not look for GPUs

from dataclasses import replace

from rich.console import Console
from rich.progress import track
from rich.table import Table

from switchjax.config import DataConfig, ModelConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.plan.absent import compile_train_step
from switchjax.plan.collectives import collectives
from switchjax.plan.exchange import exchange_bytes, least_bytes
from switchjax.plan.hardware import read_hardware
from switchjax.plan.hlo import in_scope
from switchjax.plan.schedule import overlapped_share, overlaps

CONFIG = RunConfig(
    model=ModelConfig(
        architecture="decoder_only",
        vocab_size=2048,
        d_model=1024,
        d_ff=4096,
        num_heads=16,
        d_kv=64,
        num_layers=2,
        moe_every=2,
        num_experts=16,
        dtype="bfloat16",
    ),
    data=DataConfig(batch_size=256, sequence_length=512),
)
MESHES = ["data=2,expert=8", "data=2,expert=4,model=2", "data=2,expert=4,model=2,experts=folded"]
WAYS = ["", ",wire=float8", ",dispatcher=all_gather", ",dispatcher=all_gather,buffer=1.5"]
WAYS += [",dispatcher=ragged", ",chunks=2", ",chunks=4"]


def row(mesh: str) -> list[str]:
    """Of the table: millions of bytes, and the share of exchanged bytes that experts hide."""
    shape = read_mesh(mesh)
    text = compile_train_step(CONFIG, shape, Layout.of(shape), read_hardware("h200")).as_text()
    sent = [c for c in collectives(text, shape) if not in_scope(c.op_name, "fallback")]

    def megabytes(axis: str, kinds: set[str]) -> float:
        return sum(c.wire_bytes for c in sent if c.axes == (axis,) and c.kind in kinds) / 1e6

    exchanges = {"all-to-all", "ragged-all-to-all", "all-gather", "reduce-scatter"}
    hidden = [
        overlap
        for overlap in overlaps(text, shape, exchanges)
        if overlap.collective.axes == ("expert",)
        and not in_scope(overlap.collective.op_name, "fallback")
    ]
    length = CONFIG.data.sequence_length
    tokens = CONFIG.data.batch_size * length // (shape.data * shape.expert)
    wide = replace(shape, exchange=replace(shape.exchange, wire="compute"))
    return [
        mesh.replace("dispatcher=", ""),
        f"{least_bytes(CONFIG.model, wide, tokens=tokens) / 1e6:.0f}",
        f"{exchange_bytes(CONFIG.model, shape, tokens=tokens, group_size=length) / 1e6:.0f}",
        f"{megabytes('expert', exchanges):.0f}",
        f"{megabytes('model', {'all-reduce'}):.0f}",
        f"{overlapped_share(hidden):.0%}",
    ]


if __name__ == "__main__":
    table = Table("mesh", "tokens", "formula", "compiled", "over model", "hidden", title="MB")
    for mesh in track([mesh + way for mesh in MESHES for way in WAYS]):
        table.add_row(*row(mesh))
    Console(width=120).print(table)
