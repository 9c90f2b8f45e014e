"""Models as a whole: who can see whom, and what must not change the numbers."""

from dataclasses import replace
from functools import cache

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from switchjax.batch import Batch
from switchjax.config import ModelConfig
from switchjax.layout import Layout
from switchjax.model import SwitchTransformer, switch_layer_names
from switchjax.moe.layer import RouterStats
from switchjax.nn.noise import Noise
from switchjax.state import keys
from switchjax.step import eval_step

LOGITS = dict(rtol=1e-4, atol=1e-5)  # values, of order 1, of many sums in another order

ARCHITECTURES = ("encoder_decoder", "decoder_only")
# One Switch block a stack; `DEEP` below has dense ones too.
SMALL = replace(builders.MODEL, num_heads=2, d_kv=8, num_experts=4, num_layers=1, moe_every=1)


@cache
def make(config: ModelConfig) -> SwitchTransformer:
    """On one device."""
    key = keys(builders.run_config(config))[0]
    with jax.set_mesh(builders.mesh("single")):
        return jax.jit(lambda: SwitchTransformer(key, config, Layout()))()


@cache
def compiled(config: ModelConfig, *, training: bool):
    def forward(model: SwitchTransformer, batch: Batch) -> tuple[Array, RouterStats | None]:
        return model(batch, Noise(jax.random.key(7), batch.row_B) if training else None)

    return jax.jit(forward)


def run(
    config: ModelConfig, batch: Batch, *, training: bool = False
) -> tuple[np.ndarray, RouterStats | None]:
    """Logits and statistics, of training (with its capacity and noise) or of evaluation."""
    with jax.set_mesh(builders.mesh("single")):
        placed = Layout().place(batch)
        return jax.device_get(compiled(config, training=training)(make(config), placed))


def of(config: ModelConfig, architecture: str) -> ModelConfig:
    return replace(config, architecture=architecture)


# Who sees whom.


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_decoder_does_not_see_later_tokens(architecture):
    """The gradient of position t's logits with respect to what the decoder reads later is zero.

    Tokens are integers, so the gradient is taken with respect to the embedding's rows: every
    position reads a word of its own, and a later word's row must not matter to position t. The
    output table is the same one, but t's logits are summed over V with weights that are zero for
    the words that are read.
    """
    config = of(SMALL, architecture)
    batch = builders.random_batch(config, rows=1, padding=0.0)
    length = batch.tokens_BL.shape[1]
    words = np.arange(length, dtype=np.int32)[None, :]  # position t reads word t
    batch = batch._replace(tokens_BL=words)
    if batch.encoder_tokens_BS is not None:
        batch = batch._replace(encoder_tokens_BS=np.full_like(batch.encoder_tokens_BS, length))
    watched = length // 2

    def logit(model: SwitchTransformer, batch: Batch) -> Array:
        logits_BLV, _ = model(batch, None)
        weight_LV = np.zeros(logits_BLV.shape[1:], np.float32)
        weight_LV[watched, length + 1 :] = 1
        return (logits_BLV * weight_LV[None]).sum()

    with jax.set_mesh(builders.mesh("single")):
        gradient = jax.jit(jax.grad(logit))(make(config), Layout().place(batch))
    size_V = np.abs(np.asarray(gradient.embedding.embed_VD.get_value())).max(axis=1)
    assert (size_V[: watched + 1] > 0).all()  # it sees itself and all before
    assert (size_V[watched + 1 : length] == 0).all()  # and nothing after


def packed(config: ModelConfig) -> Batch:
    """Rows of two documents: tokens 0-5 and 6-7 of the decoder, 0-9 and 10-13 of the encoder."""
    batch = builders.random_batch(config, rows=4, padding=0.0)
    segment_BL = np.repeat([[1] * 6 + [2] * 2], 4, axis=0).astype(np.int32)
    encoder_BS = np.repeat([[1] * 10 + [2] * 4 + [0] * 2], 4, axis=0).astype(np.int32)
    return batch._replace(
        segment_BL=segment_BL,
        encoder_segment_BS=None if batch.encoder_segment_BS is None else encoder_BS,
    )


def with_other_words(batch: Batch, segment: int) -> Batch:
    """Other tokens in one segment (0: in the padding) of encoder and decoder."""

    def change(tokens: np.ndarray | None, segments: np.ndarray | None) -> np.ndarray | None:
        return None if tokens is None else np.where(segments == segment, 31 - tokens, tokens)

    return batch._replace(
        tokens_BL=change(batch.tokens_BL, batch.segment_BL),
        encoder_tokens_BS=change(batch.encoder_tokens_BS, batch.encoder_segment_BS),
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("changed", [1, 2])
def test_packed_documents_do_not_see_each_other(architecture, changed):
    """Case 43, through self- and cross-attention; nothing drops, since drops couple documents."""
    config = of(SMALL, architecture)
    batch = packed(config)
    before, _ = run(config, batch)
    after, _ = run(config, with_other_words(batch, changed))
    same = batch.segment_BL != changed
    np.testing.assert_array_equal(after[same], before[same])
    assert not np.allclose(after[~same], before[~same], atol=1e-3)


def test_cross_attention_keeps_documents_apart():
    """Case 43: only the encoder's words of document 1 change, and only document 1 notices."""
    batch = packed(SMALL)
    changed = with_other_words(batch, 1)._replace(tokens_BL=batch.tokens_BL)
    before, _ = run(SMALL, batch)
    after, _ = run(SMALL, changed)
    np.testing.assert_array_equal(after[:, 6:], before[:, 6:])
    assert (after[:, :6] != before[:, :6]).any(axis=-1).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_document_is_the_same_alone_and_packed(architecture):
    """Case 43: positions restart at every document, in the decoder at least."""
    config = of(SMALL, architecture)
    batch = packed(config)
    together, _ = run(config, batch)

    def cut(x: np.ndarray | None, segments: np.ndarray | None) -> np.ndarray | None:
        """Document 2 moved to the front, padding behind."""
        if x is None:
            return None
        count = int((segments[0] == 2).sum())
        alone = np.zeros_like(x)
        alone[:, :count] = x[:, segments[0] == 2]
        return alone

    alone, _ = run(
        config,
        batch._replace(
            tokens_BL=cut(batch.tokens_BL, batch.segment_BL),
            segment_BL=cut(batch.segment_BL, batch.segment_BL) // 2,
            encoder_tokens_BS=cut(batch.encoder_tokens_BS, batch.encoder_segment_BS),
            encoder_segment_BS=None
            if batch.encoder_segment_BS is None
            else cut(batch.encoder_segment_BS, batch.encoder_segment_BS) // 2,
        ),
    )
    np.testing.assert_allclose(alone[:, :2], together[:, 6:], **LOGITS)


# Padding (S6, cases 4 and 5). Groups are half a row here: added padding makes groups of its own.

GROUPED = replace(SMALL, capacity_factor=1.0, group_size=4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_padding_holds_does_not_matter(architecture):
    """S6: padding is where the segment is 0, whatever word stands there."""
    config = of(GROUPED, architecture)
    batch = builders.random_batch(config)
    real = batch.segment_BL > 0
    before, stats = run(config, batch, training=True)
    after, other_stats = run(config, with_other_words(batch, 0), training=True)
    np.testing.assert_array_equal(after[real], before[real])
    jax.tree.map(np.testing.assert_array_equal, stats, other_stats)
    assert stats.dropped.sum() > 0


def padded(x: np.ndarray | None, *, value: int) -> np.ndarray | None:
    return None if x is None else np.pad(x, ((0, 0), (0, 8)), constant_values=value)


@pytest.mark.parametrize("side", ["encoder", "decoder", "decoder_only"])
def test_more_padding_changes_nothing(side):
    """S6, cases 4 and 5: eight more columns, with drops on: same logits, losses, load, drops."""
    architecture = "decoder_only" if side == "decoder_only" else "encoder_decoder"
    config = of(GROUPED, architecture)
    batch = builders.random_batch(config)
    length = batch.tokens_BL.shape[1]
    if side == "encoder":
        longer = batch._replace(
            encoder_tokens_BS=padded(batch.encoder_tokens_BS, value=5),
            encoder_segment_BS=padded(batch.encoder_segment_BS, value=0),
        )
    else:
        longer = batch._replace(
            tokens_BL=padded(batch.tokens_BL, value=5),
            segment_BL=padded(batch.segment_BL, value=0),
        )
    real = batch.segment_BL > 0
    before, stats = run(config, batch, training=True)
    after, other_stats = run(config, longer, training=True)
    np.testing.assert_allclose(after[:, :length][real], before[real], **LOGITS)
    np.testing.assert_array_equal(other_stats.load_E, stats.load_E)
    np.testing.assert_array_equal(other_stats.dropped, stats.dropped)
    np.testing.assert_allclose(other_stats.balance, stats.balance, rtol=1e-5)
    np.testing.assert_allclose(other_stats.z, stats.z, rtol=1e-5)
    assert stats.dropped.sum() > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_of_padding_alone_are_harmless(architecture):
    """The odd last batch of an evaluation: finite, and the other rows do not notice."""
    config = of(SMALL, architecture)
    batch = builders.random_batch(config, rows=4)
    empty = [0, 0, 1, 1]
    half = Batch(
        *(
            x
            if name not in ("segment_BL", "encoder_segment_BS") or x is None
            else x * np.array(empty, np.int32)[::-1, None]
            for name, x in batch._asdict().items()
        )
    )
    whole, _ = run(config, batch)
    logits, stats = run(config, half)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits[:2], whole[:2])
    choices = (half.segment_BL > 0).sum()
    assert stats.load_E[-1].sum() == choices


# Evaluation (S13, cases 21 and 22).


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_evaluation_drops_nothing_and_rows_are_independent(architecture):
    """S13, case 22: a row alone gives what it gives among others, with the tightest training."""
    config = of(replace(SMALL, capacity_factor=0.01, jitter=0.5, dropout=0.5), architecture)
    batch = builders.random_batch(config, rows=4, padding=0.1)
    together, stats = run(config, batch)
    assert stats.dropped.sum() == 0
    alone, _ = run(config, jax.tree.map(lambda x: x[2:3], batch))
    np.testing.assert_allclose(alone[0], together[2], **LOGITS)
    again, _ = run(config, batch)
    np.testing.assert_array_equal(again, together)
    plain, _ = run(of(SMALL, architecture), batch)  # case 21: noise and capacity are training's
    np.testing.assert_array_equal(plain, together)
    noisy, stats = run(config, batch, training=True)
    assert stats.dropped.sum() > 0 and not np.allclose(noisy, together, atol=1e-2)


NOISES = (dict(dropout=0.2, expert_dropout=0.0), dict(expert_dropout=0.2), dict(jitter=0.3))


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_rows_draw_their_own_noise(noise):
    """S10, case 21: rows of the same words, wherever they lie, differ by their noise alone."""
    config = replace(of(SMALL, "decoder_only"), capacity_factor=4.0, **noise)
    batch = builders.random_batch(config, rows=4, padding=0.0)
    batch = jax.tree.map(lambda x: np.repeat(x[:1], 4, axis=0), batch)
    batch = batch._replace(row_B=np.array([0, 1, 2, 1], np.int32))
    logits, _ = run(config, batch, training=True)
    for other in (1, 2):
        assert (logits[0] != logits[other]).any()
    assert (logits[1] != logits[2]).any()
    np.testing.assert_array_equal(logits[3], logits[1])  # numbered as one: the same noise
    plain, _ = run(config, batch)
    np.testing.assert_array_equal(plain, np.repeat(plain[:1], 4, axis=0))


def test_an_evaluation_capacity_is_obeyed_and_reported():
    """S13: who asks for a capacity at evaluation is told what dropped."""
    config = replace(SMALL, eval_capacity_factor=0.5)
    with jax.set_mesh(builders.mesh("single")):
        _, stats = jax.jit(eval_step)(
            make(config), None, Layout().place(builders.random_batch(config))
        )
    assert stats.dropped.sum() > 0


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_layer_has_the_bias_of_its_own_row(architecture, scan):
    """Case 63: a bias larger than any probability, in row x on expert x; and it moves no gate."""
    config = replace(of(SMALL, architecture), num_layers=4, moe_every=2, scan=scan)
    batch = builders.random_batch(config)
    X, E = len(switch_layer_names(config)), config.num_experts
    assert 1 < X <= E
    with jax.set_mesh(builders.mesh("single")):
        bias_XE, placed = 2 * jnp.eye(X, E), Layout().place(batch)
        compiled = jax.jit(eval_step)
        _, stats = jax.device_get(compiled(make(config), bias_XE, placed))
        zeros, plain = jax.device_get(
            [compiled(make(config), bias, placed) for bias in (0 * bias_XE, None)]
        )
    np.testing.assert_array_equal(stats.load_E > 0, np.eye(X, E))
    np.testing.assert_array_equal(zeros[1].load_E, plain[1].load_E)
    assert zeros[0].nats == plain[0].nats


def test_experts_choose_in_the_encoder_alone():
    """There all have the same load, even with a bias, and the decoder's have not."""
    config = replace(SMALL, encoder_router="expert_choice")
    batch = builders.random_batch(config)
    with jax.set_mesh(builders.mesh("single")):
        bias_XE, placed = jnp.eye(2, config.num_experts), Layout().place(batch)
        _, stats = jax.device_get(jax.jit(eval_step)(make(config), bias_XE, placed))
    encoder, decoder = stats.load_E
    assert len(set(encoder.tolist())) == 1 and len(set(decoder.tolist())) > 1
    tokens = [(s > 0).sum() for s in (batch.encoder_segment_BS, batch.segment_BL)]
    assert stats.asked.tolist() == tokens
    assert decoder.sum() == tokens[1] and stats.dropped[1] == 0


# What must not change the numbers.

DEEP = replace(
    SMALL,
    num_layers=4,
    moe_every=2,
    architecture="decoder_only",
    capacity_factor=1.0,
    jitter=0.1,
    dropout=0.1,
)


# XLA may leave out roundings to a narrow dtype, and does so by what it fuses.
AS_WRITTEN = {"xla_allow_excess_precision": False}


def loss_and_gradient(
    config: ModelConfig, batch: Batch, *, tied_router: bool = False
) -> tuple[np.ndarray, dict]:
    """In training, of a model that knows its config; parameters do not depend on scan and remat."""
    model = make(config)
    if tied_router:
        router_NDE = model.decoder.periods.blocks[1].switch.router_DE
        first_ND1 = router_NDE.get_value()[..., :1]
        tied_NDE = jnp.broadcast_to(first_ND1, router_NDE.get_value().shape)
        model = jax.tree.map(lambda x: x, model)  # a copy
        model.decoder.periods.blocks[1].switch.router_DE = nnx.Param(tied_NDE)

    def loss(model: SwitchTransformer, batch: Batch) -> Array:
        logits_BLV, router = model(batch, Noise(jax.random.key(7), batch.row_B))
        return jnp.square(logits_BLV).mean() + router.balance.sum() + router.z.sum()

    with jax.set_mesh(builders.mesh("single")):
        differentiate = jax.jit(jax.value_and_grad(loss), compiler_options=AS_WRITTEN)
        value, gradient = differentiate(model, Layout().place(batch))
    return np.asarray(value), builders.host_leaves(gradient)


@cache
def plain_loss_and_gradient() -> tuple[np.ndarray, dict]:
    return loss_and_gradient(DEEP, builders.random_batch(DEEP))


@pytest.mark.parametrize(
    "change",
    [
        dict(scan=False),
        dict(remat="moe"),
        dict(remat="moe", scan=False),
        dict(remat="dots"),
        dict(remat="full"),
        dict(remat="full", scan=False),
    ],
    ids=str,
)
def test_scan_and_remat_change_nothing(change):
    """Noise and drops are on: a layer that is computed again draws and drops the same."""
    value, gradient = loss_and_gradient(replace(DEEP, **change), builders.random_batch(DEEP))
    expected_value, expected = plain_loss_and_gradient()
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    assert gradient.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(
            gradient[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("remat", ["moe", "dots", "full"])
def test_remat_routes_ties_alike(remat):
    """Case 38: the same word everywhere and the same column for every expert of the router, so that
    all logits tie, in bfloat16: a recomputed layer must choose as it did before. Bitwise.
    """
    config = replace(DEEP, jitter=0.0, dropout=0.0, dtype="bfloat16")
    batch = builders.random_batch(config, padding=0.0)
    batch = batch._replace(tokens_BL=np.full_like(batch.tokens_BL, 3))
    value, gradient = loss_and_gradient(config, batch, tied_router=True)
    again, recomputed = loss_and_gradient(replace(config, remat=remat), batch, tied_router=True)
    np.testing.assert_array_equal(again, value)
    for name, leaf in gradient.items():
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(recomputed[name], leaf, name)
    used_NE = np.abs(gradient[EXPERTS]).max(axis=(2, 3)) > 0
    np.testing.assert_array_equal(used_NE, [[True, False, False, False]] * 2)  # S2: the lowest


EXPERTS = ".decoder.periods.blocks[1].switch.experts.w_in_EDF"


# What a model is made of.


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_dense_model_has_no_experts(architecture):
    config = replace(of(SMALL, architecture), moe_every=0)
    names = builders.named_leaves(make(config))
    assert not [n for n in names if "switch" in n or "router" in n or "EDF" in n]
    logits, stats = run(config, builders.random_batch(config))
    assert stats is None and np.isfinite(logits).all()
    assert switch_layer_names(config) == ()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_is_for_computing_alone(architecture):
    """Parameters, logits and the router's statistics stay float32, and the numbers are close."""
    config = replace(of(SMALL, architecture), dtype="bfloat16")
    batch = builders.random_batch(config, rows=4)
    assert {x.dtype for x in jax.tree.leaves(make(config))} == {np.dtype("float32")}
    logits, router = run(config, batch)
    assert logits.dtype == router.balance.dtype == router.z.dtype == np.float32
    assert router.load_E.dtype == router.dropped.dtype == np.int32
    expected, _ = run(of(SMALL, architecture), batch)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 2e-2  # of the size of bfloat16's rounding


def test_names_of_switch_layers_follow_the_statistics():
    config = replace(SMALL, num_layers=4, moe_every=2)
    names = switch_layer_names(config)
    assert names == ("encoder 2", "encoder 4", "decoder 2", "decoder 4")
    assert switch_layer_names(of(config, "decoder_only")) == ("decoder 2", "decoder 4")
    every = replace(config, moe_every=1, architecture="decoder_only")
    assert switch_layer_names(every) == ("decoder 1", "decoder 2", "decoder 3", "decoder 4")
    batch = builders.random_batch(config)
    with jax.set_mesh(builders.mesh("single")):
        _, stats = jax.jit(eval_step)(make(config), None, Layout().place(batch))
    tokens = [(batch.encoder_segment_BS > 0).sum(), (batch.segment_BL > 0).sum()]
    np.testing.assert_array_equal(stats.load_E.sum(axis=1), np.repeat(tokens, 2))
