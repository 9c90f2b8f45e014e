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

from switchjax.remat import ROUTING, named


class Routing(NamedTuple):
    """What the tokens of each group asked for, and what they got. Q choices a token."""

    expert_GTQ: Array  # the chosen experts, best first; num_experts where there is no choice
    slot_GTQ: Array  # place in that expert's queue, 0-based, unbounded
    gate_GTQ: Array  # weight of the expert's output
    kept_GTQ: Array  # a choice whose place is below the capacity


class RouterSums(NamedTuple):
    """Sums over real tokens: add them over devices, then divide (never a mean of means)."""

    assigned_E: Array  # choices of each expert, before drops
    prob_E: Array  # router probabilities
    z: Array  # squares of logsumexp
    tokens: Array
    dropped: Array  # choices that found no slot, and tokens that no expert chose


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
    bias_E: Float[Array, "E"] | None = None,
    second_GT: Float[Array, "G T"] | None = None,
) -> Routing:
    """Each token's experts and its places in their queues.

    The gate of one choice is its probability over all experts, taken before the choice, so that
    the router learns from the task; several gates are their probabilities over the sum of those.
    Ties go to the lower expert. Queues are filled with all first choices in token order, then all
    second ones, and so on.

    Args:
        bias_E: added to probabilities for the choice alone; no gate and no loss sees it.
        second_GT: uniform numbers in [0, 1) that decide whether the second of two choices is
            sent: with probability min(1, 2 · gate). One that is not sent is no choice at all, and
            the first one's gate stays as it is. None: all are sent.

    Source: Switch Transformer, arXiv:2101.03961, section 2.1; GShard, arXiv:2006.16668, alg. 1;
    loss-free balancing, arXiv:2408.15664, eq. 3.
    """
    num_experts = logits_GTE.shape[-1]
    if bias_E is None:
        score_GTE = logits_GTE  # small probabilities underflow to the same 0
    else:
        score_GTE = jax.nn.softmax(logits_GTE, axis=-1) + bias_E[None, None]
    _, expert_GTQ = lax.top_k(lax.stop_gradient(score_GTE), top_k)
    expert_GTQ = named(ROUTING, expert_GTQ)
    top_GTQ = jnp.take_along_axis(logits_GTE, expert_GTQ, axis=-1)
    if top_k == 1:
        gate_GTQ = jnp.exp(top_GTQ - jax.nn.logsumexp(logits_GTE, axis=-1, keepdims=True))
    else:  # shares of the chosen probabilities, which need not be known, and may underflow
        gate_GTQ = jax.nn.softmax(top_GTQ, axis=-1)
    asks_GTQ = real_GT[..., None]
    if second_GT is not None:
        sent_GT = named(ROUTING, second_GT < 2 * gate_GTQ[..., 1])
        asks_GTQ &= jnp.stack([jnp.ones_like(sent_GT), sent_GT], axis=-1)
    expert_GTQ = jnp.where(asks_GTQ, expert_GTQ, num_experts)
    slot_GTQ = named(ROUTING, queue_places(expert_GTQ, num_experts))
    kept_GTQ = asks_GTQ & (slot_GTQ < capacity)
    return Routing(expert_GTQ, slot_GTQ, gate_GTQ, kept_GTQ)


def queue_places(expert_GTQ: Int[Array, "G T Q"], num_experts: int) -> Int[Array, "G T Q"]:
    """How many earlier choices of the group asked for the same expert."""
    G, T, Q = expert_GTQ.shape
    expert_GP = expert_GTQ.swapaxes(1, 2).reshape(G, Q * T)  # P: choice-major places in the queue
    asked_GPE = jax.nn.one_hot(expert_GP, num_experts, dtype=jnp.int32)
    before_GPE = jnp.cumsum(asked_GPE, axis=1, dtype=jnp.int32) - asked_GPE
    slot_GP = jnp.sum(before_GPE * asked_GPE, axis=-1, dtype=jnp.int32)
    return slot_GP.reshape(G, Q, T).swapaxes(1, 2)


def expert_choice(
    logits_GTE: Float[Array, "G T E"], real_GT: Bool[Array, "G T"], *, capacity: int
) -> Routing:
    """Each expert takes the real tokens of a group that are likeliest to be its, one a slot.

    Q is the number of experts: place e of a token says whether expert e took it. The gate is the
    token's probability of the expert, over all experts; the slot its rank with that expert, ties
    to the earlier token. Experts that find fewer real tokens than slots leave slots empty, so all
    have the same load, and the balance loss is 1 without a gradient.

    An expert compares the tokens of a row, later ones too: not for causal models.

    Source: expert choice, arXiv:2202.09368, section 3.2.
    """
    G, T, E = logits_GTE.shape
    # By logarithms, since small probabilities underflow to the same 0.
    log_GTE = lax.stop_gradient(jax.nn.log_softmax(logits_GTE, axis=-1))
    log_GTE = jnp.where(real_GT[..., None], log_GTE, -jnp.inf)
    _, token_GEC = lax.top_k(log_GTE.swapaxes(1, 2), capacity)
    token_GEC = named(ROUTING, token_GEC)
    group_G11, expert_E1 = jnp.arange(G)[:, None, None], jnp.arange(E)[:, None]
    rank_GEC = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), token_GEC.shape)
    slot_GET = jnp.full((G, E, T), capacity, jnp.int32)
    slot_GET = slot_GET.at[group_G11, expert_E1[None], token_GEC].set(rank_GEC)
    slot_GTQ = slot_GET.swapaxes(1, 2)
    kept_GTQ = real_GT[..., None] & (slot_GTQ < capacity)
    expert_GTQ = jnp.where(kept_GTQ, jnp.arange(E, dtype=jnp.int32)[None, None], E)
    gate_GTQ = jnp.where(kept_GTQ, jax.nn.softmax(logits_GTE, axis=-1), 0)
    return Routing(expert_GTQ, slot_GTQ, gate_GTQ, kept_GTQ)


def without_padding(routing: Routing, real_GT: Bool[Array, "G T"], num_experts: int) -> Routing:
    """The same choices and places, but that padding made no choice: what is counted."""
    real_GT1 = real_GT[..., None]
    return routing._replace(
        expert_GTQ=jnp.where(real_GT1, routing.expert_GTQ, num_experts),
        kept_GTQ=routing.kept_GTQ & real_GT1,
    )


def router_sums(
    logits_GTE: Float[Array, "G T E"],
    real_GT: Bool[Array, "G T"],
    routing: Routing,
    *,
    experts_chose: bool = False,
) -> RouterSums:
    """This device's share of what the losses and metrics need.

    Args:
        experts_chose: the routing is one of `expert_choice`: what an expert did not take it was
            not asked for, and a token is dropped if no expert took it.
    """
    num_experts = logits_GTE.shape[-1]
    real_GT1 = real_GT[..., None]
    if experts_chose:
        assigned_E = routing.kept_GTQ.sum(axis=(0, 1), dtype=jnp.int32)
        dropped = real_GT & ~routing.kept_GTQ.any(axis=-1)
    else:
        asked_GTQE = jax.nn.one_hot(routing.expert_GTQ, num_experts, dtype=jnp.int32)
        assigned_E = asked_GTQE.sum(axis=(0, 1, 2), dtype=jnp.int32)
        dropped = (routing.expert_GTQ < num_experts) & ~routing.kept_GTQ
    probs_GTE = jax.nn.softmax(logits_GTE, axis=-1)
    z_GT = jnp.square(jax.nn.logsumexp(logits_GTE, axis=-1))
    return RouterSums(
        assigned_E=assigned_E,
        prob_E=jnp.where(real_GT1, probs_GTE, 0).sum(axis=(0, 1)),
        z=jnp.where(real_GT, z_GT, 0).sum(),
        tokens=real_GT.sum(dtype=jnp.int32),
        dropped=dropped.sum(dtype=jnp.int32),
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


def moved_bias(
    bias_XE: Float[Array, "X E"], load_XE: Int[Array, "X E"], rate: float
) -> Float[Array, "X E"]:
    """Each layer's bias after a step: up by `rate` where the load is below the mean, else down.

    Args:
        load_XE: choices of each expert before drops, of the whole step. Equal loads move nothing.

    Source: loss-free balancing, arXiv:2408.15664, alg. 1.
    """
    mean_X1 = load_XE.sum(axis=1, keepdims=True) / load_XE.shape[1]
    return bias_XE + rate * jnp.sign(mean_X1 - load_XE)
