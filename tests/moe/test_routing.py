"""Who goes where, by tables small enough to check by hand."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchjax.moe.routing import (
    balance_loss,
    capacity,
    expert_choice,
    moved_bias,
    route,
    router_sums,
    z_loss,
)

EXACT = {"rtol": 1e-6}  # of golden numbers that float32 computes in a few operations


def logits_of(*favourites, num_experts=3):
    """One group in which token t has probability 1/2 or more for favourites[t]."""
    return 2 * np.eye(num_experts)[[favourites]]


@partial(jax.jit, static_argnames=("top_k", "capacity"))
def _ask(logits_GTE, real_GT, *, top_k, capacity, bias_E=None, second_GT=None):
    routing = route(
        logits_GTE, real_GT, top_k=top_k, capacity=capacity, bias_E=bias_E, second_GT=second_GT
    )
    return routing, router_sums(logits_GTE, real_GT, routing)


def ask(logits_1TE, *, top_k=1, capacity, real=None, bias=None, second=None):
    """The routing of one group, without the group dim, and its sums, as numpy arrays."""
    logits_1TE = jnp.asarray(logits_1TE, jnp.float32)
    real_1T = np.ones(logits_1TE.shape[:2], bool) if real is None else np.array([real])
    more = {
        "bias_E": None if bias is None else jnp.array(bias, jnp.float32),
        "second_GT": None if second is None else jnp.array([second], jnp.float32),
    }
    result = _ask(logits_1TE, real_1T, top_k=top_k, capacity=capacity, **more)
    routing, sums = jax.device_get(result)
    return type(routing)(*(a[0] for a in routing)), sums


def test_three_tokens_one_slot():
    """Tokens 0 and 2 want expert 1, token 1 wants expert 0. Token 2 comes too late."""
    routing, sums = ask(logits_of(1, 0, 1), capacity=1)
    assert routing.expert_GTQ.tolist() == [[1], [0], [1]]
    assert routing.slot_GTQ.tolist() == [[0], [0], [1]]
    assert routing.kept_GTQ.tolist() == [[True], [True], [False]]
    assert sums.assigned_E.tolist() == [1, 2, 0]
    assert (sums.dropped, sums.tokens) == (1, 3)


def test_three_tokens_two_slots():
    """The same wishes; with a second slot everyone gets in."""
    routing, sums = ask(logits_of(1, 0, 1), capacity=2)
    assert routing.slot_GTQ.tolist() == [[0], [0], [1]]
    assert routing.kept_GTQ.all()
    assert sums.dropped == 0


def test_second_choices_queue_behind_all_first_ones():
    """Token 0: expert 0, then 1. Token 1: expert 1, then 0. Token 2: expert 1, then 2.

    Expert 1's queue is token 1, token 2 (first choices), then token 0; expert 0's is 0, then 1.
    """
    logits = [[[3, 2, 0], [2, 3, 0], [0, 3, 2]]]
    routing, sums = ask(logits, top_k=2, capacity=1)
    assert routing.expert_GTQ.tolist() == [[0, 1], [1, 0], [1, 2]]
    assert routing.slot_GTQ.tolist() == [[0, 2], [0, 1], [1, 0]]
    assert routing.kept_GTQ.tolist() == [[True, False], [True, False], [False, True]]
    assert sums.assigned_E.tolist() == [2, 3, 1]
    assert sums.dropped == 3
    routing, sums = ask(logits, top_k=2, capacity=2)
    assert routing.kept_GTQ.tolist() == [[True, False], [True, True], [True, True]]
    assert sums.dropped == 1


def test_two_gates_are_shares_of_both_probabilities():
    """exp(3) and exp(2) of the chosen experts: 0.7310586 and 0.2689414, whatever the third has."""
    for third in (0.0, 1.9):
        routing, _ = ask([[[2.0, 3.0, third]]], top_k=2, capacity=1)
        np.testing.assert_allclose(routing.gate_GTQ, [[0.7310586, 0.2689414]], **EXACT)


def test_three_choices():
    """exp(3), exp(2) and exp(1) over their sum; a third choice queues behind all second ones.

    Token 0: experts 0, 1, 2. Token 1: experts 2, 1, 3. Expert 2's queue: token 1, then token 0.
    """
    routing, sums = ask([[[3.0, 2, 1, 0], [-5, 2, 3, 1]]], top_k=3, capacity=1)
    assert routing.expert_GTQ.tolist() == [[0, 1, 2], [2, 1, 3]]
    np.testing.assert_allclose(routing.gate_GTQ, [[0.6652410, 0.2447285, 0.0900306]] * 2, rtol=1e-5)
    assert routing.slot_GTQ.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert routing.kept_GTQ.tolist() == [[True, True, False], [True, False, True]]
    assert (sums.assigned_E.tolist(), sums.dropped) == ([1, 2, 2, 1], 2)


def test_all_experts_may_be_asked():
    routing, sums = ask([[[0.0, 1, 2]]], top_k=3, capacity=1)
    assert routing.expert_GTQ.tolist() == [[2, 1, 0]]
    np.testing.assert_allclose(routing.gate_GTQ.sum(), 1, **EXACT)


# --- A second choice that is sent at random ---------------------------------------------------


def test_a_second_choice_is_sent_with_twice_its_gate():
    """Gates of 0.7310586 and 0.2689414: sent below 0.5378828. Two slots for the second expert.

    Tokens 0 and 2 do not send it, so tokens 1 and 3 have its slots; what is not sent is no drop.
    """
    second = [0.54, 0.53, 0.99, 0.0, 0.0]
    logits = [[[1.0, 0.0]] * 5]
    routing, sums = ask(logits, top_k=2, capacity=5, second=second)
    assert routing.expert_GTQ.tolist() == [[0, 2], [0, 1], [0, 2], [0, 1], [0, 1]]
    assert routing.slot_GTQ[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert routing.slot_GTQ[[1, 3, 4], 1].tolist() == [0, 1, 2]
    assert routing.kept_GTQ[:, 1].tolist() == [False, True, False, True, True]
    np.testing.assert_allclose(routing.gate_GTQ, [[0.7310586, 0.2689414]] * 5, **EXACT)
    assert (sums.assigned_E.tolist(), sums.dropped) == ([5, 3], 0)
    routing, sums = ask(logits, top_k=2, capacity=2, second=second)
    assert routing.kept_GTQ[:, 1].tolist() == [False, True, False, True, False]
    assert (sums.assigned_E.tolist(), sums.dropped) == ([5, 3], 3 + 1)


def test_a_second_choice_as_good_as_the_first_is_always_sent():
    routing, _ = ask([[[1.0, 1.0]]], top_k=2, capacity=1, second=[np.nextafter(1, 0, dtype="f")])
    assert routing.kept_GTQ.tolist() == [[True, True]]


# --- A bias on the choice ---------------------------------------------------------------------


def test_a_bias_moves_the_choice_and_nothing_else():
    """Probabilities of 0.6, 0.3 and 0.1; the bias lifts the third, and lowers the first."""
    logits = np.log([[[0.6, 0.3, 0.1]]])
    plain, plain_sums = ask(logits, top_k=2, capacity=1)
    for bias, chosen, gates in (
        ([0, 0, 0], [0, 1], [2 / 3, 1 / 3]),
        ([0, 0, 0.3], [0, 2], [6 / 7, 1 / 7]),
        ([-0.4, 0, 0.3], [2, 1], [1 / 4, 3 / 4]),
    ):
        routing, sums = ask(logits, top_k=2, capacity=1, bias=bias)
        assert routing.expert_GTQ.tolist() == [chosen]
        np.testing.assert_allclose(routing.gate_GTQ, [gates], **EXACT)
        np.testing.assert_array_equal(sums.prob_E, plain_sums.prob_E)
        assert sums.z == plain_sums.z
    routing, _ = ask(logits, capacity=1, bias=[-0.4, 0, 0])
    np.testing.assert_allclose(routing.gate_GTQ, [[0.3]], **EXACT)  # p, not a share


def test_gates_of_experts_with_no_probability_left_are_finite():
    """Both chosen for their bias alone, with probabilities that underflow."""
    routing, _ = ask([[[0.0, -200, -201]]], top_k=2, capacity=1, bias=[-5, 0, 0])
    assert routing.expert_GTQ.tolist() == [[1, 2]]
    np.testing.assert_allclose(routing.gate_GTQ, [[0.7310586, 0.2689414]], **EXACT)


def test_a_bias_has_no_gradient():
    def gate(bias_E):
        logits, one = jnp.array([[[0.0, 1.0]]]), jnp.ones((1, 1), bool)
        routing = route(logits, one, top_k=1, capacity=1, bias_E=bias_E)
        return routing.gate_GTQ.sum()

    assert (jax.grad(gate)(jnp.array([0.1, 0.0])) == 0).all()


@pytest.mark.parametrize(
    "load, signs",
    [
        ([3, 1], [-1, 1]),  # case 63
        ([2, 2], [0, 0]),
        ([5, 0, 1], [-1, 1, 1]),
        ([0, 0], [0, 0]),
    ],
)
def test_the_bias_moves_against_the_load(load, signs):
    before = jnp.full((1, len(load)), 0.5)
    after = moved_bias(before, jnp.array([load], jnp.int32), 0.25)
    assert (after - before).tolist() == [[0.25 * sign for sign in signs]]


def test_the_bias_evens_out_a_skewed_load():
    """Random tokens of which half want expert 0; the mean load is 64."""
    skew_E = jnp.array([2.0] + [0] * 7)
    logits_GTE = jax.random.normal(jax.random.key(0), (1, 512, 8)) + skew_E[None, None]
    bias_XE, loads = jnp.zeros((1, 8)), []
    for _ in range(60):
        _, sums = _ask(logits_GTE, np.ones((1, 512), bool), top_k=1, capacity=1, bias_E=bias_XE[0])
        loads.append(sums.assigned_E.tolist())
        bias_XE = moved_bias(bias_XE, sums.assigned_E[None], 0.01)
    assert max(loads[0]) > 200 and max(loads[-1]) < 80


# --- Experts that choose ----------------------------------------------------------------------


@partial(jax.jit, static_argnames="capacity")
def _choose(logits_GTE, real_GT, *, capacity):
    routing = expert_choice(logits_GTE, real_GT, capacity=capacity)
    return routing, router_sums(logits_GTE, real_GT, routing, experts_chose=True)


def choose(probs_TE, *, capacity, real=None):
    """What experts take of one group, given the tokens' probabilities, and the sums."""
    logits_1TE = jnp.log(jnp.array([probs_TE], jnp.float32))
    real_1T = np.ones(logits_1TE.shape[:2], bool) if real is None else np.array([real])
    routing, sums = jax.device_get(_choose(logits_1TE, real_1T, capacity=capacity))
    return type(routing)(*(a[0] for a in routing)), sums


PROBS = [[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.8, 0.15, 0.05], [0.5, 0.1, 0.4]]


def test_experts_take_their_likeliest_tokens():
    """Expert 0: tokens 2, 0. Expert 1: tokens 0, 2. Expert 2: tokens 3, 1."""
    routing, sums = choose(PROBS, capacity=2)
    assert routing.kept_GTQ.tolist() == [[1, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 1]]
    assert routing.expert_GTQ.tolist() == [[0, 1, 3], [3, 3, 2], [0, 1, 3], [3, 3, 2]]
    slots = [[1, 0, 2], [2, 2, 1], [0, 1, 2], [2, 2, 0]]
    assert routing.slot_GTQ.tolist() == slots
    gates = [[0.7, 0.2, 0], [0, 0, 0.3], [0.8, 0.15, 0], [0, 0, 0.4]]
    np.testing.assert_allclose(routing.gate_GTQ, gates, rtol=1e-5)
    assert (sums.assigned_E.tolist(), sums.dropped, sums.tokens) == ([2, 2, 2], 0, 4)
    np.testing.assert_allclose(balance_loss(sums), 1, **EXACT)


def test_a_token_that_no_expert_takes_is_dropped():
    """One slot each: expert 0 takes token 2, expert 1 token 0, expert 2 token 3."""
    routing, sums = choose(PROBS, capacity=1)
    assert routing.kept_GTQ.any(axis=1).tolist() == [True, False, True, True]
    assert (sums.assigned_E.tolist(), sums.dropped) == ([1, 1, 1], 1)


def test_experts_that_choose_leave_padding_alone():
    """Tokens 1 and 2 are real. With three slots each expert takes both and leaves one empty."""
    real = [False, True, True, False]
    routing, sums = choose(PROBS, capacity=3, real=real)
    assert routing.kept_GTQ.tolist() == [[r] * 3 for r in real]
    assert routing.slot_GTQ[1:3].tolist() == [[1, 1, 0], [0, 0, 1]]
    assert (sums.assigned_E.tolist(), sums.dropped, sums.tokens) == ([2, 2, 2], 0, 2)
    _, sums = choose(PROBS, capacity=3, real=[False] * 4)
    assert (sums.assigned_E.tolist(), sums.dropped, balance_loss(sums)) == ([0, 0, 0], 0, 0)


def test_experts_take_the_earlier_of_equal_tokens():  # case 62
    """Equal as probabilities, though token 0's logits are others."""
    logits = jnp.array([[[5.0, 6.0], [0.0, 1.0], [0.0, 1.0]]])
    routing, _ = _choose(logits, np.ones((1, 3), bool), capacity=2)
    assert routing.slot_GTQ[0].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_experts_tell_improbable_tokens_apart():
    """Expert 1's probabilities underflow to 0, and the likelier token is taken."""
    logits = jnp.array([[[0.0, -200.0], [0.0, -150.0]]])
    routing, _ = _choose(logits, np.ones((1, 2), bool), capacity=1)
    assert routing.kept_GTQ[0].tolist() == [[True, False], [False, True]]


# --- Groups, capacity, ties -------------------------------------------------------------------


def test_groups_have_queues_of_their_own():
    """Two groups of two tokens that all want expert 2: one is kept in each."""
    logits = np.concatenate([logits_of(2, 2), logits_of(2, 2)])
    routing, _ = _ask(logits, np.ones((2, 2), bool), top_k=1, capacity=1)
    assert routing.kept_GTQ[..., 0].tolist() == [[True, False], [True, False]]


def test_capacity_is_exact():
    # 1.1 · 10 is 11.000000000000002 in floating point, and its ceiling would be 12.
    assert capacity(10, 1, 1, 1.1) == 10  # at most all tokens
    assert capacity(100, 10, 1, 1.1) == 11
    assert capacity(10, 10, 1, 1.1) == 2
    assert capacity(200, 8, 2, 1.25) == 63  # 62.5
    assert capacity(8, 4, 1, 1.25) == 3  # case 31a: 2.5 is rounded up
    assert capacity(4, 128, 1, 1.0) == 1  # case 31b
    assert capacity(2, 2, 1, 4.0) == 2  # case 31c
    assert capacity(8, 1, 1, 1.25) == 8  # case 31d
    assert capacity(4, 16, 1, 1.25) == 1  # case 31e
    assert capacity(1, 4, 1, 1.25) == 1  # case 31f


@given(
    hundredths=st.integers(1, 1000),
    group_size=st.integers(1, 5000),
    num_experts=st.integers(1, 512),
    top_k=st.integers(1, 8),
)
@settings(deadline=None, derandomize=True, database=None)
def test_capacity_is_the_smallest_integer_not_below_the_share(
    hundredths, group_size, num_experts, top_k
):
    slots = capacity(group_size, num_experts, top_k, hundredths / 100)
    share = Fraction(hundredths * group_size * top_k, 100 * num_experts)
    assert 1 <= slots <= group_size
    assert slots >= share or slots == group_size
    assert slots - 1 < share or slots == 1


@pytest.mark.parametrize("factor, kept", [(1.0, 5), (1.25, 6), (2.5, 8)])
def test_rounding_decides_who_is_kept(factor, kept):
    """Experts asked by 5, 1, 1 and 1 of 8 tokens; 1.25 gives ceil(2.5) = 3 slots."""  # case 31a
    slots = capacity(8, 4, 1, factor)
    _, sums = ask(logits_of(0, 0, 0, 0, 0, 1, 2, 3, num_experts=4), capacity=slots)
    assert 8 - sums.dropped == kept


def test_no_expert_gets_more_than_its_slots():
    """The first two of five are kept; and so it is in a crowd of 1000."""  # case 12
    routing, _ = ask(logits_of(0, 0, 0, 0, 0), capacity=2)
    assert routing.kept_GTQ[:, 0].tolist() == [True, True, False, False, False]
    logits = np.random.default_rng(0).normal(scale=3, size=(1, 1000, 7))
    for top_k in (1, 2, 3):
        routing, sums = ask(logits, top_k=top_k, capacity=100)
        asked = np.bincount(routing.expert_GTQ.ravel(), minlength=7)
        kept = np.bincount(routing.expert_GTQ[routing.kept_GTQ], minlength=7)
        np.testing.assert_array_equal(kept, np.minimum(asked, 100))
        np.testing.assert_array_equal(sums.assigned_E, asked)
        assert sums.dropped == top_k * 1000 - kept.sum() > 0


def test_more_than_256_tokens_of_one_expert_are_counted():
    """In bfloat16 1 + 1 + … stops at 256."""  # case 17
    routing, sums = ask(logits_of(*[1] * 1000), capacity=1000)
    assert routing.slot_GTQ[:, 0].tolist() == list(range(1000))
    assert sums.assigned_E.tolist() == [0, 1000, 0]
    assert {a.dtype.name for a in (routing.slot_GTQ, sums.assigned_E, sums.tokens)} == {"int32"}


def test_ties_go_to_the_lower_expert():  # case 62
    routing, _ = ask(np.zeros((1, 4, 3)), top_k=2, capacity=4)
    assert routing.expert_GTQ.tolist() == [[0, 1]] * 4
    routing, _ = ask([[[0.0, 1.0, 1.0]]], capacity=1)
    assert routing.expert_GTQ.tolist() == [[1]]
    # Equal biases leave a tie a tie, and so do unequal ones that make one: 1/2 + 1/4 = 3/4.
    routing, _ = ask(np.zeros((1, 4, 3)), top_k=2, capacity=4, bias=[0.25] * 3)
    assert routing.expert_GTQ.tolist() == [[0, 1]] * 4
    routing, _ = ask([[[-200.0, 0.0, 0.0]]], capacity=1, bias=[0.75, 0, 0.25])
    assert routing.expert_GTQ.tolist() == [[0]]


def test_improbable_experts_are_still_told_apart():
    """Both probabilities beside the first underflow to 0, and the likelier is chosen."""
    routing, _ = ask([[[0.0, -200.0, -150.0]]], top_k=2, capacity=1)
    assert routing.expert_GTQ.tolist() == [[0, 2]]
    assert routing.gate_GTQ.tolist() == [[1, 0]]


def losses(logits, real=None):
    _, sums = ask(logits, capacity=8, real=real)
    return float(balance_loss(sums)), float(z_loss(sums))


def test_nothing_but_padding_costs_nothing():
    assert losses(np.ones((1, 4, 3)), [False] * 4) == (0.0, 0.0)


@pytest.mark.parametrize("top_k", [1, 2])
def test_padding_takes_no_slot(top_k):
    """Four of padding, then four real tokens, all for expert 0, which has four slots."""  # case 5
    real = [False] * 4 + [True] * 4
    routing, sums = ask(logits_of(*[0] * 8, num_experts=2), top_k=top_k, capacity=4, real=real)
    assert routing.kept_GTQ.all(axis=1).tolist() == real
    assert not routing.kept_GTQ[:4].any()
    assert routing.slot_GTQ[4:, 0].tolist() == [0, 1, 2, 3]
    assert sums.dropped == 0 and sums.tokens == 4 and sums.assigned_E.sum() == 4 * top_k


def test_collapse_that_the_balance_loss_cannot_see_has_a_gradient():
    """All logits tie, all tokens go to expert 0: the loss is 1, "balanced", and yet it pushes.

    Its gradient is E·p0·(δ - p) / T a token: 4 · 1/4 · (δ - 1/4) / 8.
    """  # case 33

    def aux(logits_GTE):
        real_GT = jnp.ones((1, 8), bool)
        routing = route(logits_GTE, real_GT, top_k=1, capacity=2)
        return balance_loss(router_sums(logits_GTE, real_GT, routing))

    value, slope_GTE = jax.jit(jax.value_and_grad(aux))(jnp.zeros((1, 8, 4)))
    np.testing.assert_allclose(value, 1.0, **EXACT)
    np.testing.assert_allclose(slope_GTE[0], [[0.09375, -0.03125, -0.03125, -0.03125]] * 8, **EXACT)


def test_more_experts_than_tokens():  # case 31e, case 31f
    routing, sums = ask(logits_of(7, 7, 15, 0, num_experts=16), capacity=1)
    assert routing.kept_GTQ[:, 0].tolist() == [True, False, True, True]
    assert sums.assigned_E.tolist() == [1] + [0] * 6 + [2] + [0] * 7 + [1]
    routing, _ = ask(logits_of(2), capacity=1)
    assert routing.kept_GTQ.tolist() == [[True]]
