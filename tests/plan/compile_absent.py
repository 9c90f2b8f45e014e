"""Run in a process of its own: compiles train steps for 16 absent H200, prints what they send.

python compile_absent.py small | large
"""

import json
import sys
import time
from dataclasses import asdict, replace

import jax

from switchjax.config import DataConfig, ModelConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.plan.absent import absent_mesh, compile_train_step
from switchjax.plan.collectives import collectives
from switchjax.plan.hardware import read_hardware
from switchjax.plan.hlo import in_scope
from switchjax.plan.schedule import overlapped_share, overlaps, program_flops

SMALL = RunConfig(
    model=ModelConfig(
        architecture="decoder_only",
        vocab_size=128,
        d_model=64,
        d_ff=64,
        num_heads=2,
        d_kv=16,
        num_layers=4,
        moe_every=2,
        num_experts=16,
        capacity_factor=1.0,
        dtype="bfloat16",
    ),
    data=DataConfig(batch_size=32, sequence_length=64),
)
# Long enough exchanges and products: those of few tokens XLA puts together again.
LARGE = RunConfig(
    model=replace(SMALL.model, d_model=1024, d_ff=4096, num_heads=16, d_kv=64, num_layers=2),
    data=DataConfig(batch_size=512, sequence_length=512),
)
MESHES = {
    "small": [
        "data2_expert8",
        "data2_expert8,wire=float8",
        "data=2,expert=4,model=2,experts=folded",
        "data=2,expert=4,model=2,dispatcher=all_gather,buffer=1.5",
        "data2_expert8,dispatcher=ragged",
        "data=8,expert=2,zero=3,hot_experts=8",
    ],
    "large": ["data2_expert8", "data2_expert8,chunks=2", "data2_expert8,chunks=4"],
}
CONFIGS = {"small": SMALL, "large": LARGE}


H200 = read_hardware("h200")


def report(config: RunConfig, mesh: str) -> dict:
    """The exchanges of a compiled step, with what they overlap."""
    shape = read_mesh(mesh)
    start = time.perf_counter()
    compiled = compile_train_step(config, shape, Layout.of(shape), H200)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found = overlaps(text, shape, ("all-to-all", "ragged-all-to-all", "all-gather"))
    exchanges = [o for o in found if not in_scope(o.collective.op_name, "fallback")]
    arguments = memory.argument_size_in_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "nodes": [device.process_index for device in absent_mesh(H200, shape).devices.flat],
        "seconds": time.perf_counter() - start,
        "argument_bytes": arguments,
        "device_bytes": arguments + memory.temp_size_in_bytes + results,
        "flops": program_flops(text),
        "sent": [
            {"kind": c.kind, "axes": c.axes, "wire_bytes": c.wire_bytes, "runs": c.runs}
            | {"conditional": c.conditional}
            for c in collectives(text, shape)
            if not in_scope(c.op_name, "fallback")
        ],
        "share": overlapped_share(o for o in found if o.collective.kind == "all-to-all"),
        "exchanges": [
            asdict(o.collective)
            | {"phase": o.collective.phase, "wire_bytes": o.collective.wire_bytes}
            | {"expert_flops": o.expert_flops}
            for o in exchanges
        ],
    }


if __name__ == "__main__":
    size = sys.argv[1]
    assert jax.devices()[0].platform == "cpu"
    print(json.dumps({mesh: report(CONFIGS[size], mesh) for mesh in MESHES[size]}))
