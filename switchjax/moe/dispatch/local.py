"""The expert axis has one device: tokens are put in the slots of their experts where they are."""

import jax
from jax import Array

from switchjax.moe.dispatch.interface import Experts, Plan, Tokens, gates, never
from switchjax.moe.dispatch.slots import Slots, assign_slots, fill_slots, weighted_sum
from switchjax.moe.routing import Routing


def dispatch(tokens: Tokens, routing: Routing, experts: Experts, plan: Plan) -> tuple[Array, Array]:
    """See `interface.Dispatcher`."""
    with jax.named_scope("dispatch"):
        slots = assign_slots(routing, plan.lanes, plan.capacity)
    return outputs(tokens, slots, gates(routing), experts, plan.lanes), never()


def outputs(
    tokens: Tokens, slots: Slots, gate_TQ: Array, experts: Experts, num_experts: int
) -> Array:
    """What my experts make of tokens that are here, weighted and added [T, D]."""
    with jax.named_scope("dispatch"):

        def there(x: Array) -> Array:
            return fill_slots(x, slots).reshape(num_experts, -1, x.shape[-1])

        arrived = jax.tree.map(there, tokens)
    with jax.named_scope("experts"):
        y_eRD = experts.on_slots(arrived)
    with jax.named_scope("combine"):
        return weighted_sum(y_eRD.reshape(-1, y_eRD.shape[-1]), slots, gate_TQ)
