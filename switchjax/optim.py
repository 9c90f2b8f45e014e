"""The update rules, from optax, and the learning rate.

Layers are stacked into one array a parameter, and two things in Adafactor follow from that. Its
update clipping and its scaling by the parameter's size see a whole stack, not one layer. And it
factors the second moment over the two largest dims of at least 128, whatever they mean: D and F of
an expert weight, unless there are more experts than either is wide; then choose adamw.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from switchjax.config import OptimConfig


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


def rule_state(config: OptimConfig, opt_state: Any) -> Any:
    """The rule's part of the state of `make_optimizer`."""
    return opt_state if config.clip_norm is None else opt_state[1]


def with_rule_state(config: OptimConfig, opt_state: Any, state: Any) -> Any:
    """The state of `make_optimizer` with another one of the rule."""
    return state if config.clip_norm is None else (opt_state[0], state)


def clip(config: OptimConfig, grads: Any, norm: Array) -> Any:
    """All gradients, or some of them, once the norm of all is at most `clip_norm`."""
    limit = config.clip_norm
    if limit is None:
        return grads
    factor = jnp.where(norm < limit, 1, limit / norm)
    return jax.tree.map(lambda x: x * factor, grads)
