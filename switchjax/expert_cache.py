"""The cache of busy experts, of a whole model: what a step keeps gathered, and what that saves.

What a layer does with it is in `moe.hot`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from switchjax.config import ModelConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.model import Stack, SwitchTransformer, switch_layer_names
from switchjax.moe import hot
from switchjax.zero import map_weights


class Kept(NamedTuple):
    """What a stack keeps through a step."""

    weights: Stack  # the hot experts' in the place of all experts', and None of all others
    order_NE: Array


def gathered(
    model: SwitchTransformer, load_XE: Float[Array, "X E"] | None, layout: Layout
) -> list[Kept]:
    """What the stacks keep through a step, encoder first; nothing unless the mesh file says so.

    Args:
        load_XE: the larger, the busier; layers in the order of the model's statistics.
    """
    if not layout.storage.hot_experts or load_XE is None:
        return []

    def of_stack(stack: Stack, order_NE: Array) -> Kept:
        def of_weight(leaf: Any) -> Any:
            if not hot.is_of_experts(leaf):
                return None
            return leaf.replace(hot.gathered(leaf, order_NE, layout, model.dtype))

        return Kept(map_weights(of_weight, stack), order_NE)

    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    orders = jnp.split(hot.orders(load_XE, layout), len(stacks))
    return [of_stack(*pair) for pair in zip(stacks, orders, strict=True)]


def with_gathered(model: SwitchTransformer, kept: list[Kept]) -> SwitchTransformer:
    """The model whose layers find what was kept beside what the state holds."""
    if not kept:
        return model

    def of_stack(node: Any) -> Any:
        if not isinstance(node, Stack):
            return node
        weights, order_NE = kept[-1 if node.causal else 0]

        def of_weight(leaf: Any, whole: Any) -> Any:
            if whole is None:
                return leaf
            return leaf.replace(hot.Cached(leaf.get_value(), whole.get_value(), order_NE))

        return map_weights(of_weight, node, weights)

    return jax.tree.map(of_stack, model, is_leaf=lambda node: isinstance(node, Stack))


def kept_bytes(model: ModelConfig, shape: MeshShape) -> float:
    """That hot experts of all layers take on one device, while a step lasts."""
    return _bytes_of_experts(model, shape, shape.storage.hot_experts / shape.expert_parts)


def gathered_bytes(config: RunConfig, shape: MeshShape) -> float:
    """That one device sends in a step to gather experts, if all cold ones are in use.

    Without hot experts too: all experts are cold then. Gradients are not counted: they are summed
    in every micro-batch, of hot experts too.
    """
    here = config.model.num_experts / shape.expert_parts
    hot_here = shape.storage.hot_experts / shape.expert_parts
    uses = 2 * config.optim.accumulation  # forward and backward
    away = (shape.data - 1) / shape.data
    return away * _bytes_of_experts(config.model, shape, hot_here + uses * (here - hot_here))


def saved_bytes(config: RunConfig, shape: MeshShape) -> float:
    """That one device does not send in a step since hot experts stay gathered."""
    without = replace(shape, storage=replace(shape.storage, hot_experts=0))
    return gathered_bytes(config, without) - gathered_bytes(config, shape)


def _bytes_of_experts(model: ModelConfig, shape: MeshShape, number: float) -> float:
    """Of so many whole experts of each layer on one device, in the dtype of compute."""
    of_one = weights_of_expert(model, shape) * jnp.dtype(model.dtype).itemsize
    return len(switch_layer_names(model)) * number * of_one


def weights_of_expert(model: ModelConfig, shape: MeshShape) -> int:
    """Numbers of one expert on one device, whole over `data`."""
    matrices = 3 if model.activation == "geglu" else 2
    hidden = model.d_ff // (shape.model if shape.exchange.experts == "separate" else 1)
    return matrices * model.d_model * hidden
