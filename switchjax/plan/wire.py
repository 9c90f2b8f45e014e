"""What a train step sends, by formula: each collective with its mesh axes, bytes and number.

As XLA compiles the step for GPUs, which `collectives` reads off the program itself: a reduction
follows each product over a split dim, gradients are summed inside the backward loop, for each
micro-batch, and what `remat` computes again it sends again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from switchjax import expert_cache
from switchjax.axes import DATA, EXPERT, MODEL, TOKENS
from switchjax.plan.exchange import exchange_bytes
from switchjax.plan.memory import gathered_bytes
from switchjax.plan.sizes import Sizes, Stack

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
    found = [*_activations(sizes), *_exchanges(sizes), *_gradients(sizes), *_weights(sizes)]
    return [send for send in found if send.wire_bytes]


def all_reduce_bytes(size: float, devices: int) -> float:
    """Bytes that one of a ring of devices sends to sum `size` bytes."""
    return 2 * scattered_bytes(size, devices)


def scattered_bytes(size: float, devices: int) -> float:
    """Bytes that one device sends to sum `size` bytes where each gets its part, or to gather."""
    return size * (devices - 1) / devices


def sums_once(sizes: Sizes) -> bool:
    """Whether a stack's gradient of what all its layers see is summed after the last of them.

    XLA moves the sum out of a backward loop that computes again, and no other.
    """
    return sizes.model.remat in ("dots", "full") or sizes.shape.storage.zero == 3


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
            times = 1 if sums_once(sizes) else 2 * model.num_layers
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
    """Sums over the devices that hold the same weights; from `zero` 2 on each has a part of them.

    The sum over `data` comes first then, and that over `expert` is of parts.
    """
    shape, micros, num_stacks = sizes.shape, sizes.config.optim.accumulation, len(sizes.stacks)
    over = tuple(axis for axis in TOKENS if getattr(shape, axis) > 1)
    num_layers, num_periods = sizes.switch_layers * num_stacks, sizes.periods * num_stacks
    experts = num_layers * sizes.expert_weights * sizes.reduce_itemsize
    layers, tables = _layer_gradients(sizes), _table_gradients(sizes)
    whole = _whole_gradients(sizes)

    def sent(purpose: str, kind: str, axes: tuple[str, ...], size: float, runs: int) -> Send:
        return Send(
            purpose=purpose, kind=kind, axes=axes, wire_bytes=micros * size, runs=micros * runs
        )

    if shape.storage.zero < 2:
        summed = all_reduce_bytes(layers + tables + whole, shape.data * shape.expert)
        yield sent("gradients", "all-reduce", over, summed, 1 + 2 * num_stacks + num_periods)
        summed = all_reduce_bytes(experts, shape.data)
        yield sent("gradients of experts", "all-reduce", (DATA,), summed, num_layers)
        return
    scattered = scattered_bytes(layers + tables, shape.data)
    yield sent("gradients", "reduce-scatter", (DATA,), scattered, num_periods + 1 + num_stacks)
    scattered = scattered_bytes(experts, shape.data)
    yield sent("gradients of experts", "reduce-scatter", (DATA,), scattered, num_layers)
    # XLA adds all parts of the tables before it sums them, in float32, once a step.
    tables = 4 * sizes.table_weights * (1 if sizes.model.tied_embeddings else 2) / micros
    summed = all_reduce_bytes((layers + tables) / shape.data, shape.expert)
    yield sent("gradients", "all-reduce", (EXPERT,), summed, num_periods + 1)
    summed = all_reduce_bytes(whole, shape.data * shape.expert)
    yield sent("gradients", "all-reduce", over, summed, num_stacks)


def _layer_gradients(sizes: Sizes) -> float:
    """Bytes of what is summed over all that hold tokens, of layers: no expert's."""
    r, size = sizes.reduce_itemsize, 0.0
    for stack in sizes.stacks:
        size += sizes.model.num_layers * sizes.attention_weights(stack) * r
        size += sizes.dense_layers * sizes.dense_weights * r
        size += sizes.switch_layers * sizes.router_weights * 4
    return size


def _table_gradients(sizes: Sizes) -> float:
    """Bytes of embeddings, summed for the logits and for what goes into each stack."""
    storage, r = sizes.shape.storage, sizes.reduce_itemsize
    # Where nobody says otherwise, JAX sums what the logits' float32 product gives.
    as_computed = storage.reduce_dtype == "compute" and storage.zero < 2
    return sizes.table_weights * ((4 if as_computed else r) + len(sizes.stacks) * r)


def _whole_gradients(sizes: Sizes) -> float:
    """Bytes of what `zero` does not split, in float32: norms, and T5's relative positions.

    Those are summed as biases [heads, length, length].
    """
    model, heads = sizes.model, sizes.model.num_heads // sizes.shape.model
    size = 0.0
    for stack in sizes.stacks:
        norms = model.num_layers * (3 if stack.context else 2) + 1
        size += 4 * norms * model.d_model
        if model.architecture == "encoder_decoder":
            times = 1 if sums_once(sizes) else model.num_layers
            size += 4 * times * heads * stack.length**2
    return size


def _weights(sizes: Sizes) -> Iterator[Send]:
    """Gathers of what `zero` splits: new parameters, or with 3 the weights of each period."""
    shape, micros = sizes.shape, sizes.config.optim.accumulation
    match shape.storage.zero:
        case 0:
            return
        case 1 | 2:
            size, runs = gathered_bytes(sizes.config, shape), 3
        case _:
            # In the forward pass and again in the backward pass; embeddings once.
            size = micros * scattered_bytes(_gathered_for_use(sizes), shape.data)
            size -= expert_cache.saved_bytes(sizes.config, shape)
            runs = micros * (2 * sizes.periods * len(sizes.stacks) + 1)
    yield Send(purpose="weights", kind="all-gather", axes=(DATA,), wire_bytes=size, runs=runs)


def _gathered_for_use(sizes: Sizes) -> float:
    """Bytes of the whole weights that a micro-batch gathers."""
    c, layers = sizes.itemsize, 0.0
    for stack in sizes.stacks:
        layers += sizes.model.num_layers * sizes.attention_weights(stack) * c
        layers += sizes.dense_layers * sizes.dense_weights * c
        layers += sizes.switch_layers * (sizes.expert_weights * c + sizes.router_weights * 4)
    tables = 1 if sizes.model.tied_embeddings else 2
    return 2 * layers + tables * sizes.table_weights * c
