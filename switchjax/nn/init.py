"""How a weight starts: truncated normal, the same bits on every mesh.

The usual inverse error function is not bitwise the same for every shard shape (the compiler
vectorises it differently), so values come from a table of quantiles looked up by random integers:
integer hashing, a gather and one multiplication give equal bits everywhere.
"""

import functools
import math
from statistics import NormalDist

import jax
import numpy as np
from flax import nnx
from jax import Array, P
from jaxtyping import Float

from switchjax.config import ParamDtype
from switchjax.layout import Held

_TABLE_BITS = 16
_STD_OF_TRUNCATED = 0.87962566103423978  # of a unit normal cut at two standard deviations


@functools.cache
def _quantiles() -> np.ndarray:
    """Midpoint quantiles of a unit-variance normal truncated at two of its own deviations."""
    normal = NormalDist()
    low, high = normal.cdf(-2), normal.cdf(2)
    count = 2**_TABLE_BITS
    points = (normal.inv_cdf(low + (high - low) * (i + 0.5) / count) for i in range(count))
    return np.fromiter(points, np.float64) / _STD_OF_TRUNCATED


def _table(variance: float) -> np.ndarray:
    return (_quantiles() * math.sqrt(variance)).astype(np.float32)


def draw(rng: np.random.Generator, shape: tuple[int, ...], *, variance: float) -> np.ndarray:
    """Values as `weight` has them, on the host."""
    return _table(variance)[rng.integers(2**_TABLE_BITS, size=shape)]


def weight(
    key: Array,
    shape: tuple[int, ...],
    *,
    variance: float,
    held: Held,
    dtype: ParamDtype = "float32",
) -> nnx.Param:
    """A weight of the given variance, born as it is held; a narrow dtype rounds the same values.

    Source: Switch Transformer, arXiv:2101.03961, section 2.4, with variance = scale / fan_in.
    """
    table = jax.numpy.asarray(_table(variance).astype(dtype))
    bits = jax.random.bits(key, shape, np.uint16, out_sharding=held.spec)
    value = table.at[bits].get(out_sharding=held.spec)
    return nnx.Param(value, width=held.width)


def ones(shape: tuple[int, ...], spec: P) -> nnx.Param:
    """A float32 weight of ones."""
    value: Float[Array, ...] = jax.numpy.ones(shape, np.float32, out_sharding=spec)
    return nnx.Param(value)
