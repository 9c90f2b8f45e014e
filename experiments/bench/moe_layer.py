"""A Switch layer on one device against a dense layer of the same FLOPs, and its own products.

Claim: what the layer does around its two batched products (router, places, moving tokens, gate)
takes at most 6 % of their time, and the bytes it needs do not grow with the number of experts.
What the products take over the dense layer is empty slots, and reading and writing the weights of
all experts. Forward and backward, gradients of x and of all weights; calls interleaved; medians of
the ratios of neighbours.
Command: python experiments/bench/moe_layer.py --experts 8
Expect: on 2 CPU cores layer_over_matmuls 1.05, 0.93 and 0.89 for 8, 32 and 128 experts and
layer_temp_bytes of 137, 74 and 76 MB; with --dispatcher ragged layer_over_dense 1.17, 1.55 and
2.43 (2026-11-30, Python 3.11; runs differ by 5 %).
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from switchjax.config import Dispatcher, ModelConfig
from switchjax.layout import Layout
from switchjax.mesh import make_submesh, read_mesh
from switchjax.moe.layer import SwitchLayer
from switchjax.moe.routing import capacity
from switchjax.nn.noise import Noise

ROW = 512
"""Tokens of a row, and so of a group."""


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def with_gradients(function: Callable[..., jax.Array], x: jax.Array, *weights: Any) -> tuple:
    """A compiled program and its arguments: the output, and gradients of x and of all weights.

    The output is as wide as x, so x also serves as the gradient that comes in.
    """

    def run(x: jax.Array, *weights: Any) -> Any:
        y, vjp = jax.vjp(function, x, *weights)
        return y, vjp(x)

    return jax.jit(run).lower(x, *weights).compile(), x, *weights


def feed_forward(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Of one expert, or of each of many on its own rows."""
    return jax.nn.relu(x @ w_in) @ w_out


def programs(config: ModelConfig, tokens: int, layout: Layout) -> dict[str, tuple]:
    """What is timed, by name."""
    E, D, F, rows = config.num_experts, config.d_model, config.d_ff, tokens // ROW
    layer = SwitchLayer(jax.random.key(0), config, layout)
    real_BL = jax.reshard(jnp.ones((rows, ROW), bool), layout.tokens_bl)
    noise = Noise(jax.random.key(1), jax.reshard(jnp.arange(rows), layout.rows_b))

    def switch(x_BLD: jax.Array, layer: SwitchLayer) -> jax.Array:
        return layer(x_BLD, real_BL, noise)[0]

    slots = rows * capacity(ROW, E, config.top_k, config.capacity_factor)
    x_BLD = jax.reshard(normal(2, rows, ROW, D), layout.tokens_bld)
    return {
        "layer": with_gradients(switch, x_BLD, layer),
        "matmuls": with_gradients(
            feed_forward, normal(3, E, slots, D), normal(4, E, D, F) / 32, normal(5, E, F, D) / 32
        ),
        "dense": with_gradients(
            feed_forward,
            normal(6, tokens * config.top_k, D),
            normal(7, D, F) / 32,
            normal(8, F, D) / 32,
        ),
    }


def main(
    experts: int = 8,
    tokens: int = 4096,
    d_model: int = 512,
    d_ff: int = 2048,
    dispatcher: Dispatcher = "all_to_all",
    repeats: int = 15,
) -> None:
    """Print one line of JSON: seconds, ratios, and bytes that the compiled layer needs beside."""
    config = ModelConfig(
        d_model=d_model, d_ff=d_ff, num_experts=experts, init_scale=1.0, jitter=0.0, dropout=0.0
    )
    shape = read_mesh("single", dispatcher)
    with jax.set_mesh(make_submesh(shape)):
        timed = programs(config, tokens, Layout.of(shape))
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(repeats + 1):
            for name, (program, *arguments) in timed.items():
                began = time.perf_counter()
                jax.block_until_ready(program(*arguments))
                if number > 0:  # the first calls warm up
                    seconds[name].append(time.perf_counter() - began)

    def ratio(over: str, under: str) -> float:
        pairs = zip(seconds[over], seconds[under], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    print(
        json.dumps(
            {
                "experts": experts,
                "dispatcher": dispatcher,
                **{f"{name}_s": round(statistics.median(s), 4) for name, s in seconds.items()},
                "layer_over_dense": ratio("layer", "dense"),
                "layer_over_matmuls": ratio("layer", "matmuls"),
                "matmuls_over_dense": ratio("matmuls", "dense"),
                "layer_temp_bytes": timed["layer"][0].memory_analysis().temp_size_in_bytes,
            }
        )
    )


if __name__ == "__main__":
    tyro.cli(main)
