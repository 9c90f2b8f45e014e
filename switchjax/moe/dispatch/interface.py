"""What a dispatcher is given and what it gives back. All inside `shard_map`."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from switchjax.mesh import Exchange
from switchjax.moe.routing import Routing
from switchjax.remat import recomputed


class Tokens(NamedTuple):
    """What travels to the experts: for each row a token's values and, if needed, its name."""

    x: Array  # [..., D]
    place: Array | None  # row in the whole batch and position in the row, int32 [..., 2]


class Experts(Protocol):
    """The experts of this device."""

    def on_slots(self, tokens: Tokens) -> Float[Array, "e R D"]:
        """Outputs for R slots of each expert [e, R, D]; whatever for empty slots."""
        ...

    def on_runs(self, tokens: Tokens, sizes_e: Int[Array, "e"], block: int) -> Float[Array, "N D"]:
        """Outputs for rows [N, D] sorted by expert, as `moe.grouped` has them."""
        ...


class Plan(NamedTuple):
    """What is fixed before a program is compiled."""

    lanes: int  # experts that a device sends to
    capacity: int  # slots of an expert in a group, where there are slots
    exchange: Exchange


class Dispatcher(Protocol):
    """Brings each token to the experts that it chose, and their outputs back to it."""

    def __call__(
        self, tokens: Tokens, routing: Routing, experts: Experts, plan: Plan
    ) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
        """Outputs of the kept choices, weighted by their gates and added, 0 for other tokens.

        Args:
            tokens: of this device, group after group [T, ...].
            routing: with lanes in the place of experts.

        Returns:
            [T, D] in the dtype of the tokens, to be added over the model axis; and whether this
            device took the slower way, 0 or 1.
        """
        ...


def never() -> Array:
    """Of a dispatcher that has no slower way."""
    return jnp.int32(0)


def gates(routing: Routing) -> Float[Array, "T Q"]:
    """Of the tokens of all groups on this device."""
    return routing.gate_GTQ.reshape(-1, routing.gate_GTQ.shape[-1])


def bounded(
    overflows: Array, slower: Callable[..., Array], faster: Callable[..., Array], *operands: Any
) -> tuple[Array, Array]:
    """What a dispatcher returns that takes the slower way where its buffer would not do.

    Args:
        overflows: the same on all devices that exchange with each other.
        operands: all that the ways compute with, experts included.
    """
    # Recomputed in the backward pass: nothing is kept for a way that is seldom taken, whatever
    # policy of `remat` is around it.
    slower = recomputed(jax.named_call(slower, name="fallback"))
    return lax.cond(overflows, slower, faster, *operands), overflows.astype(jnp.int32)
