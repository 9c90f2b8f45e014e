"""Which experts this device serves, and the numbers under which it sends to them.

Experts have three numbers. The *logical* one is what the router and checkpoints speak of. A
placement, data and not code, gives each a *physical* place in the weights of the whole mesh. And
each device numbers the experts that it sends to: its *lanes*, those of the first device of the
expert axis first. With separate experts the lanes are all experts, whose hidden dim is split over
the model axis. With folded ones each device of the model axis has the lanes of its own column of
the mesh. Either way the sum over the model axis completes the outputs. Inside `shard_map`.
"""

import jax.numpy as jnp
from jax import Array, lax

from switchjax.axes import EXPERT, MODEL
from switchjax.config import Experts
from switchjax.moe.routing import Routing


def to_lanes(routing: Routing, placement_E: Array, experts: Experts) -> Routing:
    """The choices with lanes for experts, and of other columns none.

    Args:
        placement_E: the physical place of each logical expert.
    """
    lane_E, lanes = placement_E, placement_E.size
    if experts == "folded":
        columns = _columns(experts)
        lanes //= columns
        here = lanes // lax.axis_size(EXPERT)
        row_E, column_E = placement_E // here // columns, placement_E // here % columns
        lane_E = jnp.where(
            column_E == lax.axis_index(MODEL), row_E * here + placement_E % here, lanes
        )
    lane_GTQ = lane_E.at[routing.expert_GTQ].get(mode="fill", fill_value=lanes)
    kept_GTQ = routing.kept_GTQ & (lane_GTQ < lanes)
    return routing._replace(expert_GTQ=lane_GTQ, kept_GTQ=kept_GTQ)


def _columns(experts: Experts) -> int:
    """Columns of the mesh that have experts of their own."""
    return lax.axis_size(MODEL) if experts == "folded" else 1


def num_lanes(num_experts: int, experts: Experts) -> int:
    """Lanes of a device."""
    return num_experts // _columns(experts)


def fair_share(num_choices: int, experts: Experts) -> float:
    """Of these choices of a device, those that are its lanes', if experts are chosen alike."""
    return num_choices / _columns(experts)


def experts_here(placement_E: Array, experts: Experts) -> Array:
    """The logical experts whose weights this device holds, in their order."""
    return _here(jnp.argsort(placement_E), experts)


def at_device(order_E: Array, experts: Experts) -> Array:
    """Where each of this device's experts is among those that the state holds here, in order.

    Args:
        order_E: the logical expert at each physical place, on the device of its logical place;
            the last dim of what may be many.
    """
    here_e = _here(order_E, experts)
    return here_e - part(experts) * here_e.shape[-1]


def part(experts: Experts) -> Array:
    """Which part of the experts this device holds."""
    device = lax.axis_index(EXPERT)
    return device * _columns(experts) + lax.axis_index(MODEL) if experts == "folded" else device


def _here(order_E: Array, experts: Experts) -> Array:
    here = num_lanes(order_E.shape[-1], experts) // lax.axis_size(EXPERT)
    return lax.dynamic_slice_in_dim(order_E, part(experts) * here, here, axis=-1)
