"""Who checks the oracle: finite differences, and a table worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import Cotangents, Weights, expert_choice, switch

STEP = 1e-6
ROWS, LENGTH, D, F, E = 2, 6, 3, 4, 3


def problem(*, geglu, top_k):
    rng = np.random.default_rng(top_k)

    def normal(*shape):
        return rng.standard_normal(shape)

    return {
        "x": normal(ROWS, LENGTH, D),
        "real": rng.random((ROWS, LENGTH)) > 0.25,
        "weights": Weights(
            normal(D, E), normal(E, D, F), normal(E, D, F) if geglu else None, normal(E, F, D)
        ),
        "group_size": LENGTH,
        "capacity": 2,
        "top_k": top_k,
        "cotangents": Cotangents(normal(ROWS, LENGTH, D), 0.7, 0.3),
    }


def central_differences(objective, array):
    """d objective / d array, one entry after the other, moving the array in place."""
    slopes = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        value = array[index]
        array[index] = value + STEP
        above = objective()
        array[index] = value - STEP
        slopes[index] = (above - objective()) / (2 * STEP)
        array[index] = value
    return slopes


def experts_choose(*, top_k, **given):
    return expert_choice(**given)


BIASED = {
    "bias": np.array([0.1, 0.0, -0.2]),
    "second": np.random.default_rng(6).random((ROWS, LENGTH)),
}


@pytest.mark.parametrize(
    "layer, top_k, more",
    [
        (switch, 1, {}),
        (switch, 2, {}),
        (switch, 3, {}),
        (switch, 2, BIASED),
        (experts_choose, 1, {}),
    ],
)
@pytest.mark.parametrize("geglu", [False, True])
def test_gradients_equal_finite_differences(geglu, layer, top_k, more):
    given = problem(geglu=geglu, top_k=top_k) | more
    result = layer(**given)
    assert result.dropped > 0 and not given["real"].all()
    assert result.margin > 100 * STEP  # or a step changes a choice

    def objective():
        return layer(**given).objective

    def check(gradient, array):
        np.testing.assert_allclose(
            gradient, central_differences(objective, array), rtol=1e-6, atol=1e-8
        )

    check(result.dx, given["x"])
    check(result.dweights.router, given["weights"].router)
    check(result.dweights.w_in, given["weights"].w_in)
    check(result.dweights.w_out, given["weights"].w_out)
    if geglu:
        check(result.dweights.w_gate, given["weights"].w_gate)


def test_hand_table():
    """Five tokens ask for an expert that multiplies by ten and has two slots.

    Each has the logits [1, 0], so the gate is 1 / (1 + 1/e) = 0.7310586.
    """  # case 11
    x = np.array([[[v, 1.0] for v in (1, 2, 3, 4, 5)]])
    weights = Weights(
        router=np.array([[0.0, 0.0], [1.0, 0.0]]),
        w_in=np.array([[[1.0], [0.0]]] * 2),
        w_gate=None,
        w_out=np.array([[[10.0, 0.0]]] * 2),
    )
    result = switch(
        x,
        np.ones((1, 5), bool),
        weights,
        group_size=5,
        capacity=2,
        top_k=1,
        cotangents=Cotangents(np.ones_like(x), 0.0, 0.0),
    )
    np.testing.assert_allclose(result.y[0, :, 0], [7.3105858, 14.6211716, 0, 0, 0], rtol=1e-7)
    assert (result.y[0, :, 1] == 0).all()
    assert (result.load, result.dropped) == ([5, 0], 3)
    np.testing.assert_allclose(result.aux, 2 * 0.7310586, rtol=1e-7)
    np.testing.assert_allclose(result.z, 1.3132617**2, rtol=1e-7)
    # ∂gate/∂logit = p·(1 - p) = 0.1966119, times what the expert gave: 10 and 20.  # case 29
    np.testing.assert_allclose(result.dweights.router[1], [5.898357, -5.898357], rtol=1e-6)
    assert (result.dx[0, 2:] == 0).all()


def test_hand_table_of_expert_choice():
    """The same tokens and logits, in which both experts find the first two and take them.

    The gates are 0.7310586 and 0.2689414; the tie goes to the earlier tokens.
    """
    x = np.array([[[v, 1.0] for v in (1, 2, 3, 4, 5)]])
    weights = Weights(
        router=np.array([[0.0, 0.0], [1.0, 0.0]]),
        w_in=np.array([[[1.0], [0.0]]] * 2),
        w_gate=None,
        w_out=np.array([[[10.0, 0.0]], [[100.0, 0.0]]]),
    )
    result = expert_choice(
        x,
        np.ones((1, 5), bool),
        weights,
        group_size=5,
        capacity=2,
        cotangents=Cotangents(np.ones_like(x), 0.0, 0.0),
    )
    one = 10 * 0.7310586 + 100 * 0.2689414
    np.testing.assert_allclose(result.y[0, :, 0], [one, 2 * one, 0, 0, 0], rtol=1e-7)
    assert (result.load, result.dropped, result.aux) == ([2, 2], 3, pytest.approx(1.0))


def test_padding_is_not_there():
    given = problem(geglu=False, top_k=2)
    garbage = np.where(given["real"][..., None], given["x"], 1e3)
    result, other = switch(**given), switch(**given | {"x": garbage})
    np.testing.assert_array_equal(result.y, other.y)
    assert replace(other, y=None, dx=None, dweights=None) == replace(
        result, y=None, dx=None, dweights=None
    )
    assert (result.y[~given["real"]] == 0).all() and (result.dx[~given["real"]] == 0).all()
