"""The model: blocks, stacks of them scanned over periods, encoder-decoder and decoder-only.

A *period* is `moe_every` blocks of which the last has the Switch layer. All periods of a stack are
one module whose arrays have a leading dim N, so that depth costs no compile time.

Generation runs the same blocks: a decoder that is given a cache reads new tokens alone, and looks
at those before them through the keys and values that it kept.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from switchjax import remat
from switchjax.batch import Batch
from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.moe.layer import RouterStats, SwitchLayer
from switchjax.nn import cache as caches
from switchjax.nn.attention import Attention, KeyValues, visible
from switchjax.nn.cache import Cache, Kept
from switchjax.nn.embedding import Embedding
from switchjax.nn.mlp import Mlp
from switchjax.nn.noise import Noise, dropout
from switchjax.nn.norm import RMSNorm
from switchjax.nn.position import RelativeBias, positions


class Surroundings(NamedTuple):
    """What every block of a stack sees beside the tokens themselves."""

    segment_BL: Array
    visible_BLS: Array
    bias_HLS: Array | None  # relative positions
    position_BL: Array | None  # rotary positions
    context_BSD: Array | None  # the encoder's output, unless its keys and values are kept
    context_visible_BLS: Array | None
    slot: Array | None  # of the first token, where keys and values are kept


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
        kept: Kept | None = None,
    ) -> tuple[Float[Array, "B L D"], RouterStats | None, KeyValues | None]:
        """Its output, its statistics, and where some are kept the keys and values of x."""
        normed_BLD = self.attention_norm(x_BLD)
        new = seen = self.attention.keys_values(normed_BLD, around.position_BL)
        if kept is not None:
            assert around.slot is not None
            seen = caches.written(kept.own, new, around.slot)
        y_BLD = self.attention(
            normed_BLD,
            seen,
            around.visible_BLS,
            bias_HLS=around.bias_HLS,
            position_BL=around.position_BL,
        )
        x_BLD += dropout(y_BLD, self.rate, _site(noise, 0))
        if self.cross_attention is not None:
            assert self.cross_norm is not None and around.context_visible_BLS is not None
            seen = kept.cross if kept is not None else self.look_at(around.context_BSD)
            assert seen is not None
            normed_BLD = self.cross_norm(x_BLD)
            y_BLD = self.cross_attention(normed_BLD, seen, around.context_visible_BLS)
            x_BLD += dropout(y_BLD, self.rate, _site(noise, 1))
        normed_BLD, stats = self.ff_norm(x_BLD), None
        if self.mlp is not None:
            y_BLD = self.mlp(normed_BLD, _site(noise, 2))
        else:
            assert self.switch is not None
            real_BL = around.segment_BL > 0
            y_BLD, stats = self.switch(normed_BLD, real_BL, _site(noise, 2), router_bias_E)
        x_BLD += dropout(y_BLD, self.rate, _site(noise, 3))
        return x_BLD, stats, None if kept is None else new

    def look_at(self, context_BSD: Float[Array, "B S D"] | None) -> KeyValues | None:
        """Keys and values of the encoder's output; None without one."""
        if self.cross_attention is None:
            return None
        assert context_BSD is not None
        return self.cross_attention.keys_values(context_BSD)


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
        kept: tuple[Kept, ...] | None = None,
    ) -> tuple[Float[Array, "B L D"], RouterStats | None, tuple[KeyValues | None, ...]]:
        stats, news = None, []
        for i, block in enumerate(self.blocks):
            of_block = None if kept is None else kept[i]
            x_BLD, stats, new = block(x_BLD, around, _site(noise, i), router_bias_E, of_block)
            news.append(new)
        return x_BLD, stats, tuple(news)


class Stack(nnx.Module):
    """The encoder, or the decoder: periods, then a norm."""

    def __init__(
        self, key: Array, config: ModelConfig, layout: Layout, *, causal: bool, cross: bool
    ):
        period_key, bias_key = jax.random.split(key)
        self.config = config
        self.periods = jax.vmap(lambda k: Period(k, config, layout, cross=cross))(
            jax.random.split(period_key, self.num_periods)
        )
        self.norm = RMSNorm(config.d_model, layout)
        self.relative_bias = (
            RelativeBias(bias_key, config, layout, bidirectional=not causal)
            if config.architecture == "encoder_decoder"
            else None
        )
        self.causal = causal
        self.layout = layout

    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        segment_BL: Int[Array, "B L"],
        noise: Noise | None,
        *,
        router_bias_NE: Float[Array, "N E"] | None = None,
        context_BSD: Float[Array, "B S D"] | None = None,
        context_segment_BS: Int[Array, "B S"] | None = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B L D"], RouterStats | None, Cache | None]:
        """The stack's output, the statistics of its Switch layers, stacked [layers, ...], and the
        cache with x in it.

        Args:
            cache: of what the rows hold before x, and of the encoder's output, which is not given
                then. Relative positions take the slots as they are: rows have no gap there.
        """
        around = self._around(segment_BL, context_BSD, context_segment_BS, cache)

        def body(x_BLD, of_period):
            period, index, router_bias_E, kept = of_period
            x_BLD, stats, new = period(x_BLD, around, _site(noise, index), router_bias_E, kept)
            return x_BLD, (stats, new)

        body = remat.with_policy(
            body,
            self.config.remat,
            gathers_weights=self.layout.storage.zero == 3,
            is_looped=self.config.scan,
            offloads=self.layout.storage.offload == "optimizer+activations",
        )
        num_periods = self.num_periods
        rate = self.config.dropout
        x_BLD = dropout(x_BLD, rate, _site(noise, num_periods))
        kept = None if cache is None else cache.kept
        x_BLD, (stats, news) = lax.scan(
            body,
            x_BLD,
            (self.periods, jnp.arange(num_periods), router_bias_NE, kept),
            unroll=1 if self.config.scan else num_periods,
        )
        x_BLD = dropout(self.norm(x_BLD), rate, _site(noise, num_periods + 1))
        return x_BLD, stats, None if cache is None else caches.advanced(cache, news, segment_BL)

    def _around(
        self,
        segment_BL: Array,
        context_BSD: Array | None,
        context_segment_BS: Array | None,
        cache: Cache | None,
    ) -> Surroundings:
        bias, length = self.relative_bias, segment_BL.shape[1]
        key_segment_BS, start, read_B1 = segment_BL, 0, 0
        if cache is not None:
            key_segment_BS, start = caches.with_segments(cache, segment_BL), cache.slot
            read_B1 = (cache.segment_BS > 0).sum(axis=1, keepdims=True, dtype=jnp.int32)
            context_segment_BS = cache.context_segment_BS
        num_keys = key_segment_BS.shape[1]
        return Surroundings(
            segment_BL=segment_BL,
            visible_BLS=visible(
                segment_BL,
                key_segment_BS,
                causal=self.causal,
                start=start,
                padding_sees_real=self.config.padding_is_routed,
            ),
            bias_HLS=None if bias is None else bias(length, num_keys, start),
            position_BL=read_B1 + positions(segment_BL) if bias is None else None,
            context_BSD=context_BSD,
            context_visible_BLS=None
            if context_segment_BS is None
            else visible(
                segment_BL,
                context_segment_BS,
                causal=False,
                padding_sees_real=self.config.padding_is_routed,
            ),
            slot=None if cache is None else cache.slot,
        )

    @property
    def num_periods(self) -> int:
        return self.config.num_layers // max(self.config.moe_every, 1)

    def empty_cache(
        self,
        num_rows: int,
        num_slots: int,
        context_BSD: Float[Array, "B S D"] | None,
        context_segment_BS: Int[Array, "B S"] | None,
    ) -> Cache:
        """A cache of no tokens, but for the encoder's output."""
        config, layout = self.config, self.layout
        shape = (self.num_periods, num_rows, num_slots, config.num_heads, config.d_kv)
        _, crosses = lax.scan(
            lambda _, period: (None, tuple(b.look_at(context_BSD) for b in period.blocks)),
            None,
            self.periods,
        )
        return Cache(
            tuple(Kept(caches.empty(shape, config.dtype, layout), cross) for cross in crosses),
            jnp.zeros((num_rows, num_slots), jnp.int32, out_sharding=layout.tokens_bl),
            context_segment_BS,
            jnp.int32(0),
        )


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
        context_BSD, encoder_stats = self._encode(
            batch.encoder_tokens_BS, batch.encoder_segment_BS, noise, router_bias_XE
        )
        x_BLD = self.embedding.embed(batch.tokens_BL, self.dtype)
        x_BLD, decoder_stats, _ = self.decoder(
            x_BLD,
            batch.segment_BL,
            _site(noise, 1),
            router_bias_NE=self._decoder_bias(router_bias_XE),
            context_BSD=context_BSD,
            context_segment_BS=batch.encoder_segment_BS,
        )
        stats = [decoder_stats] if self.encoder is None else [encoder_stats, decoder_stats]
        logits_BLV = self.embedding.logits(x_BLD)
        return logits_BLV, jax.tree.map(lambda *s: jnp.concatenate(s), *stats)

    def start_cache(
        self,
        num_rows: int,
        num_slots: int,
        encoder_tokens_BS: Int[Array, "B S"] | None,
        encoder_segment_BS: Int[Array, "B S"] | None,
        router_bias_XE: Float[Array, "X E"] | None = None,
    ) -> Cache:
        """The cache of a decoder that has read nothing, in room for `num_slots` tokens a row.

        The encoder, if there is one, reads its tokens here, as at evaluation.
        """
        context_BSD, _ = self._encode(encoder_tokens_BS, encoder_segment_BS, None, router_bias_XE)
        return self.decoder.empty_cache(num_rows, num_slots, context_BSD, encoder_segment_BS)

    def read(
        self,
        tokens_BL: Int[Array, "B L"],
        segment_BL: Int[Array, "B L"],
        cache: Cache,
        router_bias_XE: Float[Array, "X E"] | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Logits of what follows the last real one of these tokens, and the cache with them in it.

        Logits are meaningless in a row without a real token. Each token has the numbers that a
        whole evaluation of its row would give, in which no choice of experts drops.
        """
        x_BLD = self.embedding.embed(tokens_BL, self.dtype)
        bias_NE = self._decoder_bias(router_bias_XE)
        x_BLD, _, new_cache = self.decoder(
            x_BLD, segment_BL, None, router_bias_NE=bias_NE, cache=cache
        )
        assert new_cache is not None
        real_BL = segment_BL > 0
        index_BL = lax.broadcasted_iota(jnp.int32, segment_BL.shape, 1)
        last_B1 = jnp.where(real_BL, index_BL, -1).max(axis=1, keepdims=True)
        is_last_BL1 = (index_BL == last_B1)[..., None]
        x_B1D = jnp.where(is_last_BL1, x_BLD, 0).sum(axis=1, keepdims=True)
        return self.embedding.logits(x_B1D)[:, 0], new_cache

    def _encode(
        self,
        tokens_BS: Array | None,
        segment_BS: Array | None,
        noise: Noise | None,
        router_bias_XE: Array | None,
    ) -> tuple[Array | None, RouterStats | None]:
        """The encoder's output and statistics; nothing without an encoder."""
        if self.encoder is None:
            return None, None
        assert tokens_BS is not None and segment_BS is not None
        bias_NE = None if router_bias_XE is None else jnp.split(router_bias_XE, 2)[0]
        x_BSD = self.embedding.embed(tokens_BS, self.dtype)
        x_BSD, stats, _ = self.encoder(x_BSD, segment_BS, _site(noise, 0), router_bias_NE=bias_NE)
        return x_BSD, stats

    def _decoder_bias(self, router_bias_XE: Array | None) -> Array | None:
        if router_bias_XE is None or self.encoder is None:
            return router_bias_XE
        return jnp.split(router_bias_XE, 2)[1]


def switch_layer_names(config: ModelConfig) -> tuple[str, ...]:
    """Names of the Switch layers in the order of the statistics, layers counted from 1."""
    if config.moe_every == 0:
        return ()
    stacks = ("encoder", "decoder") if config.architecture == "encoder_decoder" else ("decoder",)
    layers = range(config.moe_every, config.num_layers + 1, config.moe_every)
    return tuple(f"{stack} {layer}" for stack in stacks for layer in layers)
