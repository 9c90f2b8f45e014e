"""What the exchange of a Switch layer sends, by formula, and what it cannot do without.

Bytes are those that one device sends over the expert axis for one layer in one step: to the experts
and back, and the gradients of both. `collectives` reads the same off a compiled step.
"""

import math

import jax.numpy as jnp

from switchjax.config import ModelConfig
from switchjax.mesh import MeshShape
from switchjax.moe.routing import capacity

_WAYS = 4  # there and back, forward and backward
_SCALE = 4  # bytes beside a row of 8-bit floats


def row_bytes(model: ModelConfig, shape: MeshShape) -> int:
    """Of one token on the wire, its scale included."""
    match shape.exchange.wire:
        case "compute":
            return model.d_model * jnp.dtype(model.dtype).itemsize
        case "bfloat16":
            return model.d_model * 2
        case "float8":
            return model.d_model + _SCALE


def _columns(shape: MeshShape) -> int:
    """Columns of the mesh that have experts of their own."""
    return shape.model if shape.exchange.experts == "folded" else 1


def least_bytes(model: ModelConfig, shape: MeshShape, *, tokens: int) -> float:
    """Bytes of the tokens that must move: balanced experts, nothing dropped, no empty slot.

    With folded experts a device sends only to those of its own column, since the other devices of
    its model group hold the same tokens.

    Args:
        tokens: of one device, in one step.
    """
    choices = tokens * model.top_k / _columns(shape)
    return _WAYS * choices * row_bytes(model, shape) * (shape.expert - 1) / shape.expert


def exchange_bytes(model: ModelConfig, shape: MeshShape, *, tokens: int, group_size: int) -> float:
    """Bytes that the dispatcher sends, without its slower way and without sums of gradients.

    For `ragged` those of balanced experts: what it sends follows the routing. Decisions are counted
    too: rows and gates of choices for `all_gather`, sizes of runs for `ragged`.

    Args:
        tokens: of one device, in one step.
    """
    exchange, peers, k = shape.exchange, shape.expert, model.top_k
    if peers == 1:
        return 0.0
    columns = _columns(shape)
    row, away = row_bytes(model, shape), (peers - 1) / peers
    decisions = 3 * 4 * tokens * k * (peers - 1)  # rows, gates and the gates' gradients
    match exchange.dispatcher:
        case "all_to_all":
            slots = model.expert_capacity
            if slots is None:
                slots = capacity(group_size, model.num_experts, k, model.capacity_factor)
            slots = min(slots, group_size)
            return (
                _WAYS * (model.num_experts // columns) * (tokens // group_size) * slots * row * away
            )
        case "all_gather":
            if exchange.buffer is None:
                return _WAYS * tokens * row * (peers - 1) + decisions
            together = tokens // exchange.chunks
            room = min(together, math.ceil(exchange.buffer * together * k / columns / peers))
            return _WAYS * exchange.chunks * peers * room * row * away + decisions
        case "ragged":
            sizes = 4 * exchange.chunks * (model.num_experts // columns) * (peers - 1)
            return least_bytes(model, shape, tokens=tokens) + sizes
        case "local":
            return 0.0
