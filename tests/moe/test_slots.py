"""Tokens reach their slots and come back unchanged, on one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from switchjax.moe.dispatch.slots import assign_slots, fill_slots, read_slots, weighted_sum
from switchjax.moe.routing import route

WIDTH = 3

# Few shapes, since each is compiled once; what hypothesis varies within them is unlimited.
SIZES = [  # groups, tokens of a group, experts, choices, capacity
    (1, 1, 1, 1, 1),
    (1, 6, 3, 1, 2),
    (3, 5, 4, 1, 1),
    (2, 8, 2, 2, 8),
    (3, 5, 4, 2, 2),
    (2, 4, 16, 2, 1),
]


@st.composite
def wishes(draw):
    """Sizes, logits and masks: from wild ones to those with many ties."""
    G, T, E, Q, C = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits_GTE = rng.integers(0, draw(st.sampled_from([1, 2, 5, 100])), (G, T, E))
    real_GT = rng.random((G, T)) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    x_TD = rng.standard_normal((G * T, WIDTH)).astype(np.float32)
    dy = rng.standard_normal((E * G * C, WIDTH)).astype(np.float32)
    return (G, T, E, Q, C), logits_GTE.astype(np.float32), real_GT, x_TD, dy


@partial(jax.jit, static_argnames=("top_k", "capacity"))
def there_and_back(logits_GTE, real_GT, x_TD, dy_RD, *, top_k, capacity):
    """Routing, slots, the buffer, what is read from it and its sums; gradients of all ways."""
    num_experts = logits_GTE.shape[-1]
    routing = route(logits_GTE, real_GT, top_k=top_k, capacity=capacity)
    slots = assign_slots(routing, num_experts, capacity)
    x_RD, fill_vjp = jax.vjp(lambda x: fill_slots(x, slots), x_TD)
    y_TQD, read_vjp = jax.vjp(lambda y: read_slots(y, slots), x_RD)
    plain_fill_vjp = jax.vjp(lambda x: plain_gather(x, slots.choice_R // top_k), x_TD)[1]
    plain_read_vjp = jax.vjp(lambda y: plain_gather(y, slots.row_TQ), x_RD)[1]
    gate_TQ = 1 + jnp.arange(x_TD.shape[0] * top_k).reshape(-1, top_k) / 8
    sums, sum_vjp = jax.vjp(lambda y, gate: weighted_sum(y, slots, gate), dy_RD, gate_TQ)
    plain_sums, plain_sum_vjp = jax.vjp(
        lambda y, gate: (plain_gather(y, slots.row_TQ) * gate[..., None]).sum(axis=1),
        dy_RD,
        gate_TQ,
    )
    dy_TQD = jnp.repeat(x_TD[:, None], top_k, axis=1) + jnp.arange(top_k)[None, :, None]
    return {
        "routing": routing,
        "slots": slots,
        "x_RD": x_RD,
        "y_TQD": y_TQD,
        "filled": (fill_vjp(dy_RD), plain_fill_vjp(dy_RD)),
        "read": (read_vjp(dy_TQD), plain_read_vjp(dy_TQD)),
        "summed": ((sums, *sum_vjp(x_TD)), (plain_sums, *plain_sum_vjp(x_TD))),
    }


def plain_gather(x, index):
    return x.at[index].get(mode="fill", fill_value=0)


@given(wishes())
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
def test_slots(wish):
    (G, T, E, Q, C), logits_GTE, real_GT, x_TD, dy_RD = wish
    found = jax.device_get(there_and_back(logits_GTE, real_GT, x_TD, dy_RD, top_k=Q, capacity=C))
    routing, slots, x_RD = found["routing"], found["slots"], found["x_RD"]
    kept_TQ = routing.kept_GTQ.reshape(G * T, Q)
    rows = slots.row_TQ[kept_TQ]

    # No slot is used twice, and each is one of its own expert and group.
    assert len(set(rows.tolist())) == len(rows)
    expert_TQ = routing.expert_GTQ.reshape(G * T, Q)
    group_TQ = np.arange(G * T)[:, None] // T + np.zeros_like(expert_TQ)
    np.testing.assert_array_equal(rows // C // G, expert_TQ[kept_TQ])
    np.testing.assert_array_equal(rows // C % G, group_TQ[kept_TQ])
    assert (slots.row_TQ[~kept_TQ] == E * G * C).all()
    # Slots are taken from the first on: an expert's queue has no hole.
    used_EGC = (slots.choice_R < G * T * Q).reshape(E, G, C)
    assert (used_EGC[..., :-1] >= used_EGC[..., 1:]).all()
    assert used_EGC.sum() == kept_TQ.sum()

    # The buffer holds each kept token where its row says, and zeros elsewhere.
    expected_RD = np.zeros_like(x_RD)
    token_TQ = np.arange(G * T)[:, None] + np.zeros_like(slots.row_TQ)
    expected_RD[rows] = x_TD[token_TQ[kept_TQ]]
    np.testing.assert_array_equal(x_RD, expected_RD)
    # And back: the identity for what was kept, zeros for the rest.
    np.testing.assert_array_equal(found["y_TQD"], np.where(kept_TQ[..., None], x_TD[:, None], 0))
    # The gather-only gradients are those of the plain gathers.
    for ours, plain in (found["filled"], found["read"]):
        np.testing.assert_array_equal(ours[0], plain[0])
    # Sums by gate, whether by token or by row (`SIZES` has both), and their two gradients.
    for ours, plain in zip(*found["summed"], strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)
