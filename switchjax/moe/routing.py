"""Who goes where: experts, queue places, gates, and the router's losses.

Knows nothing of the model's width, of devices or of how tokens travel. Everything is float32, and
counts are int32, whatever the compute dtype of the model.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int


class Routing(NamedTuple):
    """What the tokens of each group asked for, and what they got. Q choices a token."""

    expert_GTQ: Array  # the chosen experts, best first; num_experts where the token is padding
    slot_GTQ: Array  # place in that expert's queue, 0-based, unbounded
    gate_GTQ: Array  # weight of the expert's output
    kept_GTQ: Array  # a real token whose place is below the capacity


class RouterSums(NamedTuple):
    """Sums over real tokens: add them over devices, then divide (never a mean of means)."""

    assigned_E: Array  # choices of each expert, before drops
    prob_E: Array  # router probabilities
    z: Array  # squares of logsumexp
    tokens: Array
    dropped: Array  # choices that found no slot


def capacity(group_size: int, num_experts: int, top_k: int, capacity_factor: float) -> int:
    """Slots of one expert in one group: min(T, max(1, ceil(factor · T · k / E))).

    The factor is taken as the decimal that the user wrote, so 1.1 · 10 gives 11 and not 12.

    Source: Switch Transformer, arXiv:2101.03961, eq. 3, rounded up and kept within 1 and T.
    """
    exact = Fraction(str(capacity_factor)) * group_size * top_k / num_experts
    return min(group_size, max(1, math.ceil(exact)))


def route(
    logits_GTE: Float[Array, "G T E"],
    real_GT: Bool[Array, "G T"],
    *,
    top_k: int,
    capacity: int,
) -> Routing:
    """Each token's experts and its places in their queues.

    The gate is the probability over all experts, taken before the choice, so that the router
    learns from the task; two gates are divided by their sum (GShard). Ties go to the lower expert.
    Queues are filled with all first choices in token order, then all second ones.

    Source: Switch Transformer, arXiv:2101.03961, section 2.1; GShard, arXiv:2006.16668, alg. 1.
    """
    num_experts = logits_GTE.shape[-1]
    # Chosen by logits, since small probabilities underflow to the same 0.
    top_GTQ, expert_GTQ = lax.top_k(logits_GTE, top_k)
    gate_GTQ = jnp.exp(top_GTQ - jax.nn.logsumexp(logits_GTE, axis=-1, keepdims=True))
    if top_k > 1:
        gate_GTQ /= gate_GTQ.sum(axis=-1, keepdims=True)
    expert_GTQ = jnp.where(real_GT[..., None], expert_GTQ, num_experts)
    slot_GTQ = queue_places(expert_GTQ, num_experts)
    kept_GTQ = real_GT[..., None] & (slot_GTQ < capacity)
    return Routing(expert_GTQ, slot_GTQ, gate_GTQ, kept_GTQ)


def queue_places(expert_GTQ: Int[Array, "G T Q"], num_experts: int) -> Int[Array, "G T Q"]:
    """How many earlier choices of the group asked for the same expert."""
    G, T, Q = expert_GTQ.shape
    expert_GP = expert_GTQ.swapaxes(1, 2).reshape(G, Q * T)  # P: choice-major places in the queue
    asked_GPE = jax.nn.one_hot(expert_GP, num_experts, dtype=jnp.int32)
    before_GPE = jnp.cumsum(asked_GPE, axis=1, dtype=jnp.int32) - asked_GPE
    slot_GP = jnp.sum(before_GPE * asked_GPE, axis=-1, dtype=jnp.int32)
    return slot_GP.reshape(G, Q, T).swapaxes(1, 2)


def router_sums(
    logits_GTE: Float[Array, "G T E"], real_GT: Bool[Array, "G T"], routing: Routing
) -> RouterSums:
    """This device's share of what the losses and metrics need."""
    num_experts = logits_GTE.shape[-1]
    real_GT1 = real_GT[..., None]
    asked_GTQE = jax.nn.one_hot(routing.expert_GTQ, num_experts, dtype=jnp.int32)
    probs_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    z_GT = jnp.square(jax.nn.logsumexp(logits_GTE, axis=-1))
    return RouterSums(
        assigned_E=asked_GTQE.sum(axis=(0, 1, 2), dtype=jnp.int32),
        prob_E=jnp.where(real_GT1, probs_GTE, 0).sum(axis=(0, 1)),
        z=jnp.where(real_GT, z_GT, 0).sum(),
        tokens=real_GT.sum(dtype=jnp.int32),
        dropped=(real_GT1 & ~routing.kept_GTQ).sum(dtype=jnp.int32),
    )


def balance_loss(sums: RouterSums) -> Float[Array, ""]:
    """E · Σ f·P: 1 when the experts are equally loaded, E when all tokens are on one.

    f is the share of choices (before drops), P the mean probability, both over all real tokens.

    Source: Switch Transformer, arXiv:2101.03961, eq. 4-6, without the coefficient.
    """
    num_experts = sums.prob_E.shape[0]
    share_E = sums.assigned_E / jnp.maximum(sums.assigned_E.sum(), 1)
    mean_prob_E = sums.prob_E / jnp.maximum(sums.tokens, 1)
    return num_experts * jnp.sum(share_E * mean_prob_E)


def z_loss(sums: RouterSums) -> Float[Array, ""]:
    """Mean square of logsumexp over real tokens; keeps the router's logits small.

    Source: ST-MoE, arXiv:2202.08906, eq. 5, without the coefficient.
    """
    return sums.z / jnp.maximum(sums.tokens, 1)
