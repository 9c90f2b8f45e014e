"""A dense model's weights as those of a Switch Transformer.

Of every period the last feed-forward layer becomes a Switch layer. Each of its experts starts as
that dense layer, and its router as in a new model. All else stays as it is, bit for bit. Where no
token is dropped, a Switch layer gives at first

    output_scale · p · dense(x)   with top_k 1, p being the probability of the chosen expert,
    output_scale · dense(x)       with a larger top_k, whose gates add up to 1,

if the experts are exact copies. A new router prefers no expert by much: p is close to
1 / num_experts, so that with top_k 1 an output_scale of num_experts starts near the dense model.

There is no optimizer state in what is written: a run that starts from it begins a new one.

Source: sparse upcycling, arXiv:2212.05055, section 3.
"""

import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from switchjax.config import ModelConfig
from switchjax.errors import UserError
from switchjax.interop.options import UpcycleConfig
from switchjax.nn.init import draw
from switchjax.state import model_shapes
from switchjax.tensor_files import require_empty
from switchjax.weights import Weights, open_weights, write_weights

_DENSE_OF_EXPERTS = {
    "switch.experts.w_in_EDF": "mlp.w_in_DF",
    "switch.experts.w_gate_EDF": "mlp.w_gate_DF",
    "switch.experts.w_out_EFD": "mlp.w_out_FD",
}


def upcycle(config: UpcycleConfig) -> ModelConfig:
    """Writes `config.out`, a weights directory, and returns what its model is.

    Raises:
        UserError: there is no dense model, its layers do not divide, or `out` is taken.
    """
    require_empty(config.out)
    dense = open_weights(config.dense, config.step)
    if dense.config.model.moe_every:
        raise UserError(
            f"{config.dense} has experts already (model.moe_every {dense.config.model.moe_every}): "
            "only a dense model is upcycled"
        )
    model = replace(dense.config.model, moe_every=config.moe_every, num_experts=config.num_experts)
    run = replace(dense.config, model=model, resume=False, init_from=None)
    write_weights(config.out, run, model_shapes(model), lambda name: _pieces(name, config, dense))
    return model


def _pieces(name: str, config: UpcycleConfig, dense: Weights) -> Iterator[np.ndarray]:
    """The values of the sparse model's array `name`, layer by layer and expert by expert."""
    stack, _, in_period = name.partition(".periods.blocks.")
    if not in_period:
        yield dense.read(name)
        return
    block, _, leaf = in_period.partition(".")
    for period in range(dense.config.model.num_layers // config.moe_every):
        layer = period * config.moe_every + int(block)

        def of_layer(leaf: str, layer: int = layer) -> np.ndarray:
            return dense.read(f"{stack}.periods.blocks.0.{leaf}", (layer,))

        if leaf == "switch.router_DE":
            yield _router(name, layer, config, dense.config.model)
        elif leaf in _DENSE_OF_EXPERTS:
            yield from _experts(name, layer, config, of_layer(_DENSE_OF_EXPERTS[leaf]))
        else:
            yield of_layer(leaf)


def _experts(
    name: str, layer: int, config: UpcycleConfig, weight: np.ndarray
) -> Iterator[np.ndarray]:
    scale = config.output_scale if name.endswith("w_out_EFD") else 1.0
    spread = config.noise * weight.std(dtype=np.float64)
    for expert in range(config.num_experts):
        copy = weight
        if config.noise:
            rng = _generator(config.seed, name, layer, expert)
            copy = weight + spread * rng.standard_normal(weight.shape)
        yield (copy * scale).astype(weight.dtype)


def _router(name: str, layer: int, config: UpcycleConfig, dense: ModelConfig) -> np.ndarray:
    D = dense.d_model
    rng = _generator(config.seed, name, layer)
    return draw(rng, (D, config.num_experts), variance=dense.init_scale / D)


def _generator(seed: int, name: str, *place: int) -> np.random.Generator:
    return np.random.default_rng((seed, zlib.crc32(name.encode()), *place))
