"""The model: blocks, stacks of them scanned over periods, encoder-decoder and decoder-only.

A *period* is `moe_every` blocks of which the last has the Switch layer. All periods of a stack are
one module whose arrays have a leading dim N, so that depth costs no compile time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from switchjax.batch import Batch
from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.moe.layer import RouterStats, SwitchLayer
from switchjax.nn.attention import Attention, visible
from switchjax.nn.embedding import Embedding
from switchjax.nn.mlp import Mlp
from switchjax.nn.noise import Noise, dropout
from switchjax.nn.norm import RMSNorm
from switchjax.nn.position import RelativeBias, positions


class Surroundings(NamedTuple):
    """What every block of a stack sees beside the tokens themselves."""

    segment_BL: Array
    visible_BLL: Array
    bias_HLL: Array | None  # relative positions
    position_BL: Array | None  # rotary positions
    context_BSD: Array | None  # the encoder's output
    context_visible_BLS: Array | None


def _site(noise: Noise | None, site: int | Array) -> Noise | None:
    return None if noise is None else noise.at(site)


class Block(nnx.Module):
    """Attention, attention to the encoder if there is one, feed-forward: each normed and added."""

    def __init__(
        self, key: Array, config: ModelConfig, layout: Layout, *, cross: bool, switch: bool
    ):
        keys = jax.random.split(key, 3)
        self.attention_norm = RMSNorm(config.d_model, layout)
        self.attention = Attention(keys[0], config, layout)
        self.cross_norm = RMSNorm(config.d_model, layout) if cross else None
        self.cross_attention = Attention(keys[1], config, layout) if cross else None
        self.ff_norm = RMSNorm(config.d_model, layout)
        self.mlp = None if switch else Mlp(keys[2], config, layout)
        # A block without cross-attention is an encoder's, or of a decoder alone, whose config does
        # not let experts choose.
        router_kind = "top_k" if cross else config.encoder_router
        self.switch = (
            SwitchLayer(keys[2], config, layout, router_kind=router_kind) if switch else None
        )
        self.rate = config.dropout

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        around: Surroundings,
        noise: Noise | None,
        router_bias_E: Float[Array, "E"] | None,
    ) -> tuple[Float[Array, "B L D"], RouterStats | None]:
        normed_BLD = self.attention_norm(x_BLD)
        y_BLD = self.attention(
            normed_BLD,
            normed_BLD,
            around.visible_BLL,
            bias_HLS=around.bias_HLL,
            position_BL=around.position_BL,
        )
        x_BLD += dropout(y_BLD, self.rate, _site(noise, 0))
        if self.cross_attention is not None:
            assert self.cross_norm is not None and around.context_BSD is not None
            assert around.context_visible_BLS is not None
            normed_BLD = self.cross_norm(x_BLD)
            y_BLD = self.cross_attention(normed_BLD, around.context_BSD, around.context_visible_BLS)
            x_BLD += dropout(y_BLD, self.rate, _site(noise, 1))
        normed_BLD, stats = self.ff_norm(x_BLD), None
        if self.mlp is not None:
            y_BLD = self.mlp(normed_BLD, _site(noise, 2))
        else:
            assert self.switch is not None
            real_BL = around.segment_BL > 0
            y_BLD, stats = self.switch(normed_BLD, real_BL, _site(noise, 2), router_bias_E)
        return x_BLD + dropout(y_BLD, self.rate, _site(noise, 3)), stats


class Period(nnx.Module):
    """The smallest run of blocks that repeats: some dense ones, then at most one Switch block."""

    def __init__(self, key: Array, config: ModelConfig, layout: Layout, *, cross: bool):
        length = max(config.moe_every, 1)
        self.blocks = nnx.List(
            Block(k, config, layout, cross=cross, switch=i + 1 == config.moe_every)
            for i, k in enumerate(jax.random.split(key, length))
        )

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        around: Surroundings,
        noise: Noise | None,
        router_bias_E: Float[Array, "E"] | None,
    ) -> tuple[Float[Array, "B L D"], RouterStats | None]:
        stats = None
        for i, block in enumerate(self.blocks):
            x_BLD, stats = block(x_BLD, around, _site(noise, i), router_bias_E)
        return x_BLD, stats


class Stack(nnx.Module):
    """The encoder, or the decoder: periods, then a norm."""

    def __init__(
        self, key: Array, config: ModelConfig, layout: Layout, *, causal: bool, cross: bool
    ):
        period_key, bias_key = jax.random.split(key)
        num_periods = config.num_layers // max(config.moe_every, 1)
        self.periods = jax.vmap(lambda k: Period(k, config, layout, cross=cross))(
            jax.random.split(period_key, num_periods)
        )
        self.norm = RMSNorm(config.d_model, layout)
        self.relative_bias = (
            RelativeBias(bias_key, config, layout, bidirectional=not causal)
            if config.architecture == "encoder_decoder"
            else None
        )
        self.causal = causal
        self.config = config

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        segment_BL: Int[Array, "B L"],
        noise: Noise | None,
        *,
        router_bias_NE: Float[Array, "N E"] | None = None,
        context_BSD: Float[Array, "B S D"] | None = None,
        context_segment_BS: Int[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B L D"], RouterStats | None]:
        """The stack's output and the statistics of its Switch layers, stacked [layers, ...]."""
        bias, padding_sees_real = self.relative_bias, self.config.padding_is_routed
        around = Surroundings(
            segment_BL=segment_BL,
            visible_BLL=visible(
                segment_BL,
                segment_BL,
                causal=self.causal,
                padding_sees_real=padding_sees_real,
            ),
            bias_HLL=None if bias is None else bias(x_BLD.shape[1]),
            position_BL=positions(segment_BL) if bias is None else None,
            context_BSD=context_BSD,
            context_visible_BLS=None
            if context_segment_BS is None
            else visible(
                segment_BL,
                context_segment_BS,
                causal=False,
                padding_sees_real=padding_sees_real,
            ),
        )

        def body(x_BLD, of_period):
            period, index, router_bias_E = of_period
            return period(x_BLD, around, _site(noise, index), router_bias_E)

        if self.config.remat:
            body = jax.checkpoint(body, prevent_cse=not self.config.scan)
        num_periods = self.config.num_layers // max(self.config.moe_every, 1)
        rate = self.config.dropout
        x_BLD = dropout(x_BLD, rate, _site(noise, num_periods))
        x_BLD, stats = lax.scan(
            body,
            x_BLD,
            (self.periods, jnp.arange(num_periods), router_bias_NE),
            unroll=1 if self.config.scan else num_periods,
        )
        return dropout(self.norm(x_BLD), rate, _site(noise, num_periods + 1)), stats


class SwitchTransformer(nnx.Module):
    """T5's encoder-decoder, or a decoder alone, with Switch layers.

    Source: Switch Transformer, arXiv:2101.03961; T5, arXiv:1910.10683, section 2.1.
    """

    def __init__(self, key: Array, config: ModelConfig, layout: Layout):
        keys = jax.random.split(key, 3)
        both = config.architecture == "encoder_decoder"
        self.embedding = Embedding(keys[0], config, layout)
        self.encoder = Stack(keys[1], config, layout, causal=False, cross=False) if both else None
        self.decoder = Stack(keys[2], config, layout, causal=True, cross=both)
        self.dtype = config.dtype

    def __call__(
        self,
        batch: Batch,
        noise: Noise | None,
        router_bias_XE: Float[Array, "X E"] | None = None,
    ) -> tuple[Float[Array, "B L V"], RouterStats | None]:
        """Logits, and the statistics of all Switch layers [layers, ...], encoder first.

        Args:
            noise: of training; None at evaluation.
            router_bias_XE: what the state holds, its layers in the order of the statistics.
        """
        context_BSD, stats, decoder_bias_NE = None, [], router_bias_XE
        if self.encoder is not None:
            assert batch.encoder_tokens_BS is not None and batch.encoder_segment_BS is not None
            encoder_bias_NE = None
            if router_bias_XE is not None:
                encoder_bias_NE, decoder_bias_NE = jnp.split(router_bias_XE, 2)
            x_BSD = self.embedding.embed(batch.encoder_tokens_BS, self.dtype)
            context_BSD, encoder_stats = self.encoder(
                x_BSD, batch.encoder_segment_BS, _site(noise, 0), router_bias_NE=encoder_bias_NE
            )
            stats.append(encoder_stats)
        x_BLD = self.embedding.embed(batch.tokens_BL, self.dtype)
        x_BLD, decoder_stats = self.decoder(
            x_BLD,
            batch.segment_BL,
            _site(noise, 1),
            router_bias_NE=decoder_bias_NE,
            context_BSD=context_BSD,
            context_segment_BS=batch.encoder_segment_BS,
        )
        stats.append(decoder_stats)
        logits_BLV = self.embedding.logits(x_BLD)
        return logits_BLV, jax.tree.map(lambda *s: jnp.concatenate(s), *stats)


def switch_layer_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of the Switch layers in the order of the statistics, layers counted from 1."""
    if config.moe_every == 0:
        return ()
    stacks = ("encoder", "decoder") if config.architecture == "encoder_decoder" else ("decoder",)
    layers = range(config.moe_every, config.num_layers + 1, config.moe_every)
    return tuple(f"{stack} {layer}" for stack in stacks for layer in layers)
