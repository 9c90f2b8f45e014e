"""Bytes of what one device keeps from the forward pass for the backward one, by formula.

In numbers of tokens * width and the like; counted in programs compiled for GPUs.
"""

from switchjax.plan.sizes import Sizes, Stack


def kept(sizes: Sizes, stack: Stack) -> float:
    """From the forward pass of a stack until its backward pass, as `remat` has it."""
    match sizes.model.remat:
        case "none":
            a_period = whole_period(sizes, stack) + _copies(sizes, stack)
        case "moe":
            a_period = whole_period(sizes, stack) - _hidden_of_experts(sizes, stack)
            a_period += _copies(sizes, stack)
        case "dots":
            a_period = unit(sizes, stack) + _products(sizes, stack)
        case "full":
            a_period = unit(sizes, stack)
    return sizes.periods * a_period + unit(sizes, stack)


def made_again(sizes: Sizes, stack: Stack) -> float:
    """What the backward pass of one period computes again, and keeps until it is done."""
    match sizes.model.remat:
        case "none":
            return 0.0
        case "moe":
            return _hidden_of_experts(sizes, stack)
        case "dots":  # of one layer at a time, since each has what it starts from
            layers = max(sizes.model.moe_every, 1)
            return (whole_period(sizes, stack) - _products(sizes, stack)) / layers
        case "full":
            return whole_period(sizes, stack)


def unit(sizes: Sizes, stack: Stack) -> float:
    """What a period receives."""
    return stack.tokens * sizes.model.d_model * sizes.itemsize


def whole_period(sizes: Sizes, stack: Stack) -> float:
    """What one period keeps if nothing is computed again."""
    model, c = sizes.model, sizes.itemsize
    t, D, every = stack.tokens, model.d_model, max(model.moe_every, 1)
    norms = 3 if stack.context else 2
    dropped = 1 if model.dropout else 0  # a mask is a byte
    a_layer = norms * t * D * 2 * c  # what a norm gets and gives
    a_layer += norms * t * D * 2.4 * dropped  # masks, and what else the compiler keeps with them
    rows = stack.tokens // stack.length
    scores = rows * (model.num_heads // sizes.shape.model) * stack.length
    a_layer += scores * stack.length * c + 4 * t * sizes.heads * c
    if stack.context:
        a_layer += scores * (stack.context // rows) * c
        a_layer += 2 * (t + stack.context) * sizes.heads * c
    # A mask of relu, but for experts.
    dense = t * sizes.hidden * (_hidden_arrays(sizes) * c + (sizes.matrices == 2) + dropped)
    total = every * a_layer + (every - (model.moe_every > 0)) * dense
    if model.moe_every:
        total += _hidden_of_experts(sizes, stack)
        total += sizes.expert_rows(stack) * D * c + t * D * 4 + 3 * t * model.num_experts * 4
        exchange = sizes.shape.exchange
        if exchange.dispatcher == "all_gather" and exchange.buffer is None:
            total += all_peers(sizes, stack)
    return total


def _hidden_of_experts(sizes: Sizes, stack: Stack) -> float:
    """Of one Switch layer: hidden activations, and the factors of dropout where they are needed."""
    if not sizes.model.moe_every:
        return 0.0
    needed = sizes.matrices > 2 or sizes.shape.exchange.dispatcher == "ragged"
    arrays = _hidden_arrays(sizes) + (sizes.model.dropout > 0 and needed)
    return sizes.expert_rows(stack) * sizes.expert_hidden * arrays * sizes.itemsize


def _hidden_arrays(sizes: Sizes) -> int:
    """Of hidden numbers: with a gate the two products too."""
    return 1 if sizes.matrices == 2 else 3


def _copies(sizes: Sizes, stack: Stack) -> float:
    """Of one period, what is kept a second time where whole periods are.

    Queries, keys and values, laid out for one product and for the other, and weights in the dtype
    of compute, where that is not their own.
    """
    numbers = 3 * stack.tokens + (stack.tokens + 2 * stack.context if stack.context else 0)
    numbers *= max(sizes.model.moe_every, 1) * sizes.heads
    if sizes.model.dtype != sizes.model.param_dtype and sizes.shape.storage.zero < 3:
        numbers += sizes.period_weights(stack)
    return numbers * sizes.itemsize


def _products(sizes: Sizes, stack: Stack) -> float:
    """Of one period, what `dots` keeps: products with weights, and tokens that have travelled."""
    model, c, t = sizes.model, sizes.itemsize, stack.tokens
    every = max(model.moe_every, 1)
    a_layer = 3 * t * sizes.heads * c + t * model.d_model * c
    if stack.context:
        a_layer += (t + 2 * stack.context) * sizes.heads * c + t * model.d_model * c
    dense = t * (sizes.hidden * (sizes.matrices - 1) + model.d_model) * c
    total = every * a_layer + (every - (model.moe_every > 0)) * dense
    if model.moe_every:
        rows, hidden = sizes.expert_rows(stack), sizes.expert_hidden * (sizes.matrices - 1)
        total += rows * (hidden + 2 * model.d_model) * c + t * model.num_experts * 4
    return total


def all_peers(sizes: Sizes, stack: Stack) -> float:
    """The tokens of all devices of the expert axis, and results for them."""
    return 2 * stack.tokens * sizes.shape.expert * sizes.model.d_model * sizes.itemsize
