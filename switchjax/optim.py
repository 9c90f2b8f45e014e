"""The update rules, from optax, and the learning rate.

Layers are stacked into one array a parameter, and two things in Adafactor follow from that. Its
update clipping and its scaling by the parameter's size see a whole stack, not one layer. And it
factors the second moment over the two largest dims of at least 128, whatever they mean: D and F of
an expert weight, unless there are more experts than either is wide; then choose adamw.

Parameters in bfloat16 have 8 bits, and what a step adds is mostly less than the last of them. So
the state holds float32 copies of them, their *masters*: the rule works on masters, and parameters
are masters rounded.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from switchjax.config import OptimConfig
from switchjax.zero import map_weights


def learning_rate(config: OptimConfig, step: int | Array) -> Array:
    """The rate of the step numbered from 0: peak · sqrt(warmup / step) after the warm-up.

    During it the rate rises linearly, but for Adafactor it stays at the peak, as in T5, whose
    schedule is peak 1e-2 with 10 000 warm-up steps (arXiv:1910.10683, section 3.1.2).
    """
    number = jnp.asarray(step, jnp.float32) + 1
    falling = jnp.sqrt(config.warmup_steps / number)
    rising = 1.0 if config.optimizer == "adafactor" else number / config.warmup_steps
    return config.learning_rate * jnp.minimum(rising, falling)


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Clipping by the global norm, then the update rule."""
    rule = make_rule(config)
    if config.clip_norm is None:
        return rule
    clipping = optax.stateless(lambda grads, _: clip(config, grads, optax.tree.norm(grads)))
    return optax.chain(clipping, rule)


def make_rule(config: OptimConfig) -> optax.GradientTransformation:
    """The update rule alone, for gradients that are clipped."""

    def rate(step):
        return learning_rate(config, step)

    match config.optimizer:
        case "adafactor":
            return optax.adafactor(rate)
        case "adamw":
            return optax.adamw(rate, weight_decay=config.weight_decay)
        case "sgd":
            return optax.sgd(rate)


def clip(config: OptimConfig, grads: Any, norm: Array) -> Any:
    """All gradients, or some of them, once the norm of all is at most `clip_norm`."""
    limit = config.clip_norm
    if limit is None:
        return grads
    factor = jnp.where(norm < limit, 1, limit / norm)
    return jax.tree.map(lambda x: x * factor, grads)


class WithMasters(NamedTuple):
    """The state of the rule beside the masters of those parameters that are not float32.

    Source: Mixed Precision Training, arXiv:1710.03740, section 3.1.
    """

    masters: Any  # a tree as the parameters', None in the place of those that are float32
    rule: optax.OptState


def init(config: OptimConfig, parameters: Any) -> optax.OptState:
    """The optimizer's state for a tree of parameters, laid out as they are."""

    def master(leaf: Any) -> Any:
        value = _value(leaf)
        return None if value.dtype == jnp.float32 else _with(leaf, value.astype(jnp.float32))

    rule, masters = make_optimizer(config), map_weights(master, parameters)
    if not jax.tree.leaves(masters):
        return rule.init(parameters)
    return WithMasters(masters, rule.init(_widened(parameters, masters)))


def update(
    rule: optax.GradientTransformation,
    gradient: Any,
    opt_state: optax.OptState,
    parameters: Any,
) -> tuple[Any, optax.OptState]:
    """Parameters and state after a step of the rule.

    Args:
        gradient: float32, each array laid out as its parameter.
    """
    if not isinstance(opt_state, WithMasters):
        updates, opt_state = rule.update(gradient, opt_state, parameters)
        return optax.apply_updates(parameters, updates), opt_state
    wide = _widened(parameters, opt_state.masters)
    updates, of_rule = rule.update(gradient, opt_state.rule, wide)
    wide: Any = optax.apply_updates(wide, updates)
    masters = map_weights(lambda new, old: None if old is None else new, wide, opt_state.masters)
    rounded = jax.tree.map(lambda new, old: new.astype(old.dtype), wide, parameters)
    return rounded, WithMasters(masters, of_rule)


def without_clipping(config: OptimConfig, opt_state: Any) -> Any:
    """Of the state of `make_optimizer`, what `make_rule` knows."""
    if isinstance(opt_state, WithMasters):
        return opt_state._replace(rule=without_clipping(config, opt_state.rule))
    return opt_state if config.clip_norm is None else opt_state[1]


def and_clipping(config: OptimConfig, rule_state: Any) -> Any:
    """The state of `make_optimizer` with that of the rule; clipping has none."""
    if isinstance(rule_state, WithMasters):
        return rule_state._replace(rule=and_clipping(config, rule_state.rule))
    return rule_state if config.clip_norm is None else (optax.EmptyState(), rule_state)


def _widened(parameters: Any, masters: Any) -> Any:
    """The parameters with masters in the place of those that have one."""
    return map_weights(lambda leaf, master: leaf if master is None else master, parameters, masters)


def _value(leaf: Any) -> Array:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _with(leaf: Any, value: Array) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value
