"""What the backward pass keeps and what it computes again, as JAX traces it; nothing is compiled.

That no policy changes a number is in test_model.py and, for all meshes, in test_invariance.py.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from switchjax.config import ModelConfig, Remat
from switchjax.layout import Layout
from switchjax.mesh import read_mesh, use_abstract_mesh
from switchjax.model import Stack
from switchjax.nn.noise import Noise

# Sizes that tell arrays apart; tokens enough that weights weigh little.
MODEL = ModelConfig(
    architecture="decoder_only",
    vocab_size=32,
    d_model=16,
    d_ff=56,
    num_heads=2,
    d_kv=8,
    num_layers=4,
    num_experts=4,
    dropout=0.0,
)
ROWS, LENGTH = 8, 48
SLOTS = 15  # of an expert and row: 48 tokens / 4 experts * 1.25
POLICIES = get_args(Remat)


def of_stack(config: ModelConfig, mesh: str, function):
    """`function(stack, x, segments, noise)` of abstract arrays, on devices that need not exist."""
    shape = read_mesh(mesh)
    layout = Layout.of(shape)
    with use_abstract_mesh(shape):

        def traced():
            stack = Stack(jax.random.key(0), config, layout, causal=True, cross=False)
            x_BLD = jnp.ones((ROWS, LENGTH, 16), config.dtype, out_sharding=layout.tokens_bld)
            segment_BL = jnp.ones((ROWS, LENGTH), jnp.int32, out_sharding=layout.tokens_bl)
            row_B = jax.reshard(jnp.arange(ROWS), layout.rows_b)
            return function(stack, x_BLD, segment_BL, Noise(jax.random.key(1), row_B))

        return jax.eval_shape(traced)


@cache
def kept(remat: Remat, dispatcher: str = "local", mesh: str = "single", **changes) -> Counter:
    """Arrays from the forward pass of a stack that its backward pass is given, by shape."""
    config = replace(MODEL, remat=remat, **changes)

    def residuals(stack, x_BLD, segment_BL, noise):
        def run(stack, x_BLD):
            y_BLD, stats, _ = stack(x_BLD, segment_BL, noise)
            return y_BLD, stats.balance.sum() + stats.z.sum()

        return jax.vjp(run, stack, x_BLD)[1]

    backward = of_stack(config, f"{mesh},dispatcher={dispatcher}", residuals)
    arrays = [
        x for x in jax.tree.leaves(backward) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    ]
    weights = {
        (2, 16, 2, 8),
        (2, 2, 8, 16),
        (2, 16, 56),
        (2, 56, 16),
        (2, 4, 16, 56),
        (2, 4, 56, 16),
    }
    return Counter((x.shape, x.dtype.name) for x in arrays if x.shape not in weights)


def num_bytes(arrays: Counter) -> int:
    return sum(np.prod(s, dtype=int) * np.dtype(d).itemsize * n for (s, d), n in arrays.items())


HIDDEN = (2, 4, ROWS * SLOTS, 56)  # of the experts of both periods


@pytest.mark.parametrize("activation", ["relu", "geglu"])
def test_moe_keeps_all_but_hidden_activations_of_experts(activation):
    everything, but_hidden = (kept(r, activation=activation) for r in ("none", "moe"))
    hidden = Counter({key: n for key, n in everything.items() if key[0] == HIDDEN})
    assert sum(hidden.values()) == {"relu": 1, "geglu": 3}[activation]
    assert not any(shape == HIDDEN for shape, _ in but_hidden)
    assert num_bytes(but_hidden) <= num_bytes(everything) - 0.9 * num_bytes(hidden)


@pytest.mark.parametrize("remat", POLICIES)
def test_nothing_is_kept_for_the_slower_way(remat):
    """Which has the tokens of four devices, and hidden activations of theirs."""
    mesh = "data=2,expert=4,zero=3"
    padded, exact = (kept(remat, dispatcher, mesh) for dispatcher in ("all_to_all", "ragged"))
    assert num_bytes(exact) <= 1.2 * num_bytes(padded)
    of_all = (4 * ROWS, LENGTH)
    assert not any(of_all in zip(shape, shape[1:], strict=False) for shape, _ in exact)


def test_moe_keeps_no_hidden_activations_of_runs():
    """Of the dropless dispatcher, whose rows are sorted by expert."""
    shapes = {remat: {s for s, _ in kept(remat, "ragged")} for remat in ("none", "moe")}
    assert any(len(s) == 3 and s[-1] == 56 and s[1] > ROWS * LENGTH for s in shapes["none"])
    assert not any(len(s) == 3 and s[-1] == 56 and s[1] > ROWS * LENGTH for s in shapes["moe"])


def test_each_policy_keeps_less_than_the_one_before():
    none, moe, dots, full = (num_bytes(kept(remat)) for remat in POLICIES)
    assert none > moe > dots > full
    assert full < 0.25 * none


def test_dots_keeps_products_with_weights_and_what_travelled():
    dots = kept("dots")
    assert HIDDEN in {shape for shape, _ in dots}
    assert (2, 4, ROWS * SLOTS, 16) in {shape for shape, _ in dots}  # tokens at their experts
    assert not any(shape[-3:] == (2, LENGTH, LENGTH) for shape, _ in dots)  # attention's scores


@cache
def counted(remat: Remat, mesh: str, **changes) -> Counter:
    """How often each operation stands in the program of a gradient; a loop's body counts once."""
    config = replace(MODEL, remat=remat, **changes)

    def gradient(stack, x_BLD, segment_BL, noise):
        def loss(stack):
            y_BLD, stats, _ = stack(x_BLD, segment_BL, noise)
            return y_BLD.sum() + stats.balance.sum() + stats.z.sum()

        return jax.grad(loss)(stack)

    found = Counter()

    def trace(*arguments):
        for equation in equations(jax.make_jaxpr(gradient)(*arguments).jaxpr):
            found[equation.primitive.name] += 1
        return arguments[1]

    of_stack(config, mesh, trace)
    return found


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"top_k": 2, "random_second": True}], ids=str)
def test_who_goes_where_is_decided_once(remat, changes):
    """Case 38. Nor is a queue counted, or a count summed over devices, more than once."""
    count = counted(remat, "data2_expert2_model2", **changes)
    assert count["top_k"] == 1
    assert count["cumsum"] == counted("none", "data2_expert2_model2", **changes)["cumsum"]


@pytest.mark.parametrize("remat", ["none", "moe", "dots"])
def test_tokens_travel_once_in_each_pass(remat):
    assert counted(remat, "expert=4")["all_to_all"] == 4


def test_full_sends_tokens_again():
    assert counted("full", "expert=4")["all_to_all"] == 6


@pytest.mark.parametrize("remat", POLICIES)
def test_gathered_weights_are_not_kept(remat):
    """With zero = 3: each of a period's weights is gathered in the forward pass and in the other.

    They are two attentions of four, a dense layer of two, a router and experts of two.
    """
    count = counted(remat, "data2_expert2_model2,zero=3")
    assert count["all_gather_reduced"] == 2 * (8 + 2 + 1 + 2)
