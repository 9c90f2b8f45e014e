"""Continuations with a cache are those of reading everything again, whatever is beside them."""

from dataclasses import replace
from functools import cache, partial

import builders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from small_meshes import put

from switchjax.batch import Batch, Prompts
from switchjax.config import RunConfig, write_config
from switchjax.data.prompts import prompt_rows
from switchjax.data.tokenizer import ByteTokenizer
from switchjax.decode import decode, start
from switchjax.errors import UserError
from switchjax.generate import drop_free, generate
from switchjax.generate_config import GenerateConfig
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.sampling import Sampling, Vocabulary
from switchjax.saved_steps import named_leaves
from switchjax.weights import ROUTER_BIAS, write_weights

CLOSE = dict(rtol=1e-5, atol=1e-5)
OTHER_SUMS = dict(rtol=1e-4, atol=1e-5)  # values of order 1, summed over devices
ROWS, LENGTH, NEW = 8, 8, 16
NEVER_ENDS = Vocabulary(size=31, pad_id=0, eos_id=-1)
GREEDY, HOT = Sampling(), Sampling(temperature=1.0, top_k=20, top_p=0.9)

MODEL = replace(builders.MODEL, moe_every=1, top_k=2, init_scale=4.0)  # two periods of a block
KINDS = {
    "encoder_decoder": MODEL,
    "decoder_only": replace(MODEL, architecture="decoder_only", num_layers=4, moe_every=2),
    "experts choose": replace(
        MODEL, encoder_router="expert_choice", remat="full", scan=False, activation="geglu"
    ),
}
PROMPTS = [
    np.random.default_rng(i).integers(2, 31, length).astype(np.int32)
    for i, length in enumerate((5, 8, 2))
]


def layout_of(mesh: str, kind: str) -> Layout:
    return Layout.of(read_mesh(mesh, "ragged" if kind == "decoder_only" else None))


@cache
def model_of(kind: str, mesh: str = "single"):
    """A model that does not say what it has just read.

    It would since its table of words is also that of answers; signs on what the table sees undo it.
    """
    layout = layout_of(mesh, kind)
    model = builders.start(builders.run_config(KINDS[kind]), layout).model
    signs_D = np.random.default_rng(0).choice(np.float32([-1, 1]), MODEL.d_model)
    model.decoder.norm.norm_D = nnx.Param(put(signs_D, layout.norm_d))
    return model


def rows_of(kind: str, prompts) -> Prompts:
    return prompt_rows(
        prompts,
        length=LENGTH,
        num_rows=ROWS,
        pad_id=0,
        architecture=KINDS[kind].architecture,
    )


@cache
def program(kind: str, sampling: Sampling = GREEDY, eos_id: int = -1):
    vocabulary = NEVER_ENDS._replace(eos_id=eos_id)
    return jax.jit(partial(decode, max_new_tokens=NEW, vocabulary=vocabulary, sampling=sampling))


def continued(kind, prompts, *, mesh="single", seed=0, **how):
    """Tokens [8, 16] of 8 rows, and how often the decoder read."""
    prompts = prompts if isinstance(prompts, Prompts) else rows_of(kind, prompts)
    with jax.set_mesh(builders.mesh(mesh)):
        model, layout = model_of(kind, mesh), layout_of(mesh, kind)
        key = jax.random.key(seed)
        said = program(kind, **how)(model, None, layout.place(prompts), key)
        return np.asarray(said.tokens_BM), int(said.passes)


@cache
def greedy(kind: str) -> np.ndarray:
    return continued(kind, PROMPTS)[0]


def cached_logits(model, prompts, tokens_BM):
    """Before each token of a continuation, from a decoder that keeps what it read [M, B, V]."""
    logits_BV, cache, read = start(model, None, prompts, NEW, NEVER_ENDS)

    def body(cache, token_B):
        logits_BV, cache = read(token_B[:, None], jnp.ones_like(token_B)[:, None], cache)
        return cache, logits_BV

    _, later_MBV = lax.scan(body, cache, tokens_BM[:, :-1].T)
    return jnp.concatenate([logits_BV[None], later_MBV])


def all_read_again(kind, prompts: Prompts, tokens_BM):
    """The same by evaluation of all that was said, anew before each token, no rows padded apart."""
    begun = (prompts.segment_BL > 0).sum(axis=1)
    length = prompts.tokens_BL.shape[1] + NEW
    forward = jax.jit(lambda model, batch: model(batch, None)[0])
    for said in range(NEW):
        tokens_BL = np.zeros((ROWS, length), np.int32)
        for row, count in enumerate(begun):
            tokens_BL[row, :count] = prompts.tokens_BL[row, :count]
            tokens_BL[row, count : count + said] = tokens_BM[row, :said]
        end_B1 = np.where(begun, begun + said, 0)[:, None]
        batch = Batch(
            row_B=prompts.row_B,
            tokens_BL=tokens_BL,
            segment_BL=(np.arange(length)[None] < end_B1).astype(np.int32),
            targets_BL=tokens_BL,
            target_mask_BL=np.zeros(tokens_BL.shape, bool),
            encoder_tokens_BS=prompts.encoder_tokens_BS,
            encoder_segment_BS=prompts.encoder_segment_BS,
        )
        logits_BLV = np.asarray(forward(model_of(kind), Layout().place(batch)))
        yield logits_BLV[np.arange(ROWS), np.maximum(end_B1[:, 0] - 1, 0)]


def logits_of(kind, mesh="single"):
    with jax.set_mesh(builders.mesh(mesh)):
        layout = layout_of(mesh, kind)
        tokens_BM = put(greedy(kind), layout.tokens_bl)
        prompts = layout.place(rows_of(kind, PROMPTS))
        return np.asarray(jax.jit(cached_logits)(model_of(kind, mesh), prompts, tokens_BM))


@pytest.mark.parametrize("kind", ["encoder_decoder", "decoder_only", "experts choose"])
def test_with_a_cache_as_without(kind):  # case 67
    """Token by token, 16 steps, a batch of 3 prompts of different lengths, top 2 of 8 experts."""
    tokens_BM, cached_MBV = greedy(kind), logits_of(kind)
    assert len(np.unique(tokens_BM[:3])) >= 6  # words vary
    with jax.set_mesh(builders.mesh("single")):
        again = all_read_again(kind, rows_of(kind, PROMPTS), tokens_BM)
        for said, logits_BV in enumerate(again):
            found_BV = cached_MBV[said, :3]
            assert (found_BV[:, [0, 31]] == -np.inf).all()  # the pad id, and no token of the text
            np.testing.assert_allclose(found_BV[:, 1:31], logits_BV[:3, 1:31], **CLOSE)
            likeliest_B = logits_BV[:3, 1:31].argmax(axis=1) + 1
            np.testing.assert_array_equal(likeliest_B, tokens_BM[:3, said])


@pytest.mark.mesh
def test_numbers_do_not_change_with_the_mesh():
    kind = "encoder_decoder"
    on_mesh = logits_of(kind, "data2_expert2_model2,zero=3")[:, :3]
    np.testing.assert_allclose(on_mesh, logits_of(kind)[:, :3], **OTHER_SUMS)


@pytest.mark.mesh
def test_draws_do_not_change_with_the_mesh():
    kind, meshes = "decoder_only", ("single", "data2_model4_folded")
    drawn = [continued(kind, PROMPTS, mesh=mesh, sampling=HOT)[0] for mesh in meshes]
    np.testing.assert_array_equal(*drawn)


def shifted_right(prompts: Prompts) -> Prompts:
    """The same prompts with their padding before them."""

    def shift(x_BL, segment_BL):
        if x_BL is None:
            return None
        gap_B = (segment_BL == 0).sum(axis=1)
        return np.stack([np.roll(x, gap) for x, gap in zip(x_BL, gap_B, strict=True)])

    return prompts._replace(
        tokens_BL=shift(prompts.tokens_BL, prompts.segment_BL),
        segment_BL=shift(prompts.segment_BL, prompts.segment_BL),
        encoder_tokens_BS=shift(prompts.encoder_tokens_BS, prompts.encoder_segment_BS),
        encoder_segment_BS=shift(prompts.encoder_segment_BS, prompts.encoder_segment_BS),
    )


@pytest.mark.parametrize("kind", ["encoder_decoder", "decoder_only"])
def test_a_prompt_goes_on_alike_whatever_is_beside_it(kind):  # cases 22 and 41
    """Alone, among others in another place, with padding before or behind; in one program."""
    first, second, third = PROMPTS
    together = greedy(kind)
    alone, _ = continued(kind, [first])
    np.testing.assert_array_equal(alone[0], together[0])
    assert (alone[1:] == 0).all()  # rows without a prompt say nothing
    elsewhere, _ = continued(kind, [third, second, second, first])
    np.testing.assert_array_equal(elsewhere[[3, 1, 2, 0]], together[[0, 1, 1, 2]])
    padded_before, _ = continued(kind, shifted_right(rows_of(kind, PROMPTS)))
    np.testing.assert_array_equal(padded_before, together)
    assert program(kind)._cache_size() == 1


def test_what_is_drawn_depends_on_seed_and_number_alone():
    kind = "decoder_only"
    drawn, _ = continued(kind, PROMPTS, sampling=HOT)
    assert (drawn[:3] != greedy(kind)[:3]).any(axis=1).all()
    alone, _ = continued(kind, PROMPTS[:1], sampling=HOT)
    np.testing.assert_array_equal(alone[0], drawn[0])
    other, _ = continued(kind, PROMPTS, sampling=HOT, seed=1)
    assert (other[:3] != drawn[:3]).any(axis=1).all()
    twice, _ = continued(kind, [PROMPTS[0]] * 2, sampling=HOT)
    assert (twice[0] != twice[1]).any()


def test_rows_end_one_by_one_and_the_loop_with_the_last():  # case 67
    """EOS is a word that the first row says; what is behind it is padding, for that row alone."""
    kind = "encoder_decoder"
    endless = greedy(kind)
    eos_id = int(endless[0, 5])
    said = [list(row).index(eos_id) + 1 if eos_id in row else NEW for row in endless[:3]]
    assert said[0] <= 6 and max(said) > said[0]
    for prompts, rows in ((PROMPTS, 3), (PROMPTS[:1], 1)):
        tokens_BM, passes = continued(kind, prompts, eos_id=eos_id)
        assert passes == max(said[:rows])
        for row in range(rows):
            np.testing.assert_array_equal(tokens_BM[row, : said[row]], endless[row, : said[row]])
            assert (tokens_BM[row, said[row] :] == 0).all()


@pytest.mark.parametrize("dispatcher", ["ragged", "all_to_all"])
def test_ended_rows_ask_no_expert_and_the_others_find_a_slot(dispatcher):  # cases 22 and 67
    """One token a row: a slot for each choice, and none for rows that have ended."""
    live, config = 5, replace(MODEL, architecture="decoder_only", num_layers=1)
    segment_B1 = (np.arange(ROWS) < live).astype(np.int32)[:, None]
    layout = Layout.of(read_mesh("data2_expert2_model2", dispatcher))

    def stats(model, tokens_B1, segment_B1):
        cache = model.start_cache(ROWS, 4, None, None)
        x_B1D = model.embedding.embed(tokens_B1, "float32")
        _, stats, cache = model.decoder(x_B1D, segment_B1, None, cache=cache)
        return stats, cache

    with jax.set_mesh(builders.mesh("data2_expert2_model2")):
        model = builders.start(builders.run_config(config), layout).model
        same_word_B1 = put(np.full((ROWS, 1), 7, np.int32), layout.tokens_bl)
        segments_B1 = put(segment_B1, layout.tokens_bl)
        found, cache = jax.device_get(jax.jit(stats)(model, same_word_B1, segments_B1))
    assert found.asked.tolist() == [live * 2]  # two choices a row
    assert found.load_E.max() == live  # all by the same experts
    assert found.dropped.tolist() == [0]
    assert cache.segment_BS[:, 0].tolist() == segment_B1[:, 0].tolist()


def test_nothing_drops_whatever_the_run_says():
    tight = replace(MODEL, capacity_factor=0.5, eval_capacity_factor=0.25, group_size=4)
    as_transformers = replace(MODEL, expert_capacity=1, padding_is_routed=True)
    for config in (tight, as_transformers):
        free = drop_free(config, LENGTH)
        assert free.eval_capacity_factor is free.expert_capacity is free.group_size is None
        assert not free.padding_is_routed
    chosen = replace(tight, encoder_router="expert_choice", group_size=LENGTH)
    assert drop_free(chosen, LENGTH).capacity_factor == 0.25  # that of evaluation
    with pytest.raises(UserError, match="model.group_size 8 tokens.* row of 12"):
        drop_free(chosen, 12)


# From a weights directory to text.

BYTES = ByteTokenizer()
TEXT_MODEL = replace(
    MODEL, vocab_size=384, num_layers=1, moe_every=1, top_k=1, eval_capacity_factor=0.25
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Weights with a bias that sends every token to one expert, and their model."""
    run = RunConfig(model=TEXT_MODEL, data=replace(RunConfig().data, sequence_length=16))
    with jax.set_mesh(builders.mesh("single")):
        layout = Layout.of(read_mesh("single", "ragged"))
        model = builders.start(replace(run, model=drop_free(TEXT_MODEL, 16)), layout).model
    arrays = jax.device_get(named_leaves(model))
    arrays[ROUTER_BIAS] = np.eye(8, dtype=np.float32)[[3, 5]]
    out = tmp_path_factory.mktemp("generate") / "weights"
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()}
    write_weights(out, run, shapes, lambda name: iter([arrays[name]]))
    return out, model, arrays[ROUTER_BIAS]


def test_text_goes_in_and_comes_out(saved):  # case 49
    """On eight devices, with the balancing bias, as the parts do on one device."""
    out, model, bias_XE = saved
    texts = ("A <extra_id_0> cat", "b", "")
    said = generate(GenerateConfig(checkpoint=str(out), prompt=texts, max_new_tokens=12))
    ids = [
        [*BYTES.encode("A "), BYTES.sentinel(0), *BYTES.encode(" cat"), BYTES.eos_id],
        [*BYTES.encode("b"), BYTES.eos_id],
        [BYTES.eos_id],
    ]
    prompts = prompt_rows(
        [np.asarray(i, np.int32) for i in ids],
        length=16,
        num_rows=3,
        pad_id=0,
        architecture="encoder_decoder",
    )
    vocabulary = Vocabulary(BYTES.vocab_size, BYTES.pad_id, BYTES.eos_id)
    run = jax.jit(partial(decode, max_new_tokens=12, vocabulary=vocabulary, sampling=GREEDY))
    with jax.set_mesh(builders.mesh("single")):
        placed = Layout().place(prompts)
        biased, plain = (
            np.asarray(run(model, bias, placed, jax.random.key(0)).tokens_BM)
            for bias in (jnp.asarray(bias_XE), jnp.zeros(bias_XE.shape))
        )
    assert said == [BYTES.decode(row) for row in biased]
    assert (biased != plain).any()


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"prompt": ("ab", "x" * 16)}, "prompt 2 has 17 tokens, .*, and its buffer room for 16"),
        ({"prompt_length": 1}, "prompt 1 has 2 tokens, .* room for 1: raise --prompt-length"),
        ({"step": 3}, "holds weights without steps: leave out step 3"),
        ({"top_k": 384, "temperature": 1.0}, "generate.top_k 384 is more than the 383 tokens"),
        ({"beams": 400}, "generate.beams 400 is more than the 383 tokens"),
        ({"mesh": "data=1,model=3"}, "model = 3 must divide model.num_heads = 8"),
        ({"checkpoint": "/nowhere"}, "/nowhere holds no run"),
        ({"tokenizer": "/no.model"}, "cannot read /no.model: No such file"),
    ],
)
def test_mistakes(saved, asked, answer):
    with pytest.raises(UserError, match=answer):
        generate(GenerateConfig(**({"checkpoint": str(saved[0]), "prompt": ("x",)} | asked)))


def test_a_tokenizer_of_more_ids_than_the_model(tmp_path):
    write_config(RunConfig(model=replace(TEXT_MODEL, vocab_size=383)), tmp_path)
    with pytest.raises(UserError, match="tokenizer has 384 ids, .* only model.vocab_size 383"):
        generate(GenerateConfig(checkpoint=str(tmp_path), prompt=("x",)))


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"prompt": ()}, "generate.prompt: there is nothing to continue"),
        ({"max_new_tokens": 0}, "generate.max_new_tokens must be positive, got 0"),
        ({"prompt_length": -1}, "generate.prompt_length must be positive, got -1"),
        ({"temperature": -1.0}, "generate.temperature must be 0 or more, and finite, got -1.0"),
        ({"temperature": float("inf")}, "generate.temperature must be 0 or more, and finite"),
        ({"top_p": 0.0, "temperature": 1.0}, "generate.top_p must be above 0 and at most 1, got 0"),
        ({"top_k": 3}, "generate.top_k 3 needs a temperature above 0: at 0 nothing is drawn"),
        ({"top_p": 0.5}, "generate.top_p 0.5 needs a temperature above 0"),
        ({"beams": 2, "temperature": 0.5}, "generate.beams 2 with temperature 0.5: beam search"),
        ({"seed": 2**32}, "generate.seed must be 0 or more and below .*, got 4294967296"),
    ],
)
def test_what_cannot_be_asked(asked, answer):
    with pytest.raises(UserError, match=answer):
        GenerateConfig(**({"checkpoint": "runs/tiny", "prompt": ("x",)} | asked))
