"""The numbers about expert use that a run records."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from switchjax.metrics import router_record
from switchjax.moe import routing
from switchjax.moe.layer import RouterStats


def stats(load_XE: list, dropped_X: list) -> RouterStats:
    zeros, load = np.zeros(len(load_XE), np.float32), np.array(load_XE, np.int32)
    dropped = np.array(dropped_X, np.int32)
    return RouterStats(zeros, zeros, load, dropped, load.sum(axis=1), zeros, zeros)


def test_record_by_hand():
    """Layer 1: 8 choices, one expert dead; layer 2: 12 choices, two dead."""
    record = router_record(stats([[4, 2, 2, 0], [6, 6, 0, 0]], [1, 4]))
    assert record == {
        "drop_fraction": pytest.approx(5 / 20),
        "load_max": pytest.approx(0.5),
        "load_min": 0.0,
        "dead_experts": 3,
    }


def test_even_load():
    record = router_record(stats([[3, 3, 3, 3]], [0]))
    assert record == {"drop_fraction": 0, "load_max": 0.25, "load_min": 0.25, "dead_experts": 0}


def test_shares_are_of_each_layer_by_itself():
    """A layer that sees few tokens (a short decoder) still shows its busiest expert."""
    record = router_record(stats([[50, 50], [1, 0]], [0, 0]))
    assert record["load_max"] == 1.0


def test_a_step_without_real_tokens_has_a_record():
    record = router_record(stats([[0, 0]], [0]))
    assert record == {"drop_fraction": 0, "load_max": 0, "load_min": 0, "dead_experts": 2}


def test_a_dense_model_has_the_same_keys():
    assert router_record(None).keys() == router_record(stats([[1]], [0])).keys()
    assert set(router_record(None).values()) == {0}


def test_values_are_plain_numbers():
    """They go to JSON."""
    assert {type(x) for x in router_record(stats([[1, 2]], [1])).values()} == {float, int}


def collapsed(logits_TE: Array) -> tuple[float, RouterStats]:
    """Balance loss and statistics of one group at capacity factor 1."""
    T, E = logits_TE.shape
    real_GT = jnp.ones((1, T), bool)
    capacity = routing.capacity(T, E, 1, 1.0)
    choice = routing.route(logits_TE[None], real_GT, top_k=1, capacity=capacity)
    sums = routing.router_sums(logits_TE[None], real_GT, choice)
    balance = routing.balance_loss(sums)
    load_XE, dropped_X = np.asarray(sums.assigned_E)[None], np.asarray(sums.dropped)[None]
    asked_X = load_XE.sum(axis=1)
    zero_X = np.zeros(1)
    return float(balance), RouterStats(
        np.array([balance]), zero_X, load_XE, dropped_X, asked_X, zero_X, zero_X
    )


def test_collapse_that_the_balance_loss_cannot_see():
    """Case 33: a zero router sends all 8 tokens to expert 0, and the loss says "balanced"."""
    balance, router = collapsed(jnp.zeros((8, 4)))
    assert balance == pytest.approx(1.0)
    record = router_record(router)
    assert record["load_max"] == 1.0
    assert record["drop_fraction"] == 0.75
    assert record["dead_experts"] == 3
