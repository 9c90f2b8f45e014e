"""The cache of busy experts, in a model: which experts a step keeps gathered, and what that saves.

What a layer does with them is in `moe.hot`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from switchjax.layout import Layout
from switchjax.model import Stack, SwitchTransformer
from switchjax.moe import hot


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

        return Kept(_map(of_weight, stack), order_NE)

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

        return _map(of_weight, node, weights)

    return jax.tree.map(of_stack, model, is_leaf=lambda node: isinstance(node, Stack))


def _map(function: Any, *trees: Any) -> Any:
    return jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, nnx.Variable))
