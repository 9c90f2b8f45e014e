"""Over which mesh axes the values of an array differ, inside `shard_map`, is part of its type."""

from collections.abc import Iterable

import jax
from jax import Array, lax


def axes_of(array: Array) -> frozenset[str]:
    """Mesh axes over which devices may hold other values."""
    return jax.typeof(array).mat.varying


def over(axes: Iterable[str], array: Array) -> Array:
    """The same values, typed as varying over these axes too.

    Its gradient is the sum over the axes that are added. So this says where that sum is made.
    """
    missing = [axis for axis in axes if axis not in axes_of(array)]
    reduced = jax.typeof(array).mat.reduced  # a type of its own: see `zero.in_use`
    for some in (set(missing) & reduced, set(missing) - reduced):
        if some:
            array = lax.pcast(array, tuple(axis for axis in missing if axis in some), to="varying")
    return array
