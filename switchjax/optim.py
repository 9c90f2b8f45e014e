"""The update rules, from optax, and the learning rate.

Layers are stacked into one array a parameter, and two things in Adafactor follow from that. Its
update clipping and its scaling by the parameter's size see a whole stack, not one layer. And it
factors the second moment over the two largest dims of at least 128, whatever they mean: D and F of
an expert weight, unless there are more experts than either is wide; then choose adamw.
"""

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

    def rate(step):
        return learning_rate(config, step)

    match config.optimizer:
        case "adafactor":
            rule = optax.adafactor(rate)
        case "adamw":
            rule = optax.adamw(rate, weight_decay=config.weight_decay)
        case "sgd":
            rule = optax.sgd(rate)
    if config.clip_norm is None:
        return rule
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
