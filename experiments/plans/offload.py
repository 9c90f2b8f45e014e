"""Host memory: what `offload` leaves on a device, by the compiler, for 64 absent TPU v5p.

Claim: `offload = optimizer` leaves less than 2 % of the optimizer's bytes on a device between
steps; while a step updates, a period of each stack comes there, in and out, so 97 B parameters
with AdamW fit that do not otherwise. `optimizer+activations` moves all that periods receive, too
(24 times 0.134 GB in the last line). XLA for TPUs tells the memory of the host apart; for absent
GPUs it knows one kind alone.
Command: pip install 'jax[tpu]' && JAX_PLATFORMS=cpu python experiments/plans/offload.py
Printed (2026-11-30, Python 3.11, jax 0.10.2, libtpu 0.0.42; two to four minutes a line). Left is
the share of the optimizer's bytes that are on the device between steps, temporary what a step needs
there beside parameters and optimizer:

GB of a device               optimizer   on host temporary      left
7 B   none                        4.96      0.00      4.49    100.0%
7 B   optimizer                   0.00      4.96      5.63      0.0%
97 B  none                  does not fit
97 B  optimizer                   0.00     64.60     49.54      0.0%
rows  none                        1.62      0.00     17.76    100.0%
rows  optimizer+activations       0.00      4.84     13.46      0.0%
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.experimental import topologies

from switchjax.axes import AXES
from switchjax.config import DataConfig, ModelConfig, OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.plan.absent import abstract_batch
from switchjax.presets import PRESETS
from switchjax.setup import check_sizes
from switchjax.state import abstract_state
from switchjax.step import train_step

MESH = "data=4,expert=16"
LARGE = replace(PRESETS["switch-large"].model, d_model=2048, num_heads=32)
WIDE = replace(
    LARGE, architecture="decoder_only", d_ff=1024, num_experts=16, moe_every=1, dropout=0.0
)
BOTH = "optimizer+activations"
# Model, rows of a batch, optimizer, and what is on the host.
CASES = {
    "7 B": (PRESETS["switch-base-128"].model, 256, "adamw", ("none", "optimizer")),
    "97 B": (replace(LARGE, d_ff=5120), 256, "adamw", ("none", "optimizer")),
    "rows": (WIDE, 4096, "adafactor", ("none", BOTH)),
}


def bytes_of(tree: Any) -> int:
    """On one device."""
    parts = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * size for shape, size in parts)


def row(model: ModelConfig, rows: int, optimizer: Any, offload: str, devices: Sequence[Any]) -> str:
    """Of the table."""
    config = RunConfig(
        model=replace(model, dtype="bfloat16"),
        data=DataConfig(batch_size=rows, sequence_length=512),
        optim=OptimConfig(optimizer=optimizer),
    )
    shape = read_mesh(f"{MESH},offload={offload}")
    check_sizes(config, shape)
    layout = Layout.of(shape)
    with jax.set_mesh(jax.make_mesh(shape.sizes, AXES, devices=devices)):
        state, batch = abstract_state(config, layout), abstract_batch(config, layout)
        step = jax.jit(partial(train_step, config, layout), donate_argnums=0).lower(state, batch)
        try:
            memory = step.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            if "Ran out of memory on HBM" not in str(error):
                raise
            return f"{offload:22}does not fit"
    assert memory is not None
    whole = bytes_of(state.opt_state)
    left = memory.argument_size_in_bytes - bytes_of((state, batch)) + whole
    on_host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    sizes = (left, on_host, memory.temp_size_in_bytes)
    cells = "".join(f"{size / 1e9:>10.2f}" for size in sizes)
    return f"{offload:22}{cells}{left / whole:>10.1%}"


if __name__ == "__main__":
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:4x4x4")
    print("GB of a device               optimizer   on host temporary      left")
    for name, (model, rows, optimizer, offloads) in CASES.items():
        for offload in offloads:
            cells = row(model, rows, optimizer, offload, topology.devices)
            print(f"{name:6}{cells}", flush=True)
