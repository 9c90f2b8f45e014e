"""What one device computes of a layout, by formula: what estimates of memory and time start from.

One micro-batch, matrix products as they run. `memory`, `wire` and `cost` build on these.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import jax.numpy as jnp

from switchjax.config import ModelConfig, RunConfig
from switchjax.data.pipeline import row_lengths
from switchjax.expert_cache import weights_of_expert
from switchjax.mesh import MeshShape
from switchjax.moe.dispatch import ragged
from switchjax.moe.routing import capacity

_capacity = cache(capacity)  # thousands of layouts ask for few


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The encoder or the decoder on one device."""

    name: str
    length: int
    """Tokens of a row."""
    tokens: int
    """Of this device's rows of a micro-batch."""
    context: int
    """Tokens of the encoder rows that it attends to; 0 without cross-attention."""


@dataclass(frozen=True)
class Sizes:
    """Of one device and one micro-batch."""

    config: RunConfig
    shape: MeshShape

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def rows(self) -> int:
        """Batch rows of a micro-batch on this device."""
        over = self.config.optim.accumulation * self.shape.data * self.shape.expert
        return self.config.data.batch_size // over

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        lengths = row_lengths(self.config.data, self.model.architecture)
        names = ("encoder", "decoder")[-len(lengths) :]
        context = self.rows * lengths[0] if len(lengths) == 2 else 0
        return tuple(
            Stack(
                name=name,
                length=length,
                tokens=self.rows * length,
                context=context if name == "decoder" else 0,
            )
            for name, length in zip(names, lengths, strict=True)
        )

    @cached_property
    def itemsize(self) -> int:
        """Bytes of a number in compute."""
        return jnp.dtype(self.model.dtype).itemsize

    @cached_property
    def reduce_itemsize(self) -> int:
        """Bytes of a number of a gradient that is summed over devices."""
        dtype = self.shape.storage.reduce_dtype
        return self.itemsize if dtype == "compute" else jnp.dtype(dtype).itemsize

    @property
    def heads(self) -> int:
        """Attention heads on this device, times their width."""
        return self.model.num_heads // self.shape.model * self.model.d_kv

    @property
    def hidden(self) -> int:
        """This device's slice of a dense layer's hidden dim."""
        return self.model.d_ff // self.shape.model

    @property
    def folded(self) -> bool:
        return self.shape.exchange.experts == "folded"

    @property
    def expert_hidden(self) -> int:
        """This device's slice of an expert's hidden dim."""
        return self.model.d_ff if self.folded else self.hidden

    @property
    def experts(self) -> int:
        """Experts on this device."""
        columns = self.shape.model if self.folded else 1
        return self.model.num_experts // (self.shape.expert * columns)

    @property
    def matrices(self) -> int:
        """Of a feed-forward layer: geglu has a gate."""
        return 3 if self.model.activation == "geglu" else 2

    @property
    def periods(self) -> int:
        """Of one stack."""
        return self.model.num_layers // max(self.model.moe_every, 1)

    @property
    def switch_layers(self) -> int:
        """Of one stack."""
        return self.model.num_layers // self.model.moe_every if self.model.moe_every else 0

    @property
    def dense_layers(self) -> int:
        """Of one stack."""
        return self.model.num_layers - self.switch_layers

    def attention_weights(self, stack: Stack) -> int:
        """Numbers of one layer, whole over `data`, as the next three."""
        return 4 * self.model.d_model * self.heads * (2 if stack.context else 1)

    @property
    def dense_weights(self) -> int:
        """Of one dense feed-forward layer."""
        return self.matrices * self.model.d_model * self.hidden

    @property
    def expert_weights(self) -> int:
        """Of this device's experts in one Switch layer."""
        return self.experts * weights_of_expert(self.model, self.shape)

    @property
    def table_weights(self) -> int:
        """Of one table of embeddings."""
        return self.model.vocab_size // self.shape.model * self.model.d_model

    @property
    def router_weights(self) -> int:
        """Of one Switch layer; in float32 always."""
        return self.model.d_model * self.model.num_experts

    def period_weights(self, stack: Stack) -> int:
        """Of one period, but for the router's."""
        switch = min(self.model.moe_every, 1)
        dense = max(self.model.moe_every, 1) - switch
        attention = (dense + switch) * self.attention_weights(stack)
        return attention + dense * self.dense_weights + switch * self.expert_weights

    def group(self, stack: Stack) -> int:
        """Tokens that compete for the same slots."""
        return self.model.group_size or stack.length

    def slots(self, stack: Stack) -> int:
        """Of one expert in one group."""
        model = self.model
        return _capacity(self.group(stack), model.num_experts, model.top_k, model.capacity_factor)

    def expert_rows(self, stack: Stack) -> int:
        """Rows that this device's experts compute in one Switch layer, empty slots included."""
        columns = self.shape.model if self.folded else 1
        if self.shape.exchange.dispatcher == "ragged":
            return int(ragged.ROOM * stack.tokens * self.model.top_k / columns)
        groups = stack.tokens // self.group(stack)
        return self.model.num_experts // columns * groups * self.slots(stack)

    def forward_flops(self, stack: Stack, *, expert_rows: float) -> float:
        """Of the layers of a stack, for one micro-batch on this device; 2 a multiply-add."""
        D, t = self.model.d_model, stack.tokens
        attention = 8 * t * D * self.heads
        if stack.context:
            attention += 4 * (t + stack.context) * D * self.heads
        dense = 2 * self.matrices * t * D * self.hidden
        layers = self.model.num_layers * attention + self.dense_layers * dense
        layers += self.switch_layers * 2 * t * D * self.model.num_experts
        experts = self.expert_flops(expert_rows=expert_rows)
        return layers + self.score_flops(stack) + experts

    def score_flops(self, stack: Stack) -> float:
        """Of those, the products of attention without a weight."""
        keys = stack.length + stack.context // self.rows
        return self.model.num_layers * 4 * stack.tokens * keys * self.heads

    def expert_flops(self, *, expert_rows: float) -> float:
        """Of those, the experts'."""
        a_layer = 2 * self.matrices * expert_rows * self.model.d_model * self.expert_hidden
        return self.switch_layers * a_layer

    def logits_flops(self) -> float:
        """Of the product with the embedding."""
        vocab = self.model.vocab_size // self.shape.model
        return 2 * self.stacks[-1].tokens * self.model.d_model * vocab
