"""Dropout and jitter that do not depend on the mesh.

Every row of the global batch draws from a key of its own, made from the step, the layer and the
row's number, so neither the number of devices nor of micro-batches moves a single random number.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class Noise(NamedTuple):
    """The source of randomness of one place in the model. In evaluation there is none: `None`."""

    key: Array
    row_B: Array  # number of each row in the whole batch of one optimizer step

    def at(self, site: int | Array) -> "Noise":
        """The source for a place inside this one."""
        return Noise(jax.random.fold_in(self.key, site), self.row_B)

    def uniform(self, shape: tuple[int, ...]) -> Array:
        """Numbers in [0, 1), float32, of shape [rows, *shape]."""

        def of_row(row: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(self.key, row), shape, jnp.float32)

        return jax.vmap(of_row)(self.row_B)


def dropout(x: Float[Array, "B ..."], rate: float, noise: Noise | None) -> Float[Array, "B ..."]:
    """`x` with a share `rate` of its values zeroed and the others scaled up to keep the mean."""
    if noise is None or rate == 0:
        return x
    uniform = jax.reshard(noise.uniform(x.shape[1:]), jax.typeof(x).sharding.spec)
    return jnp.where(uniform >= rate, x / (1 - rate), 0).astype(x.dtype)
