"""Run in a process of its own: compiles for 16 absent H200, prints what the programs send as JSON.

A train step as it is, and a layer of experts that exchanges in four chunks.
"""

import json
import time
from dataclasses import asdict

import jax
import jax.numpy as jnp
from jax import Array, P, lax

from switchjax.config import DataConfig, ModelConfig, OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.plan.absent import absent_mesh, compile_train_step
from switchjax.plan.hardware import H200
from switchjax.plan.schedule import overlapped_share, overlaps

SHAPE = MeshShape(name="hosts2", data=2, expert=8, model=1)
CONFIG = RunConfig(
    model=ModelConfig(
        vocab_size=128,
        d_model=32,
        d_ff=64,
        num_heads=2,
        d_kv=16,
        num_layers=4,
        moe_every=2,
        num_experts=16,
        capacity_factor=1.25,
        dtype="bfloat16",
        remat=False,
        architecture="decoder_only",
    ),
    data=DataConfig(batch_size=32, sequence_length=64),
    optim=OptimConfig(),
)
CHUNKS = 4


def chunked_layer(x_ERD: Array, w_in_EDF: Array, w_out_EFD: Array) -> Array:
    """Each expert's tokens go to it and come back in chunks."""

    def on_device(x_ErD: Array, w_in_eDF: Array, w_out_eFD: Array) -> Array:
        outputs = []
        for chunk in jnp.split(x_ErD, CHUNKS, axis=1):
            with jax.named_scope("dispatch"):
                x_erD = lax.all_to_all(chunk, "expert", 0, 1, tiled=True)
            with jax.named_scope("experts"):
                h_erF = jax.nn.relu(jnp.einsum("erd,edf->erf", x_erD, w_in_eDF))
                y_erD = jnp.einsum("erf,efd->erd", h_erF, w_out_eFD)
            with jax.named_scope("combine"):
                outputs.append(lax.all_to_all(y_erD, "expert", 1, 0, tiled=True))
        return jnp.concatenate(outputs, axis=1)

    tokens = P(None, ("data", "expert"))
    in_specs = tokens, P("expert"), P("expert")
    return jax.shard_map(on_device, in_specs=in_specs, out_specs=tokens)(x_ERD, w_in_EDF, w_out_EFD)


def compile_chunked_layer() -> jax.stages.Compiled:
    """16 devices with 4096 rows of width 1024 for each of 8 experts."""
    mesh = absent_mesh(H200, SHAPE)

    def array(spec: P, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        return (
            jax.jit(chunked_layer)
            .lower(
                array(P(None, ("data", "expert")), 8, 16 * 4096, 1024),
                array(P("expert"), 8, 1024, 4096),
                array(P("expert"), 8, 4096, 1024),
            )
            .compile()
        )


def report(compiled: jax.stages.Compiled) -> dict:
    """The exchanges of a program, with what they overlap."""
    found = overlaps(compiled.as_text(), SHAPE)
    return {
        "exchanges": [
            asdict(o.collective)
            | {"phase": o.collective.phase, "wire_bytes": o.collective.wire_bytes}
            | {"expert_flops": o.expert_flops}
            for o in found
        ],
        "share": overlapped_share(found),
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
    }


if __name__ == "__main__":
    start = time.perf_counter()
    step = compile_train_step(CONFIG, SHAPE, Layout(), H200)
    seconds = time.perf_counter() - start
    reports = {"step": report(step), "chunked": report(compile_chunked_layer())}
    print(json.dumps(reports | {"seconds": seconds}))
