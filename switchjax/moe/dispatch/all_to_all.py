"""Tokens travel to their experts and back by two all-to-alls over the expert axis.

Every device sends each expert the same number of slots, used or not, so shapes are static and the
capacity decides what drops.
"""

import jax
from jax import Array

from switchjax.axes import EXPERT
from switchjax.moe.dispatch.interface import Experts, Plan, Tokens, gates, never
from switchjax.moe.dispatch.slots import assign_slots, fill_slots, weighted_sum
from switchjax.moe.dispatch.wire import swap
from switchjax.moe.routing import Routing


def dispatch(tokens: Tokens, routing: Routing, experts: Experts, plan: Plan) -> tuple[Array, Array]:
    """See `interface.Dispatcher`."""
    devices, wire = jax.lax.axis_size(EXPERT), plan.exchange.wire

    def there(x: Array) -> Array:
        """Slots of all experts [E · S, D] to those of mine from all devices [e, P · S, D]."""
        x_PeSD = swap(x.reshape(devices, plan.lanes // devices, -1, x.shape[-1]), wire)
        return x_PeSD.swapaxes(0, 1).reshape(plan.lanes // devices, -1, x.shape[-1])

    def back(y_eRD: Array) -> Array:
        e, _, D = y_eRD.shape
        return swap(y_eRD.reshape(e, devices, -1, D).swapaxes(0, 1), wire).reshape(-1, D)

    with jax.named_scope("dispatch"):
        slots = assign_slots(routing, plan.lanes, plan.capacity)
        arrived = jax.tree.map(lambda x: there(fill_slots(x, slots)), tokens)
    with jax.named_scope("experts"):
        y_eRD = experts.on_slots(arrived)
    with jax.named_scope("combine"):
        return weighted_sum(back(y_eRD), slots, gates(routing)), never()
