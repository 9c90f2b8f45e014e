"""From tokens to the slots of their experts and back, on one device, by index.

Both ways are gathers, and so are both gradients: since no slot holds two tokens, the transpose of
a gather by one index is a gather by its inverse. Nothing is scattered but a few integers.

Except where choices outnumber the buffer's rows, as under expert choice, where a token has a
choice for every expert: there a sum over choices adds the rows to their tokens, and no array of
every choice's D numbers is made. A GPU adds rows in an order of its own each time, unless XLA is
told otherwise (`--xla_gpu_deterministic_ops`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Shaped

from switchjax.moe.routing import Routing
from switchjax.remat import RETURNED, named

# Rows of the buffer: expert-major, then group, then slot, so that an expert's rows are together.


class Slots(NamedTuple):
    """Where tokens sit in a buffer [experts * groups * capacity, D], and who sits in each slot."""

    row_TQ: Array  # buffer row of each choice; one past the end where it was dropped
    choice_R: Array  # choice (token · Q + choice) in each buffer row; one past the end where empty


def assign_slots(routing: Routing, num_experts: int, capacity: int) -> Slots:
    """The buffer row of every kept choice of the groups on this device."""
    G, T, Q = routing.expert_GTQ.shape
    num_rows = num_experts * G * capacity
    group_G11 = jnp.arange(G, dtype=jnp.int32)[:, None, None]
    row_GTQ = (routing.expert_GTQ * G + group_G11) * capacity + routing.slot_GTQ
    row_TQ = jnp.where(routing.kept_GTQ, row_GTQ, num_rows).reshape(G * T, Q)
    return slots_of(row_TQ, num_rows)


def slots_of(row_TQ: Int[Array, "T Q"], num_rows: int) -> Slots:
    """The slots of choices whose rows are known, no two the same; `num_rows` where one has none."""
    choice_R = jnp.full(num_rows, row_TQ.size, jnp.int32)
    choice_R = choice_R.at[row_TQ.reshape(-1)].set(
        jnp.arange(row_TQ.size, dtype=jnp.int32), mode="drop"
    )
    return Slots(row_TQ, choice_R)


def fill_slots(x_TD: Array, slots: Slots) -> Array:
    """Buffer rows [R, D]: the token in each slot, zeros in an empty one."""
    top_k = slots.row_TQ.shape[1]
    return _gather(x_TD, slots.choice_R // top_k, slots.row_TQ)


def read_slots(y_RD: Array, slots: Slots) -> Array:
    """What came back for every choice [T, Q, D], zeros where it was dropped."""
    T, Q = slots.row_TQ.shape
    y_PD = _gather(y_RD, slots.row_TQ.reshape(-1), slots.choice_R[:, None])
    return y_PD.reshape(T, Q, -1)


def weighted_sum(
    y_RD: Shaped[Array, "R D"], slots: Slots, gate_TQ: Float[Array, "T Q"]
) -> Shaped[Array, "T D"]:
    """What came back for a token, summed over its choices by their gates; 0 for dropped ones.

    Summed in float32 (or what is wider), whatever the dtype of y, which the result has.
    """
    T, Q = slots.row_TQ.shape
    y_RD = named(RETURNED, y_RD)
    wide = jnp.promote_types(y_RD.dtype, jnp.float32)
    if _rows_are_fewer(slots.row_TQ, len(y_RD)):
        row_P1 = slots.row_TQ.reshape(-1, 1)
        gate_R1 = _gather(gate_TQ.reshape(-1, 1), slots.choice_R, row_P1)
        y_TD = _add_rows(y_RD.astype(wide) * gate_R1, slots.choice_R // Q, T)
    else:
        y_TD = jnp.einsum("tqd,tq->td", read_slots(y_RD, slots).astype(wide), gate_TQ)
    return y_TD.astype(y_RD.dtype)


def _rows_are_fewer(place_NQ: Array, num_rows: int) -> bool:
    """Whether a sum over Q is cheaper by the rows that it adds than by the places it reads."""
    return place_NQ.shape[1] > 1 and place_NQ.size > num_rows


def _add_rows(y_MD: Array, index_M: Array, num_sums: int) -> Array:
    """Rows of y with one index, added up [N, D]; an index one past the end is left out."""
    sums_ND = jnp.zeros((num_sums, y_MD.shape[1]), y_MD.dtype)
    return sums_ND.at[index_M].add(y_MD, mode="drop")


@jax.custom_vjp
def _gather(
    x_ND: Shaped[Array, "N D"], index_M: Int[Array, "M"], inverse_NQ: Int[Array, "N Q"]
) -> Shaped[Array, "M D"]:
    """Row index_M[m] of x in place m, zeros where the index is one past the end.

    `inverse_NQ` lists the places that each row of x goes to (one past the end: none).
    Equivalent to: `x_ND.at[index_M].get(mode="fill", fill_value=0)`.
    """
    del inverse_NQ
    return x_ND.at[index_M].get(mode="fill", fill_value=0)


def _gather_forward(x_ND, index_M, inverse_NQ):
    return _gather(x_ND, index_M, inverse_NQ), (index_M, inverse_NQ)


def _gather_backward(indices, dy_MD):
    index_M, inverse_NQ = indices
    if _rows_are_fewer(inverse_NQ, len(dy_MD)):
        wide = jnp.promote_types(dy_MD.dtype, jnp.float32)
        dx_ND = _add_rows(dy_MD.astype(wide), index_M, len(inverse_NQ)).astype(dy_MD.dtype)
    else:
        dx_NQD = dy_MD.at[inverse_NQ].get(mode="fill", fill_value=0)
        dx_ND = dx_NQD[:, 0] if inverse_NQ.shape[1] == 1 else dx_NQD.sum(axis=1)
    no_gradient = (np.zeros(i.shape, jax.dtypes.float0) for i in (index_M, inverse_NQ))
    return dx_ND, *no_gradient


_gather.defvjp(_gather_forward, _gather_backward)
