"""Nothing drops: each device sends each expert exactly the tokens that chose it.

Tokens are sorted by expert, and each expert's run travels as it is to its device, where it lands
beside the runs of other devices, so that rows arrive sorted too. A device has room for a bounded
number of rows. If any device of the expert group needs more, the group takes a slower way that
needs no such room: all tokens are gathered, and a device computes its experts for one peer's
tokens after another. The numbers are the same.

XLA:CPU has no ragged exchange: there the rows are gathered whole and picked out by the same
offsets.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from switchjax.axes import EXPERT
from switchjax.moe.dispatch.interface import Experts, Plan, Tokens, bounded, gates, never
from switchjax.moe.dispatch.placement import fair_share
from switchjax.moe.dispatch.slots import Slots, fill_slots, slots_of, weighted_sum
from switchjax.moe.dispatch.wire import gather, move, scatter_sum
from switchjax.moe.grouped import block_rows, padded_rows, run_starts
from switchjax.moe.routing import Routing

ROOM = 2.0
"""Rows that a device has room for, over its fair share, unless the mesh file has a `buffer`."""


class Choices(NamedTuple):
    """Each choice's lane, its place among this device's choices of that lane, and its gate."""

    lane_TQ: Array  # the number of lanes where there is none
    place_TQ: Array
    gate_TQ: Array


class Offsets(NamedTuple):
    """Of the runs that a device sends, and those that it gets: int32, run by run.

    Runs are sent in the order of lanes, so device after device, and are received as they were
    sent: device after device, and of each in the order of its lanes here.
    """

    from_n: Array  # first row of each run in what is sent
    sizes_n: Array
    to_n: Array  # first row of each run where it arrives
    received_n: Array  # sizes of the runs that arrive


def dispatch(tokens: Tokens, routing: Routing, experts: Experts, plan: Plan) -> tuple[Array, Array]:
    """See `interface.Dispatcher`."""
    with jax.named_scope("dispatch"):
        choices, counts_n = _choices(routing, plan.lanes)
    if lax.axis_size(EXPERT) == 1:
        return _outputs(experts, plan.lanes, tokens, choices, counts_n), never()

    devices, (T, Q) = lax.axis_size(EXPERT), choices.lane_TQ.shape
    here = plan.lanes // devices
    most = devices * T * min(Q, here)
    fair = fair_share(T * Q, plan.exchange.experts)
    room = min(most, math.ceil(fair * (plan.exchange.buffer or ROOM)))
    block = block_rows(fair, here)
    with jax.named_scope("dispatch"):
        counts_Pn = gather(counts_n, "compute")
    send = partial(_send_runs, plan, padded_rows(room, here, block), block)
    if room == most:
        return send(experts, tokens, choices, counts_Pn), never()
    with jax.named_scope("dispatch"):
        sizes_Pe = counts_Pn.sum(axis=0).reshape(devices, here)
        overflows = (sizes_Pe.sum(axis=1) > room).any()
    send_all = partial(_send_all, plan)
    return bounded(overflows, send_all, send, experts, tokens, choices, counts_Pn)


def _choices(routing: Routing, lanes: int) -> tuple[Choices, Array]:
    """The choices of all groups of this device, and how many each lane has [lanes]."""
    G, T, Q = routing.expert_GTQ.shape
    group_GTQ = jnp.broadcast_to(jnp.arange(G)[:, None, None], (G, T, Q))
    counts_Gn = jnp.zeros((G, lanes), jnp.int32)
    counts_Gn = counts_Gn.at[group_GTQ, routing.expert_GTQ].add(1, mode="drop")
    before_Gn = jnp.cumsum(counts_Gn, axis=0, dtype=jnp.int32) - counts_Gn
    before_GTQ = before_Gn.at[group_GTQ, routing.expert_GTQ].get(mode="fill", fill_value=0)
    lane_TQ, place_TQ = (
        x.reshape(G * T, Q) for x in (routing.expert_GTQ, before_GTQ + routing.slot_GTQ)
    )
    return Choices(lane_TQ, place_TQ, gates(routing)), counts_Gn.sum(axis=0, dtype=jnp.int32)


def _rows(choices: Choices, start_n: Array, num_rows: int) -> Slots:
    """Rows of the choices where their lanes' runs start at these."""
    start_TQ = start_n.at[choices.lane_TQ].get(mode="fill", fill_value=num_rows)
    return slots_of(jnp.minimum(start_TQ + choices.place_TQ, num_rows), num_rows)


def _outputs(
    experts: Experts, here: int, tokens: Tokens, choices: Choices, sizes_e: Array
) -> Array:
    """My experts' outputs for these tokens, weighted and added [T, D]; lanes are my experts."""
    block = block_rows(choices.lane_TQ.size, here)
    with jax.named_scope("dispatch"):
        rows = padded_rows(choices.lane_TQ.size, here, block)
        slots = _rows(choices, run_starts(sizes_e, block), rows)
        sorted_tokens = jax.tree.map(lambda x: fill_slots(x, slots), tokens)
    with jax.named_scope("experts"):
        y_ND = experts.on_runs(sorted_tokens, sizes_e, block)
    with jax.named_scope("combine"):
        return weighted_sum(y_ND, slots, choices.gate_TQ)


def _send_runs(
    plan: Plan,
    num_rows: int,
    block: int,
    experts: Experts,
    tokens: Tokens,
    choices: Choices,
    counts_Pn: Array,
) -> Array:
    wire, me = plan.exchange.wire, lax.axis_index(EXPERT)
    devices, lanes = counts_Pn.shape
    with jax.named_scope("dispatch"):
        sizes_Pe = counts_Pn.sum(axis=0, dtype=jnp.int32).reshape(devices, -1)
        start_n = jax.vmap(partial(run_starts, block=block))(sizes_Pe).reshape(lanes)
        to_Pn = start_n[None] + jnp.cumsum(counts_Pn, axis=0, dtype=jnp.int32) - counts_Pn
        from_Pn = jnp.cumsum(counts_Pn, axis=1, dtype=jnp.int32) - counts_Pn

        def of_mine(x_Pn: Array) -> Array:
            """Of the runs that come here [P · e]."""
            x_PPe = x_Pn.reshape(devices, devices, -1)
            return lax.dynamic_index_in_dim(x_PPe, me, axis=1, keepdims=False).reshape(-1)

        sent, received = counts_Pn[me], of_mine(counts_Pn)
        there = Offsets(from_Pn[me], sent, to_Pn[me], received)
        back = Offsets(of_mine(to_Pn), received, of_mine(from_Pn), sent)
        slots = _rows(choices, from_Pn[me], choices.lane_TQ.size)
        out, home = _Way(0, num_rows), _Way(1, choices.lane_TQ.size)

        def send(x: Array) -> Array:
            return move(out, home, fill_slots(x, slots), (there, back), wire)

        arrived = jax.tree.map(send, tokens)
    with jax.named_scope("experts"):
        y_ND = experts.on_runs(arrived, sizes_Pe[me], block)
    with jax.named_scope("combine"):
        y_ND = move(home, out, y_ND, (there, back), wire)
        return weighted_sum(y_ND, slots, choices.gate_TQ)


def _send_all(
    plan: Plan, experts: Experts, tokens: Tokens, choices: Choices, counts_Pn: Array
) -> Array:
    wire = plan.exchange.wire
    here = plan.lanes // lax.axis_size(EXPERT)
    first = lax.axis_index(EXPERT) * here
    with jax.named_scope("dispatch"):
        tokens_P = jax.tree.map(lambda x: gather(x, wire), tokens)
        choices_P = jax.tree.map(lambda x: gather(x, "compute"), choices)
        lane_PTQ = choices_P.lane_TQ - first
        lane_PTQ = jnp.where((lane_PTQ >= 0) & (lane_PTQ < here), lane_PTQ, here)
        choices_P = choices_P._replace(lane_TQ=lane_PTQ)
        counts_Pe = lax.dynamic_slice_in_dim(counts_Pn, first, here, axis=1)

    @jax.checkpoint
    def of_peer(_: None, peer: tuple) -> tuple[None, Array]:
        return None, _outputs(experts, here, *peer)

    _, y_PTD = lax.scan(of_peer, None, (tokens_P, choices_P, counts_Pe))
    with jax.named_scope("combine"):
        return scatter_sum(y_PTD, wire)


class _Way(NamedTuple):
    """For `wire.move`: the exchange by the first or the second of two offsets."""

    which: int
    num_rows: int  # that arrive

    def __call__(self, x_ND: Array, how: tuple[Offsets, Offsets]) -> Array:
        return _exchange(x_ND, how[self.which], self.num_rows)


def _exchange(x_ND: Array, offsets: Offsets, num_rows: int) -> Array:
    """The rows that arrive [num_rows, D], zeros beside them."""
    output_ND = jnp.zeros_like(x_ND, shape=(num_rows, x_ND.shape[1]))
    return lax.platform_dependent(
        x_ND,
        output_ND,
        offsets,
        cpu=_picked,
        default=lambda x_ND, output_ND, offsets: lax.ragged_all_to_all(
            x_ND,
            output_ND,
            offsets.from_n,
            offsets.sizes_n,
            offsets.to_n,
            offsets.received_n,
            axis_name=EXPERT,
        ),
    )


def _picked(x_ND: Array, output_ND: Array, offsets: Offsets) -> Array:
    """`lax.ragged_all_to_all`, by gathering everything and picking what should have come."""
    devices, me = lax.axis_size(EXPERT), lax.axis_index(EXPERT)
    x_PND = lax.all_gather(x_ND, EXPERT)

    def of_mine(x_n: Array) -> Array:
        x_PPe = lax.all_gather(x_n, EXPERT).reshape(devices, devices, -1)
        return lax.dynamic_index_in_dim(x_PPe, me, axis=1, keepdims=False).reshape(-1)

    from_n, to_n = of_mine(offsets.from_n), of_mine(offsets.to_n)
    source_n = jnp.repeat(jnp.arange(devices), from_n.size // devices) * x_ND.shape[0]
    place_Nn = jnp.arange(output_ND.shape[0])[:, None] - to_n[None]
    is_in_Nn = (place_Nn >= 0) & (place_Nn < offsets.received_n[None])
    index_N = jnp.where(is_in_Nn, (source_n + from_n)[None] + place_Nn, -1).max(axis=1)
    index_N = jnp.where(index_N < 0, x_PND.shape[0] * x_PND.shape[1], index_N)
    return x_PND.reshape(-1, x_ND.shape[1]).at[index_N].get(mode="fill", fill_value=0)
