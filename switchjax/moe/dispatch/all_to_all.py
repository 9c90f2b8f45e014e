"""Tokens travel to their experts and back by two all-to-alls over the expert axis.

Every device sends each expert the same number of slots, used or not, so shapes are static and the
capacity decides what drops. Inside `shard_map`.
"""

from jax import Array, lax

from switchjax.axes import EXPERT
from switchjax.moe.dispatch.slots import Slots, assign_slots, fill_slots, weighted_sum
from switchjax.moe.routing import Routing


def plan(routing: Routing, num_experts: int, capacity: int) -> Slots:
    """What `dispatch` and `combine` must agree on."""
    return assign_slots(routing, num_experts, capacity)


def dispatch(x_TD: Array, slots: Slots, num_experts: int) -> Array:
    """The tokens of my experts [e, R, D], from all devices of the expert group.

    R = devices of the expert group · groups of a device · capacity.
    """
    x_ERD = fill_slots(x_TD, slots).reshape(num_experts, -1, x_TD.shape[-1])
    return lax.all_to_all(x_ERD, EXPERT, split_axis=0, concat_axis=1, tiled=True)


def combine(y_eRD: Array, slots: Slots, gate_TQ: Array) -> Array:
    """The experts' outputs for my tokens [T, D], summed by gate over choices that were kept."""
    y_ERD = lax.all_to_all(y_eRD, EXPERT, split_axis=1, concat_axis=0, tiled=True)
    return weighted_sum(y_ERD.reshape(-1, y_ERD.shape[-1]), slots, gate_TQ)
