"""A loop over the rows of each expert, in pieces of few sizes, all known when compiling.

Takes time for the rows in use, not for those there is room for, nor for experts without rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

# Blocks in a piece. A run of up to so many is one piece, whose weight gradient needs no sum with
# another one's: a share is 8 blocks or fewer (`grouped.block_rows`), and most runs are not much
# longer. What is left of a longer one is cut into few.
FIRST_PIECE = 10
LATER_PIECES = (6, 1)


class Piece(NamedTuple):
    """Rows of the run of one expert, in whole blocks."""

    expert: Int[Array, ""]
    begin: Int[Array, ""]
    num_rows: int
    real_R1: Bool[Array, "R 1"]  # a row of the run, not of what fills its last block
    first: bool  # of its run

    def read(self, of_rows: Any) -> Any:
        """My rows of all arrays of a tree."""
        return jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, self.begin, self.num_rows), of_rows
        )

    def write(self, of_rows: Float[Array, "N W"], mine: Float[Array, "R W"]) -> Array:
        """With my rows replaced."""
        return lax.dynamic_update_slice_in_dim(of_rows, mine, self.begin, 0)

    def add(self, of_experts: Float[Array, "e ..."], mine: Float[Array, "..."]) -> Array:
        """With my expert's part increased; it must be zeros before the first piece."""
        # These zeros are not read: in large arrays that would take as long as the product does.
        total = mine if self.first else of_experts[self.expert] + mine
        return lax.dynamic_update_index_in_dim(of_experts, total, self.expert, 0)


def for_each_piece(
    starts_e: Int[Array, "e"],
    sizes_e: Int[Array, "e"],
    block: int,
    num_rows: int,
    weights: Any,
    step: Callable[[Piece, Any, Any], Any],
    carry: Any,
) -> Any:
    """`carry` after `step(piece, weights of its expert, carry)` for all pieces of all runs.

    Args:
        starts_e: first row of each run; it takes whole blocks from there on.
        num_rows: of the arrays that pieces are read from, at least the ends of all runs.
        weights: a tree of arrays [e, ...].
    """
    most = min(FIRST_PIECE, num_rows // block)
    later_pieces = [n for n in LATER_PIECES if n * block <= num_rows]
    if most == 0:
        return carry
    in_use_e = jnp.argsort(sizes_e == 0, stable=True)

    def of_expert(n: Array, carry: Any) -> Any:
        expert = in_use_e[n]
        mine = jax.tree.map(lambda w: w[expert], weights)  # a copy, so not once a piece
        begin, end = starts_e[expert], starts_e[expert] + sizes_e[expert]
        left = -(-sizes_e[expert] // block)

        def pieces(blocks: int, number: Array, begin: Array, first: bool, carry: Any) -> Any:
            def of_piece(i: Array, carry: Any) -> Any:
                # Made from i, or XLA takes the products out of a loop that may run 0 times.
                at = begin + i * (blocks * block)
                real_R1 = (at + jnp.arange(blocks * block, dtype=jnp.int32) < end)[:, None]
                return step(Piece(expert, at, blocks * block, real_R1, first), mine, carry)

            return lax.fori_loop(0, number, of_piece, carry)

        taken = jnp.minimum(left, most)
        for blocks in range(1, most + 1):
            carry = pieces(blocks, (taken == blocks).astype(jnp.int32), begin, True, carry)
        begin, left = begin + taken * block, left - taken
        for blocks in later_pieces:
            carry = pieces(blocks, left // blocks, begin, False, carry)
            begin, left = begin + left // blocks * blocks * block, left % blocks
        return carry

    return lax.fori_loop(0, jnp.sum(sizes_e > 0, dtype=jnp.int32), of_expert, carry)
