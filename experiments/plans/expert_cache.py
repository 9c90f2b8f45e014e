"""Busy experts that stay gathered through a step: bytes of the wire against bytes of memory.

Switch-Base-128 in bfloat16 on 64 absent H200 (data 16, expert 4, zero 3), four micro-batches: a
device gathers its 32 experts of each of 12 layers eight times a step, and those kept once.

Claim: what is kept saves seven times its size, less a sixteenth, in what a device sends to gather;
the compiler's bytes are those of the formula.
Command: JAX_PLATFORMS=cpu python experiments/plans/expert_cache.py
Printed (2026-11-30, Python 3.11, jax 0.10.2; the compiler's, if all cold experts are in use):

                                  GB of a device
    hot experts  kept  gathers of experts  saved  all, compiled  in use
    0            0.00  27.18               0.00   29.52          3.54
    32           0.91  21.23               5.95   23.58          3.99
    64           1.81  15.29               11.89  17.63          4.74
    96           2.72  9.34                17.84  11.69          5.49

Memory in use grows by less than what is kept.
"""

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from switchjax.expert_cache import gathered_bytes, kept_bytes, saved_bytes
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.plan.absent import compile_train_step
from switchjax.plan.collectives import bytes_by_kind_and_axes, collectives
from switchjax.plan.hardware import read_hardware
from switchjax.presets import PRESETS

_BASE = PRESETS["switch-base-128"]
CONFIG = replace(
    _BASE,
    model=replace(_BASE.model, dtype="bfloat16"),
    data=replace(_BASE.data, batch_size=1024),
    optim=replace(_BASE.optim, accumulation=4),
)
H200 = read_hardware("h200")
MESH = "data=16,expert=4,zero=3"

if __name__ == "__main__":
    columns = (
        "hot experts",
        "kept",
        "gathers of experts",
        "saved",
        "all gathers, compiled",
        "device",
    )
    table = Table(*columns, title="GB of a device", box=None)
    for num_hot in (0, 32, 64, 96):
        shape = read_mesh(f"{MESH},hot_experts={num_hot}")
        compiled = compile_train_step(CONFIG, shape, Layout.of(shape), H200)
        memory = compiled.memory_analysis()
        sent = bytes_by_kind_and_axes(collectives(compiled.as_text(), shape))
        numbers = (
            kept_bytes(CONFIG.model, shape),
            gathered_bytes(CONFIG, shape),
            saved_bytes(CONFIG, shape),
            sent["all-gather", ("data",)],
            memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        )
        table.add_row(f"{num_hot}", *(f"{number / 1e9:.2f}" for number in numbers))
    Console(width=98).print(table)
