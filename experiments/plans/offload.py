"""Host memory: what `offload` leaves on a device, by the compiler, for 64 absent TPU v5p.

Claim: with `offload = optimizer` less than 2 % of the optimizer's bytes are arguments on a device,
and while a step runs no more of it than a period of a stack comes there; with
`optimizer+activations` what periods receive is on the host too. XLA for TPUs tells bytes of
the host apart; for absent GPUs it knows one kind of memory alone.

Command: pip install 'jax[tpu]' && JAX_PLATFORMS=cpu python experiments/plans/offload.py
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
MODELS = {
    "7 B": PRESETS["switch-base-128"].model,
    "97 B": replace(PRESETS["switch-large"].model, d_model=2048, d_ff=5120, num_heads=32),
}


def bytes_of(tree: Any) -> int:
    """On one device."""
    parts = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * size for shape, size in parts)


def row(model: ModelConfig, offload: str, devices: Sequence[Any]) -> str:
    """Of the table."""
    config = RunConfig(
        model=replace(model, dtype="bfloat16"),
        data=DataConfig(batch_size=256, sequence_length=512),
        optim=OptimConfig(optimizer="adamw"),
    )
    shape = read_mesh(f"{MESH},offload={offload}")
    check_sizes(config, shape)
    layout = Layout.of(shape)
    with jax.set_mesh(jax.make_mesh(shape.sizes, AXES, devices=devices)):
        state, batch = abstract_state(config, layout), abstract_batch(config, layout)
        step = jax.jit(partial(train_step, config, layout), donate_argnums=0).lower(state, batch)
        try:
            memory = step.compile().memory_analysis()
        except jax.errors.JaxRuntimeError as error:  # with sizes, where memory is too small
            return f"{offload:22} {str(error).splitlines()[0]}"
    assert memory is not None
    optimizer = bytes_of(state.opt_state)
    left = memory.argument_size_in_bytes - bytes_of((state, batch)) + optimizer
    sizes = (left, memory.host_argument_size_in_bytes, memory.temp_size_in_bytes)
    cells = "".join(f"{size / 1e9:>10.2f}" for size in sizes)
    return f"{offload:22}{cells}{left / optimizer:>10.1%}"


if __name__ == "__main__":
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:4x4x4")
    print("GB of a device                on it   on host temporary      left")
    for name, model in MODELS.items():
        for offload in ("none", "optimizer", "optimizer+activations"):
            print(f"{name:6}{row(model, offload, topology.devices)}", flush=True)
