"""A whole train step with Switch layers, against the same model with dense ones, on one device.

Claim: the sparse step takes at most 1.10 times the dense one. Steps of both are interleaved; the
ratio is the median of the ratios of neighbours.
Command: python experiments/bench/model_step.py --repeats 20
Expect: switch_over_dense of 1.08 on 2 CPU cores (2026-11-30, Python 3.11).
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
import tyro

from switchjax.batch import Batch
from switchjax.config import Dispatcher, ModelConfig, OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import make_submesh, read_mesh
from switchjax.state import init_state
from switchjax.step import train_step

MODEL = ModelConfig(
    vocab_size=4096,
    d_model=256,
    d_ff=1024,
    num_heads=4,
    d_kv=64,
    num_layers=4,
    moe_every=2,
    num_experts=8,
    capacity_factor=1.25,
)
ROWS, SOURCE, TARGET = 8, 256, 64


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is timed."""

    experts: int = 8
    dispatcher: Dispatcher = "all_to_all"
    repeats: int = 20


def random_batch(rng: np.random.Generator) -> Batch:
    """Full rows of random tokens."""

    def tokens(length: int) -> np.ndarray:
        return rng.integers(1, MODEL.vocab_size, (ROWS, length), dtype=np.int32)

    def ones(length: int) -> np.ndarray:
        return np.ones((ROWS, length), np.int32)

    return Batch(
        row_B=np.arange(ROWS, dtype=np.int32),
        tokens_BL=tokens(TARGET),
        segment_BL=ones(TARGET),
        targets_BL=tokens(TARGET),
        target_mask_BL=ones(TARGET) > 0,
        encoder_tokens_BS=tokens(SOURCE),
        encoder_segment_BS=ones(SOURCE),
    )


def compiled_step(model: ModelConfig, layout: Layout) -> tuple[Callable[[], float], int]:
    """A function that takes a step and says how many seconds it took; and XLA's temporary bytes."""
    config = RunConfig(model=model, optim=OptimConfig(optimizer="adamw"))
    state = jax.jit(partial(init_state, config, layout))()
    batch = layout.place(random_batch(np.random.default_rng(0)))
    step = jax.jit(partial(train_step, config, layout), donate_argnums=0)
    compiled = step.lower(state, batch).compile()

    def seconds() -> float:
        nonlocal state
        began = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - began

    return seconds, compiled.memory_analysis().temp_size_in_bytes


def main(options: Options) -> None:
    shape = read_mesh("single", options.dispatcher)
    with jax.set_mesh(make_submesh(shape)):
        layout = Layout.of(shape)
        sparse = replace(MODEL, num_experts=options.experts)
        steps = [compiled_step(model, layout) for model in (sparse, replace(MODEL, moe_every=0))]
        rounds = [[seconds() for seconds, _ in steps] for _ in range(options.repeats + 2)][2:]
    switch_s, dense_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(switch / dense for switch, dense in rounds)
    print(
        json.dumps(
            {
                "experts": options.experts,
                "dispatcher": options.dispatcher,
                "switch_s": round(switch_s, 4),
                "dense_s": round(dense_s, 4),
                "switch_over_dense": round(ratio, 3),
                "temp_bytes": steps[0][1],
            }
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
