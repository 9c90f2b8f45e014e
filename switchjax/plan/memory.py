"""Bytes of one device in a train step, by class and by formula.

Parameters and optimizer state are exact: shapes and layouts of the very state. Activations are what
JAX keeps from the forward pass for the backward one; `remat` keeps a row of tokens a period, and
computes one period's again when it is due.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial

import jax

from switchjax.config import Experts, ModelConfig, OptimConfig, RunConfig
from switchjax.layout import Layout
from switchjax.mesh import Exchange, MeshShape, use_abstract_mesh
from switchjax.plan.sizes import Sizes, Stack
from switchjax.saved_steps import named_leaves
from switchjax.state import init_state


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device at the fullest moment of a step."""

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    """Kept from the forward pass for the backward pass."""
    buffers: float
    """At work: of the period that is computed, the logits, what is under way."""

    @property
    def total(self) -> float:
        return self.parameters + self.optimizer + self.gradients + self.activations + self.buffers


def memory(sizes: Sizes) -> Memory:
    """Bytes of one device."""
    parameters, optimizer = state_bytes(sizes.config, sizes.shape)
    micros = sizes.config.optim.accumulation
    kept = {stack.name: _kept(sizes, stack) for stack in sizes.stacks}
    working = max(_period(sizes, stack) for stack in sizes.stacks)
    return Memory(
        parameters=parameters,
        optimizer=optimizer,
        gradients=parameters * (2 if micros > 1 else 1),  # one micro-batch's beside the sum
        activations=sum(kept.values()),
        buffers=sum(
            (
                _logits(sizes),
                _attention(sizes),
                working if sizes.model.remat == "full" else 0,
                max(map(partial(_slower_way, sizes), sizes.stacks)),
            )
        ),
    )


def state_bytes(config: RunConfig, shape: MeshShape) -> tuple[float, float]:
    """Of parameters and of the optimizer's state, on one device."""
    sums = {"model": 0.0, "opt_state": 0.0}
    # Neither of these changes the state; without them few configs are left to look at.
    model, optim = replace(config.model, remat="none"), replace(config.optim, accumulation=1)
    for part, axes, size in _arrays(model, optim, shape.exchange.experts):
        sums[part] += size / math.prod(getattr(shape, axis) for axis in axes)
    return sums["model"], sums["opt_state"]


@cache
def _arrays(
    model: ModelConfig, optim: OptimConfig, experts: Experts
) -> list[tuple[str, tuple[str, ...], float]]:
    """Part, mesh axes that split it and bytes of the arrays of the state, those alike summed."""
    config = RunConfig(model=model, optim=optim)
    exchange = Exchange(experts=experts)
    shape = MeshShape(name="one", data=1, expert=1, model=1, exchange=exchange)
    with use_abstract_mesh(shape):
        state = jax.eval_shape(partial(init_state, config, Layout.of(shape)))
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for name, leaf in named_leaves(state).items():
        part = name.split(".")[0]
        if part not in ("model", "opt_state"):
            continue
        axes: list[str] = []
        for entry in leaf.sharding.spec if leaf.sharding is not None else ():
            axes += entry if isinstance(entry, tuple) else [entry] * (entry is not None)
        at = part, tuple(sorted(axes))
        sums[at] = sums.get(at, 0.0) + leaf.size * leaf.dtype.itemsize
    return [(part, axes, size) for (part, axes), size in sums.items()]


def kept_without_remat(sizes: Sizes) -> float:
    """What all periods of all stacks keep if nothing is computed again: a measure of traffic."""
    return sizes.periods * sum(_period(sizes, stack) for stack in sizes.stacks)


def _kept(sizes: Sizes, stack: Stack) -> float:
    """From the forward pass of a stack until its backward pass."""
    unit = stack.tokens * sizes.model.d_model * sizes.itemsize
    return sizes.periods * (unit if sizes.model.remat == "full" else _period(sizes, stack)) + unit


def _period(sizes: Sizes, stack: Stack) -> float:
    """What one period keeps for its own backward pass.

    In numbers of tokens * width and the like; counted in programs compiled for GPUs.
    """
    model, c = sizes.model, sizes.itemsize
    t, D, every = stack.tokens, model.d_model, max(model.moe_every, 1)
    norms = 3 if stack.context else 2
    dropped = 1 if model.dropout else 0  # a mask is a byte
    a_layer = norms * t * D * (2.5 + 0.6 * dropped) * 4  # norms work in float32
    a_layer += 1.5 * t * D * c + norms * dropped * t * D
    scores = stack.tokens // stack.length * (model.num_heads // sizes.shape.model) * stack.length
    a_layer += scores * stack.length * (4 + c) + 4 * t * sizes.heads * c
    if stack.context:
        rows = stack.tokens // stack.length
        a_layer += scores * (stack.context // rows) * (4 + c)
        a_layer += 2 * (t + stack.context) * sizes.heads * c
    dense = t * sizes.hidden * (c * (sizes.matrices - 1) + 1 + dropped)
    total = every * a_layer + (every - (model.moe_every > 0)) * dense
    if model.moe_every:
        rows = sizes.expert_rows(stack)
        total += rows * sizes.expert_hidden * (c * (sizes.matrices - 1 + dropped) + 1)
        total += rows * D * c + t * D * 4 + 3 * t * model.num_experts * 4
        exchange = sizes.shape.exchange
        if exchange.dispatcher == "all_gather" and exchange.buffer is None:
            total += _all_peers(sizes, stack)
    return total


def _all_peers(sizes: Sizes, stack: Stack) -> float:
    """The tokens of all devices of the expert axis, and results for them."""
    return 2 * stack.tokens * sizes.shape.expert * sizes.model.d_model * sizes.itemsize


def _slower_way(sizes: Sizes, stack: Stack) -> float:
    """Room for what `ragged` does where its buffer is too small, taken or not."""
    ragged = sizes.shape.exchange.dispatcher == "ragged" and sizes.shape.expert > 1
    return _all_peers(sizes, stack) if ragged else 0.0


def _logits(sizes: Sizes) -> float:
    """Of the last micro-batch, with what the loss makes of them, in float32."""
    vocab = sizes.model.vocab_size // sizes.shape.model
    return 2 * sizes.stacks[-1].tokens * vocab * 4


def _attention(sizes: Sizes) -> float:
    """A gradient of the largest scores."""
    longest = max(sizes.stacks, key=lambda stack: stack.length)
    heads = sizes.model.num_heads // sizes.shape.model
    return longest.tokens * heads * longest.length * 4
