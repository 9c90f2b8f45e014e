"""Every device of the expert axis sees its peers' tokens and computes its own experts for them.

First each token's buffer rows and gates are gathered, eight bytes a choice; from them a device
knows where all tokens go. Then come the tokens. Without a bounded buffer all tokens are gathered,
and the outputs of each device, already weighted, are added where their tokens live: the bytes do
not depend on the number of choices. With one, a device sends each peer only the tokens that it
needs, once each, and has outputs back for those; if any peer needs more than the buffer holds, the
whole expert group takes the first way. Capacity and drops are those of `all_to_all`.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from switchjax.axes import EXPERT
from switchjax.moe.dispatch import local
from switchjax.moe.dispatch.interface import Experts, Plan, Tokens, bounded, gates, never
from switchjax.moe.dispatch.placement import fair_share
from switchjax.moe.dispatch.slots import (
    assign_slots,
    fill_slots,
    slots_of,
    weighted_sum,
)
from switchjax.moe.dispatch.wire import gather, scatter_sum, swap
from switchjax.moe.routing import Routing, queue_places


class Decisions(NamedTuple):
    """Where tokens go: rows of a device's slots for all lanes [lanes · S], and gates."""

    row_PTQ: Array  # lanes · S where a choice has no slot
    gate_PTQ: Array


def dispatch(tokens: Tokens, routing: Routing, experts: Experts, plan: Plan) -> tuple[Array, Array]:
    """See `interface.Dispatcher`."""
    with jax.named_scope("dispatch"):
        row_TQ = assign_slots(routing, plan.lanes, plan.capacity).row_TQ
        decisions = Decisions(gather(row_TQ, "compute"), gather(gates(routing), "compute"))
        num_slots = routing.expert_GTQ.shape[0] * plan.capacity
    send_all = partial(_send_all, plan, num_slots)
    if plan.exchange.buffer is None:
        return send_all(experts, tokens, decisions), never()

    T, Q = row_TQ.shape
    fair = fair_share(T * Q, plan.exchange.experts) / lax.axis_size(EXPERT)
    room = min(T, math.ceil(plan.exchange.buffer * fair))
    with jax.named_scope("dispatch"):
        peers = _peers(decisions.row_PTQ, plan.lanes * num_slots)
        overflows = (peers.place_PTQ >= room).any()
    send_needed = partial(_send_needed, plan, num_slots, room, peers)
    if room == T:
        return send_needed(experts, tokens, decisions), never()
    return bounded(overflows, send_all, send_needed, experts, tokens, decisions)


def _send_all(
    plan: Plan, num_slots: int, experts: Experts, tokens: Tokens, decisions: Decisions
) -> Array:
    wire = plan.exchange.wire
    with jax.named_scope("dispatch"):
        everyone = jax.tree.map(lambda x: _flat(gather(x, wire)), tokens)
    y_ND = _outputs(experts, plan, num_slots, everyone, _mine(decisions, plan, num_slots))
    with jax.named_scope("combine"):
        return scatter_sum(y_ND.reshape(*decisions.row_PTQ.shape[:2], -1), wire)


class Peers(NamedTuple):
    """The device that each choice goes to, and its token's place in what is sent there."""

    device_PTQ: Array  # none (P) where the token goes there for an earlier choice, or nowhere
    place_PTQ: Array  # -1 there


def _peers(row_PTQ: Array, num_rows: int) -> Peers:
    devices = lax.axis_size(EXPERT)
    device_PTQ = row_PTQ // (num_rows // devices)
    again = jnp.tril(device_PTQ[..., :, None] == device_PTQ[..., None, :], k=-1).any(axis=-1)
    device_PTQ = jnp.where(again, devices, device_PTQ)
    place_PTQ = queue_places(device_PTQ, devices)
    return Peers(device_PTQ, jnp.where(device_PTQ < devices, place_PTQ, -1))


def _send_needed(
    plan: Plan,
    num_slots: int,
    room: int,
    peers: Peers,
    experts: Experts,
    tokens: Tokens,
    decisions: Decisions,
) -> Array:
    wire, me = plan.exchange.wire, lax.axis_index(EXPERT)
    devices, T, Q = decisions.row_PTQ.shape
    num_rows = devices * room
    with jax.named_scope("dispatch"):
        row_TQ = jnp.where(
            peers.device_PTQ[me] < devices,
            peers.device_PTQ[me] * room + peers.place_PTQ[me],
            num_rows,
        )
        sent = slots_of(row_TQ, num_rows)

        def there(x: Array) -> Array:
            return _flat(swap(fill_slots(x, sent).reshape(devices, room, x.shape[-1]), wire))

        arrived = jax.tree.map(there, tokens)
        # The tokens of row r here: the same reckoning, from the other side.
        source_P11 = jnp.arange(devices)[:, None, None]
        row_PTQ = jnp.where(peers.device_PTQ == me, source_P11 * room + peers.place_PTQ, num_rows)
        token_N = slots_of(_flat(row_PTQ), num_rows).choice_R // Q
        mine = _mine(decisions, plan, num_slots)
        mine = Decisions(
            mine.row_PTQ.at[token_N].get(mode="fill", fill_value=plan.lanes * num_slots),
            mine.gate_PTQ.at[token_N].get(mode="fill", fill_value=0),
        )
    y_ND = _outputs(experts, plan, num_slots, arrived, mine)
    with jax.named_scope("combine"):
        y_ND = _flat(swap(y_ND.reshape(devices, room, -1), wire))
        return weighted_sum(y_ND, sent, jnp.ones((T, Q), jnp.float32))


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _mine(decisions: Decisions, plan: Plan, num_slots: int) -> Decisions:
    """Rows in my experts' slots [e · P · S] for the tokens of all devices [P · T, Q]."""
    devices, _, Q = decisions.row_PTQ.shape
    here = plan.lanes // devices
    source_P11 = jnp.arange(devices, dtype=jnp.int32)[:, None, None]
    lane_PTQ = decisions.row_PTQ // num_slots - lax.axis_index(EXPERT) * here
    row_PTQ = (lane_PTQ * devices + source_P11) * num_slots + decisions.row_PTQ % num_slots
    is_mine = (lane_PTQ >= 0) & (lane_PTQ < here)
    row_PTQ = jnp.where(is_mine, row_PTQ, here * devices * num_slots)
    return Decisions(_flat(row_PTQ), _flat(decisions.gate_PTQ))


def _outputs(
    experts: Experts, plan: Plan, num_slots: int, tokens: Tokens, decisions: Decisions
) -> Array:
    """My experts' outputs for these tokens, weighted and added [N, D]."""
    with jax.named_scope("dispatch"):
        slots = slots_of(decisions.row_PTQ, plan.lanes * num_slots)
    here = plan.lanes // lax.axis_size(EXPERT)
    return local.outputs(tokens, slots, decisions.gate_PTQ, experts, here)
