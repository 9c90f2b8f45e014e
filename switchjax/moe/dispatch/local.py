"""The expert axis has one device: tokens are put in the slots of their experts where they are."""

import jax
from jax import Array

from switchjax.moe.dispatch.interface import Experts, Plan, Tokens, gates, never
from switchjax.moe.dispatch.slots import assign_slots, fill_slots, weighted_sum
from switchjax.moe.routing import Routing


def dispatch(tokens: Tokens, routing: Routing, experts: Experts, plan: Plan) -> tuple[Array, Array]:
    """See `interface.Dispatcher`."""
    with jax.named_scope("dispatch"):
        slots = assign_slots(routing, plan.lanes, plan.capacity)

        def there(x: Array) -> Array:
            return fill_slots(x, slots).reshape(plan.lanes, -1, x.shape[-1])

        arrived = jax.tree.map(there, tokens)
    with jax.named_scope("experts"):
        y_eRD = experts.on_slots(arrived)
    with jax.named_scope("combine"):
        y_RD = y_eRD.reshape(-1, y_eRD.shape[-1])
        return weighted_sum(y_RD, slots, gates(routing)), never()
