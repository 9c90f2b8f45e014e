"""Matrix products of rows with their experts' weights: of one expert's rows, or of all experts'."""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax


class Products(Protocol):
    """Sums are in float32. Where all rows are of one expert, `w` has no dim e."""

    def by(self, x: Array, w: Array) -> Array:
        """[N, D] · [e, D, F] -> [N, F] in the dtype of x."""
        ...

    def by_transposed(self, y: Array, w: Array) -> Array:
        """[N, F] · [e, D, F] -> [N, D] in the dtype of y."""
        ...

    def outer(self, x: Array, y: Array) -> Array:
        """[N, D], [N, F] -> [e, D, F] in float32: the gradient of w."""
        ...


class OneExpert:
    """All rows are of one expert."""

    def by(self, x: Array, w: Array) -> Array:
        return _dot(x, w, 1, 0).astype(x.dtype)

    def by_transposed(self, y: Array, w: Array) -> Array:
        return _dot(y, w, 1, 1).astype(y.dtype)

    def outer(self, x: Array, y: Array) -> Array:
        return _dot(x, y, 0, 0)


def _dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    contracted = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)


class AllExperts(NamedTuple):
    """Rows sorted by expert; those beyond the last expert's come out as anything."""

    # JAX's own ragged products, not tokamax's: the kernels of 0.0.12 do not say over which mesh
    # axes their results vary, which `shard_map` asks of every kernel. XLA of jax 0.10.2 compiles
    # JAX's for an H200 as one masked product with every expert: e times the FLOPs.

    rows_e: Array  # of each expert, int32

    def by(self, x: Array, w: Array) -> Array:
        return self._dot(x, w).astype(x.dtype)

    def by_transposed(self, y: Array, w: Array) -> Array:
        return self._dot(y, w.swapaxes(1, 2)).astype(y.dtype)

    def outer(self, x: Array, y: Array) -> Array:
        over_rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(
            x, y, self.rows_e, over_rows, preferred_element_type=jnp.float32
        )

    def _dot(self, x: Array, w: Array) -> Array:
        return lax.ragged_dot(x, w, self.rows_e, preferred_element_type=jnp.float32)
