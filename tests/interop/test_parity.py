"""Converted models compute what others computed: drops, padding and all, or by our own rules."""

import json
from functools import cache
from pathlib import Path

import builders
import hugging_face
import jax
import numpy as np
import plain_t5
import pytest
from hugging_face import VARIANTS, forward, loaded
from safetensors.numpy import load_file

from switchjax.batch import Batch
from switchjax.layout import Layout
from switchjax.moe import routing
from switchjax.moe.layer import _router_logits
from switchjax.saved_steps import named_leaves

THEIRS = Path(__file__).parent.parent / "data" / "hf_golden"
GOLDEN = dict(np.load(THEIRS / "golden.npz"))
LAYERS = ("encoder_block_1_1", "encoder_block_3_1", "decoder_block_1_2", "decoder_block_3_2")
TOLERANCE = dict(rtol=0, atol=1e-4)  # logits up to 5.8, of many sums in another order


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Converted to compute as transformers does."""
    out = tmp_path_factory.mktemp("hf") / "exact"
    said = hugging_face.take_over(THEIRS, out, hf_semantics=True)
    assert "8 slots an expert and row" in said[0]
    return out


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Converted to our own rules."""
    out = tmp_path_factory.mktemp("hf") / "ours"
    said = hugging_face.take_over(THEIRS, out)
    assert "padding takes no slot" in said[0] and "--hf-semantics keeps that" in said[0]
    assert "pre-trained alone: they fill in <extra_id_0>" in said[1]  # case 49
    return out


def batch_of(source, mask, target):
    """Rows for the model; the decoder's are all real, as they are without a mask."""
    return Batch(
        row_B=np.arange(len(source), dtype=np.int32),
        tokens_BL=target,
        segment_BL=np.ones_like(target),
        targets_BL=target,
        target_mask_BL=np.ones_like(target, bool),
        encoder_tokens_BS=source,
        encoder_segment_BS=mask,
    )


BATCH = batch_of(GOLDEN["input_ids"], GOLDEN["attention_mask"], GOLDEN["decoder_input_ids"])
REAL = [GOLDEN["attention_mask"] > 0] * 2 + [np.ones((2, 24), bool)] * 2


def run(directory, batch=BATCH, **changes):
    with jax.set_mesh(builders.mesh("single")):
        return jax.device_get(forward(loaded(directory, **changes), Layout().place(batch)))


# The other implementation's rules (case 48).


def test_the_plain_forward_is_right():
    config = json.loads((THEIRS / "config.json").read_text())
    logits = plain_t5.logits(
        load_file(THEIRS / "model.safetensors"),
        config,
        *(GOLDEN[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")),
        capacity=config["expert_capacity"],
    )
    np.testing.assert_allclose(logits, GOLDEN["logits"], **TOLERANCE)


@pytest.mark.parametrize("scan", [True, False])
def test_logits_and_drops(exact, scan):
    """Rows with padding and with drops; case 11 and 12: what drops is as much, in each layer."""
    logits, stats = run(exact, scan=scan)
    np.testing.assert_allclose(logits, GOLDEN["logits"], **TOLERANCE)
    for i, (layer, real) in enumerate(zip(LAYERS, REAL, strict=True)):
        asked = np.bincount(GOLDEN[f"expert_index__{layer}"][real], minlength=4)
        np.testing.assert_array_equal(stats.load_E[i], asked)
        kept = GOLDEN[f"dispatch_mask__{layer}"][real].sum()
        assert stats.asked[i] - stats.dropped[i] == kept < stats.asked[i]


def test_padding_too_is_as_there(exact):
    """What padding computes hangs on the experts that it asks for and on the slots that it gets."""

    def encode(model, batch):
        x_BSD = model.embedding.embed(batch.encoder_tokens_BS, "float32")
        return model.encoder(x_BSD, batch.encoder_segment_BS, None)[0]

    with jax.set_mesh(builders.mesh("single")):
        encoded = jax.jit(encode)(loaded(exact), Layout().place(BATCH))
    np.testing.assert_allclose(encoded, GOLDEN["encoder_last_hidden_state"], **TOLERANCE)
    assert (GOLDEN["attention_mask"] == 0).any()


@pytest.mark.parametrize("layer", LAYERS)
def test_every_choice_and_slot(exact, layer):
    """Of each token, padding included: the same expert, and a slot or none."""
    stack, _, block, _ = layer.split("_")
    name = f"{stack}.periods.blocks.1.switch.router_DE"
    with jax.set_mesh(builders.mesh("single")):
        router_DE = named_leaves(loaded(exact))[name][int(block) // 2]
        logits_GTE = _router_logits(GOLDEN[f"router_input__{layer}"], router_DE, 0.0, None)
        everywhere_GT = np.ones(logits_GTE.shape[:2], bool)
        choice = routing.route(logits_GTE, everywhere_GT, top_k=1, capacity=8)
    expert_GT, kept_GT = choice.expert_GTQ[..., 0], choice.kept_GTQ[..., 0]
    np.testing.assert_array_equal(expert_GT, GOLDEN[f"expert_index__{layer}"])
    np.testing.assert_array_equal(kept_GT, GOLDEN[f"dispatch_mask__{layer}"].sum(axis=-1))
    np.testing.assert_allclose(choice.gate_GTQ, GOLDEN[f"router_prob__{layer}"], rtol=1e-5)
    assert not kept_GT.all()


@pytest.mark.mesh
def test_on_a_mesh(tmp_path):
    """Parameters read by each device for itself, on axes that a vocabulary of 98 divides."""
    table = load_file(THEIRS / "model.safetensors")["shared.weight"]
    wider = {"shared.weight": np.concatenate([table, np.zeros_like(table[:1])])}
    hugging_face.rewrite(THEIRS, tmp_path / "theirs", tensors=wider, vocab_size=98)
    hugging_face.take_over(tmp_path / "theirs", tmp_path / "ours", hf_semantics=True)
    batch = jax.tree.map(lambda x: np.concatenate([x] * 4), BATCH)
    name = "data2_expert2_model2"
    with jax.set_mesh(builders.mesh(name)):
        layout = builders.layout(name)
        logits, stats = forward(loaded(tmp_path / "ours", layout), layout.place(batch))
        assert len(logits.sharding.device_set) == 8
    expected = np.concatenate([GOLDEN["logits"]] * 4)
    logits, stats = jax.device_get((logits, stats))
    np.testing.assert_allclose(logits[..., :97], expected, **TOLERANCE)
    kept = [GOLDEN[f"dispatch_mask__{x}"][r].sum() * 4 for x, r in zip(LAYERS, REAL, strict=True)]
    np.testing.assert_array_equal(stats.asked - stats.dropped, kept)


# Our rules.


def test_by_default_padding_takes_no_slot(ours):
    """S6, case 5: nine places of padding before the row's words or after them, few slots, and no
    difference; none takes a slot, and where padding does, it takes them from words."""

    def padded_first(batch):
        names = ("encoder_tokens_BS", "encoder_segment_BS")
        return batch._replace(**{n: np.roll(getattr(batch, n), 9, axis=1) for n in names})

    one = jax.tree.map(lambda x: x[1:], BATCH)
    after, stats = run(ours, one, expert_capacity=8)
    before, same_stats = run(ours, padded_first(one), expert_capacity=8)
    np.testing.assert_allclose(before, after, **TOLERANCE)
    np.testing.assert_array_equal(same_stats.dropped, stats.dropped)
    assert stats.dropped.sum() > 0 and stats.asked[0] == 31
    routed = dict(expert_capacity=8, padding_is_routed=True)
    _, other = run(ours, padded_first(one), **routed)
    assert other.dropped[0] > stats.dropped[0] and other.asked[0] == 31


def test_by_default_evaluation_drops_nothing(ours):
    """S13, and so what the plain forward gives with room for all."""
    logits, stats = run(ours)
    assert stats.dropped.sum() == 0
    expected = plain_logits(THEIRS, BATCH)
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    assert not np.allclose(logits, GOLDEN["logits"], atol=0.1)


def plain_logits(directory, batch):
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    inputs = batch.encoder_tokens_BS, batch.encoder_segment_BS, batch.tokens_BL
    return plain_t5.logits(tensors, config, *inputs)


@cache
def small_batch():
    rng = np.random.default_rng(1)
    mask = (np.arange(18)[None] < np.array([[18], [11]])).astype(np.int32)
    source, target = (rng.integers(0, 24, (2, n)).astype(np.int32) for n in (18, 9))
    return batch_of(source, mask, target)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_kind(tmp_path, variant):
    """Case 48: gated layers have their factors in the right places, logits their own table and
    scale, twelve experts their numbers; of weights that were written here."""
    hugging_face.random_weights(VARIANTS[variant], tmp_path / "ours")
    hugging_face.give(tmp_path / "ours", tmp_path / "theirs")
    logits, _ = run(tmp_path / "ours", small_batch())
    expected = plain_logits(tmp_path / "theirs", small_batch())
    np.testing.assert_allclose(logits, expected, **TOLERANCE)
    assert np.abs(expected).max() > 0.1
