"""Bytes of one device in a train step, by class and by formula.

Parameters and optimizer state are exact: shapes and layouts of the very state. What is kept between
the passes is in `activations`.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax

from switchjax import expert_cache
from switchjax.config import Experts, ModelConfig, OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import Exchange, MeshShape, Storage, use_abstract_mesh
from switchjax.plan.activations import all_peers, kept, made_again, unit
from switchjax.plan.sizes import Sizes, Stack
from switchjax.saved_steps import named_leaves
from switchjax.state import init_state


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device at the fullest moment of a step."""

    parameters: float
    optimizer: float
    gradients: float
    gathered: float
    """Whole weights of what `zero` splits: of the period that is computed and their gradient, or
    new parameters on their way, where they find no room that others have left."""
    activations: float
    """Kept from the forward pass for the backward pass."""
    buffers: float
    """At work: of the period that is computed, the logits, what is under way."""
    on_host: float
    """What of these `offload` keeps in memory of the host instead: not in the total."""

    @property
    def total(self) -> float:
        return sum(vars(self).values()) - self.on_host


def memory(sizes: Sizes) -> Memory:
    """Bytes of one device."""
    config, shape = sizes.config, sizes.shape
    parameters, optimizer = state_bytes(config, shape)
    whole, part = (4 * parameter_numbers(config, shape, split=split) for split in (False, True))
    micros = 2 if config.optim.accumulation > 1 else 1  # one micro-batch's beside the sum
    gradients = micros * (part if shape.storage.zero >= 2 else whole)
    activations = sum(kept(sizes, stack) for stack in sizes.stacks)
    at_once, received = _optimizer_at_once(sizes, optimizer), received_bytes(sizes)
    buffers = sum(
        (
            _logits(sizes),
            _attention(sizes),
            max(made_again(sizes, stack) for stack in sizes.stacks),
            max(map(partial(_slower_way, sizes), sizes.stacks)),
        )
    )
    return Memory(
        parameters=parameters,
        optimizer=at_once,
        gradients=gradients,
        gathered=_gathered(sizes, room=activations + buffers + gradients - part),
        activations=activations - received,
        buffers=buffers,
        on_host=optimizer - at_once + received,
    )


def _optimizer_at_once(sizes: Sizes, optimizer: float) -> float:
    """Of the optimizer's bytes, what is on the device at the same time.

    Where they are on the host, the larger of a period's and of what is not stacked; but
    Adafactor's rows and columns come all at once.
    """
    config, shape = sizes.config, sizes.shape
    if shape.storage.offload == "none" or config.optim.optimizer == "adafactor":
        return optimizer
    stacked = _on_a_device(config, shape, shape.storage.zero).stacked
    return max(stacked / (sizes.periods * len(sizes.stacks)), optimizer - stacked)


def received_bytes(sizes: Sizes) -> float:
    """On the host, of what the periods of a micro-batch receive: all but that of two in turn."""
    if sizes.shape.storage.offload != "optimizer+activations":
        return 0.0
    return sum(max(sizes.periods - 2, 0) * unit(sizes, stack) for stack in sizes.stacks)


def state_bytes(config: RunConfig, shape: MeshShape) -> tuple[float, float]:
    """Of parameters and of the optimizer's state, on one device."""
    found = _on_a_device(config, shape, shape.storage.zero)
    return found.parameters, found.optimizer


def parameter_numbers(config: RunConfig, shape: MeshShape, *, split: bool) -> float:
    """How many parameters a device holds, if `data` splits them or not, whatever the mesh says."""
    return _on_a_device(config, shape, 3 if split else 0).numbers


class _State(NamedTuple):
    parameters: float
    optimizer: float
    numbers: float
    """Of the parameters."""
    stacked: float
    """Of the optimizer's bytes, those of periods."""


def _on_a_device(config: RunConfig, shape: MeshShape, zero: int) -> _State:
    model, optim = _plain(config.model, config.optim)
    return _sums(model, optim, shape.exchange.experts, zero, shape.sizes)


@cache
def _plain(model: ModelConfig, optim: OptimConfig) -> tuple[ModelConfig, OptimConfig]:
    """Without what does not change the state, so that few configs are left to look at."""
    return replace(model, remat="none"), replace(optim, accumulation=1)


@cache
def _sums(
    model: ModelConfig, optim: OptimConfig, experts: Experts, zero: int, sizes: tuple[int, ...]
) -> _State:
    shape = MeshShape(name="asked", **dict(zip(("data", "expert", "model"), sizes, strict=True)))
    parameters = optimizer = numbers = stacked = 0.0
    for part, axes, size, count in _arrays(model, optim, experts, zero):
        devices = math.prod(getattr(shape, axis) for axis in axes)
        if part == "model":
            parameters += size / devices
            numbers += count / devices
        else:
            optimizer += size / devices
            stacked += size / devices if part == "stacked" else 0
    return _State(parameters, optimizer, numbers, stacked)


@cache
def _arrays(
    model: ModelConfig, optim: OptimConfig, experts: Experts, zero: int
) -> list[tuple[str, tuple[str, ...], float, float]]:
    """Part, mesh axes that split it, bytes and numbers of the arrays of the state, those alike
    summed."""
    config = RunConfig(model=model, optim=optim)
    shape = MeshShape(
        name="one",
        data=1,
        expert=1,
        model=1,
        exchange=Exchange(experts=experts),
        storage=Storage(zero=zero),
    )
    with use_abstract_mesh(shape):
        state = jax.eval_shape(partial(init_state, config, Layout.of(shape)))
    sums: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}
    for name, leaf in named_leaves(state).items():
        part = name.split(".")[0]
        if part not in ("model", "opt_state"):
            continue
        part = "stacked" if part == "opt_state" and ".periods." in name else part
        axes: list[str] = []
        for entry in leaf.sharding.spec if leaf.sharding is not None else ():
            axes += entry if isinstance(entry, tuple) else [entry] * (entry is not None)
        at = part, tuple(sorted(axes))
        size, count = sums.get(at, (0.0, 0.0))
        sums[at] = size + leaf.size * leaf.dtype.itemsize, count + leaf.size
    return [(*at, size, count) for at, (size, count) in sums.items()]


def gathered_bytes(config: RunConfig, shape: MeshShape) -> float:
    """Of the parameters, as the state holds them, what other devices of `data` send in a gather."""
    whole, parts = (_on_a_device(config, shape, zero).parameters for zero in (0, 3))
    return whole - parts


def _gathered(sizes: Sizes, *, room: float) -> float:
    """Of the period that is computed, weights in the dtype of compute and their gradient, both
    twice, since what a collective leaves is moved to its place; or after the step all new
    parameters, beside the old ones whose place they take.

    Args:
        room: bytes that are free by then, when of gradients parts are left.
    """
    zero = sizes.shape.storage.zero
    if zero == 0:
        return 0.0
    if zero < 3:
        whole = _on_a_device(sizes.config, sizes.shape, 0).parameters
        return max(0.0, whole - room)
    period = max(sizes.period_weights(stack) for stack in sizes.stacks)
    used = (4 * period + sizes.table_weights) * sizes.itemsize
    return used + expert_cache.kept_bytes(sizes.model, sizes.shape)


def _slower_way(sizes: Sizes, stack: Stack) -> float:
    """Room for what `ragged` does where its buffer is too small, taken or not."""
    ragged = sizes.shape.exchange.dispatcher == "ragged" and sizes.shape.expert > 1
    return all_peers(sizes, stack) if ragged else 0.0


def _logits(sizes: Sizes) -> float:
    """Of the last micro-batch, with what the loss makes of them, in float32."""
    vocab = sizes.model.vocab_size // sizes.shape.model
    return 2 * sizes.stacks[-1].tokens * vocab * 4


def _attention(sizes: Sizes) -> float:
    """The largest scores and their gradient in float32, and that of their softmax."""
    longest = max(sizes.stacks, key=lambda stack: stack.length)
    heads = sizes.model.num_heads // sizes.shape.model
    return longest.tokens * heads * longest.length * (2 * 4 + sizes.itemsize)
