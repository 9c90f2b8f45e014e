"""What a train step sends, by formula: each collective with its mesh axes, bytes and number.

As XLA compiles the step for GPUs, which `collectives` reads off the program itself: a reduction
follows each product over a split dim, gradients are summed in the dtype of compute inside the
backward loop, and what `remat` computes again it sends again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from switchjax.axes import DATA, EXPERT, MODEL
from switchjax.plan.exchange import exchange_bytes
from switchjax.plan.sizes import Sizes, Stack

_POSITION_BUCKETS = 32  # of T5's relative positions
_KINDS = {"all_to_all": "all-to-all", "all_gather": "all-gather", "ragged": "ragged-all-to-all"}


@dataclass(frozen=True, kw_only=True)
class Send:
    """Collectives of one kind and purpose, as one device has them in one step."""

    purpose: str
    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    """That one device sends, all runs together."""
    runs: float
    """Collectives, for what each costs to start."""


def sends(sizes: Sizes) -> list[Send]:
    """All that one device sends in a step, but for scalars and statistics."""
    found = [*_activations(sizes), *_exchanges(sizes), *_gradients(sizes)]
    return [send for send in found if send.wire_bytes]


def all_reduce_bytes(size: float, devices: int) -> float:
    """Bytes that one of a ring of devices sends to sum `size` bytes."""
    return 2 * size * (devices - 1) / devices


def _activations(sizes: Sizes) -> Iterator[Send]:
    """Sums over the model axis, after each product over a split dim."""
    if sizes.shape.model == 1:
        return
    model, micros = sizes.model, sizes.config.optim.accumulation
    D, again = model.d_model, int(model.remat == "full")
    size, runs = 0.0, 0
    for stack in sizes.stacks:
        unit = stack.tokens * D * sizes.itemsize
        attentions = 2 if stack.context else 1
        # Out of attention and in front of it; out of and in front of the feed-forward layer. A
        # Switch layer's sum is not done again, since nothing asks for it.
        count = model.num_layers * (attentions * (2 + again) + 2) + sizes.dense_layers * again
        size, runs = size + count * unit, runs + count
        if stack.context:  # gradients of the encoder's output, from keys and from values
            of_context = stack.context * D * sizes.itemsize
            times = 1 if again else 2 * model.num_layers
            size, runs = size + times * of_context, runs + times
        size, runs = size + unit, runs + 1  # rows of the split embedding
    size, runs = size + sizes.stacks[-1].tokens * D * 4, runs + 1  # gradient of the last norm
    yield Send(
        purpose="activations",
        kind="all-reduce",
        axes=(MODEL,),
        wire_bytes=micros * all_reduce_bytes(size, sizes.shape.model),
        runs=micros * runs,
    )


def _exchanges(sizes: Sizes) -> Iterator[Send]:
    """Tokens to their experts and back."""
    exchange, micros = sizes.shape.exchange, sizes.config.optim.accumulation
    if sizes.shape.expert == 1 or not sizes.switch_layers:
        return
    # There and back, again in the backward pass, and if `remat` computes the layer anew once more.
    ways = 6 / 4 if sizes.model.remat == "full" else 1
    size = sum(sizes.switch_layers * ways * _exchange(sizes, stack) for stack in sizes.stacks)
    each_way = exchange.chunks * (2 if exchange.dispatcher == "all_to_all" else 3)
    runs = sizes.switch_layers * len(sizes.stacks) * 2 * ways * each_way
    kind = _KINDS[exchange.dispatcher]
    yield Send(
        purpose="tokens",
        kind=kind,
        axes=(EXPERT,),
        wire_bytes=micros * size,
        runs=micros * runs,
    )


def _exchange(sizes: Sizes, stack: Stack) -> float:
    group_size = sizes.group(stack)
    return exchange_bytes(sizes.model, sizes.shape, tokens=stack.tokens, group_size=group_size)


def _gradients(sizes: Sizes) -> Iterator[Send]:
    """Sums over the devices that hold the same parameters."""
    shape, micros = sizes.shape, sizes.config.optim.accumulation
    over = tuple(axis for axis in (DATA, EXPERT) if getattr(shape, axis) > 1)
    size, runs = _shared_bytes(sizes)
    yield Send(
        purpose="gradients",
        kind="all-reduce",
        axes=over,
        wire_bytes=micros * all_reduce_bytes(size, shape.data * shape.expert),
        runs=micros * runs,
    )
    weights = sizes.experts * sizes.matrices * sizes.model.d_model * sizes.expert_hidden
    layers = sizes.switch_layers * len(sizes.stacks)
    yield Send(
        purpose="gradients of experts",
        kind="all-reduce",
        axes=(DATA,),
        wire_bytes=micros * all_reduce_bytes(layers * weights * sizes.itemsize, shape.data),
        runs=micros * layers,
    )


def _shared_bytes(sizes: Sizes) -> tuple[float, int]:
    """Gradients of all but the experts, as they are summed, and in how many collectives."""
    model, c = sizes.model, sizes.itemsize
    D, m = model.d_model, sizes.shape.model
    embedding = model.vocab_size // m * D
    size, runs = embedding * 4.0, 1  # of the logits
    for stack in sizes.stacks:
        attention = 4 * D * sizes.heads * (2 if stack.context else 1)
        dense = sizes.matrices * D * sizes.hidden
        size += (model.num_layers * attention + sizes.dense_layers * dense) * c
        size += sizes.switch_layers * D * model.num_experts * 4  # the router
        size += embedding * c  # of the tokens going in
        if model.architecture == "encoder_decoder":  # as biases [heads, length, length]
            times = 1 if model.remat == "full" else model.num_layers
            size += times * model.num_heads // m * stack.length**2 * 4
        runs += 2 + 2 * model.num_layers
    return size, runs
