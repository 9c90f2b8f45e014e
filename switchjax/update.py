"""New parameters and optimizer state from gradients.

Where the optimizer's state is on the host, weights are updated in turn: the periods of a stack one
after another, and what is not stacked by itself. A rule of elements is the same arithmetic so; the
last bits are too, but where XLA fuses a product and a sum into one instruction, which it does in
other places in a loop. Adafactor's rule looks at whole weights, so all of its state comes to the
device at once; it is small, since of experts' and feed-forward weights it keeps a row and a column.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax import Array, lax

from switchjax import offload, optim, scaling
from switchjax.config import OptimConfig
from switchjax.mesh import Storage
from switchjax.model import SwitchTransformer
from switchjax.offload import is_stack

# From gradients, state and parameters to new parameters and state.
Updated = Callable[[Any, Any, Any], tuple[Any, Any]]

_OF_ELEMENTS = ("adamw", "sgd")


def update(
    config: OptimConfig,
    storage: Storage,
    grads: Any,
    opt_state: Any,
    parameters: Any,
    *,
    is_taken: Array | None = None,
) -> tuple[Any, Any]:
    """Parameters and the optimizer's state after a step with these gradients.

    Args:
        grads, parameters: as parts of a model, or of what is like one.
        opt_state: where the storage says; the new one is there too.
        is_taken: where False all stays as it was; None: always taken.
    """

    def updated(rule: optax.GradientTransformation, grads: Any, state: Any, weights: Any) -> Any:
        new = optim.update(rule, grads, state, weights)
        return new if is_taken is None else scaling.chosen(is_taken, new, (weights, state))

    if storage.offload == "none":
        return updated(optim.make_optimizer(config), grads, opt_state, parameters)
    if config.optimizer not in _OF_ELEMENTS:
        on_device = offload.to_device(opt_state)
        model, new = updated(optim.make_optimizer(config), grads, on_device, parameters)
        return model, offload.back(new, opt_state)
    norm, rule = optax.tree.norm(grads), optim.make_rule(config)

    def clipped(grads: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        return updated(rule, optim.clip(config, grads, norm), state, weights)

    state = optim.without_clipping(config, opt_state)
    model, state = _update_in_turn(clipped, grads, state, parameters)
    return model, optim.and_clipping(config, state)


def _update_in_turn(updated: Updated, grads: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
    """As `updated`, of a state on the host."""
    nodes, tree = jax.tree.flatten(state, is_leaf=_is_model)
    cuts = [_cut(node) if _is_model(node) else None for node in nodes]
    weights, states = [], []
    for i, (grad, weight) in enumerate(zip(_cut(grads), _cut(parameters), strict=True)):
        part = tree.unflatten(
            node if cut is None else cut[i] for node, cut in zip(nodes, cuts, strict=True)
        )
        weight, part = (_update_stack if is_stack(weight) else _update_rest)(
            updated, grad, part, weight
        )
        weights.append(weight)
        states.append(tree.flatten_up_to(part))
    state = tree.unflatten(
        parts[0] if cut is None else _joined(node, parts)
        for node, cut, parts in zip(nodes, cuts, zip(*states, strict=True), strict=True)
    )
    return _joined(parameters, weights), state


def _update_rest(
    updated: Updated, grads: Any, state: Any, weights: list[Array]
) -> tuple[list[Array], Any]:
    weights, new = updated(grads, offload.to_device(state), weights)
    return weights, offload.back(new, state)


def _update_stack(updated: Updated, grads: Any, state: Any, weights: Any) -> tuple[Any, Any]:
    """Counts come back as they were, for the next period."""
    nodes, tree = jax.tree.flatten(state, is_leaf=is_stack)

    def of_period(i: Array, carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        weights, nodes = carry
        parts = [offload.period_at(node, i) if is_stack(node) else node for node in nodes]
        grad, weight = offload.period_at((grads, weights), i)
        weight, part = updated(grad, tree.unflatten(parts), weight)
        new = [
            offload.with_period(node, i, part) if is_stack(node) else node
            for node, part in zip(nodes, tree.flatten_up_to(part), strict=True)
        ]
        return offload.with_period(weights, i, weight), new

    num_periods = jax.tree.leaves(weights)[0].shape[0]
    weights, nodes = lax.fori_loop(0, num_periods, of_period, (weights, nodes))
    return weights, tree.unflatten(nodes)


def _is_model(node: Any) -> bool:
    return isinstance(node, SwitchTransformer)


def _cut(model: Any) -> list[Any]:
    """What is not stacked, in a list, and each stack."""
    # None too, which masters have in the place of what needs none.
    parts = jax.tree.leaves(model, is_leaf=lambda node: node is None or is_stack(node))
    return [[part for part in parts if not is_stack(part)], *filter(is_stack, parts)]


def _joined(model: Any, cut: Sequence[Any]) -> Any:
    """The model with these parts."""
    parts, tree = jax.tree.flatten(model, is_leaf=lambda node: node is None or is_stack(node))
    rest, stacks = iter(cut[0]), iter(cut[1:])
    return tree.unflatten(next(stacks) if is_stack(part) else next(rest) for part in parts)
