"""Tokens travel to their experts and back by two all-to-alls over the expert axis.

Every device sends each expert the same number of slots, used or not, so shapes are static and the
capacity decides what drops. Inside `shard_map`.
"""

from jax import Array, lax

from switchjax.axes import EXPERT
from switchjax.moe.dispatch.slots import Slots, assign_slots, fill_slots, read_slots
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


def combine(y_eRD: Array, slots: Slots) -> Array:
    """The experts' outputs for every choice of my tokens [T, Q, D], zeros where it was dropped."""
    y_ERD = lax.all_to_all(y_eRD, EXPERT, split_axis=1, concat_axis=0, tiled=True)
    return read_slots(y_ERD.reshape(-1, y_ERD.shape[-1]), slots)
