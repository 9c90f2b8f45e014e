"""Loss scaling: gradients large enough for float16, and what happens when they are too large.

The loss is multiplied by a scale, and gradients divided by it once they are float32, so that only
what lies between is larger. A gradient that overflows leaves everything as it was before the step,
and halves the scale; after some time without overflow the scale doubles. It is a power of two, so
that scaling rounds nothing.

Source: Mixed Precision Training, arXiv:1710.03740, section 3.2; that the scale follows what
overflows, and after how many steps it doubles, as in torch.amp.GradScaler.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from switchjax.config import OptimConfig

Tree = TypeVar("Tree")

FIRST_SCALE = 2.0**15
LARGEST_SCALE = 2.0**24
STEPS_TO_DOUBLE = 2000


class LossScale(NamedTuple):
    """What the next loss is multiplied by, and how it came to that."""

    scale: Array  # float32
    steady: Array  # steps since it last changed, int32
    skipped: Array  # steps of the run that overflowed, int32

    def after(self, is_finite: Array) -> "LossScale":
        """Once it is known whether a step's gradient is finite."""
        steady = jnp.where(is_finite, self.steady + 1, 0)
        doubles = steady == STEPS_TO_DOUBLE
        grown = jnp.where(doubles, jnp.minimum(2 * self.scale, LARGEST_SCALE), self.scale)
        return LossScale(
            scale=jnp.where(is_finite, grown, self.scale / 2),
            steady=jnp.where(doubles, 0, steady),
            skipped=self.skipped + jnp.where(is_finite, 0, 1),
        )


def first_scale(config: OptimConfig) -> LossScale | None:
    """Of a new run; None for one that does not scale its loss."""
    if config.loss_scale is None:
        return None
    return LossScale(jnp.float32(FIRST_SCALE), jnp.int32(0), jnp.int32(0))


def scaled(loss: Array, by: LossScale | None) -> Array:
    """The loss that gradients are taken of."""
    return loss if by is None else loss * by.scale


def unscaled(gradient: Tree, by: LossScale | None) -> Tree:
    """The gradient of the loss itself."""
    if by is None:
        return gradient
    factor = 1 / by.scale
    return jax.tree.map(lambda x: x * factor, gradient)


def chosen(is_new: Array, new: Tree, old: Any) -> Tree:
    """One of two trees of arrays, all of it."""
    return jax.tree.map(lambda a, b: jnp.where(is_new, a, b), new, old)
