"""A prompt is the beginning of what training has shown."""

import numpy as np
import pytest

from switchjax.data.packing import PackedExamples
from switchjax.data.prompts import encode_prompt, prompt_rows
from switchjax.data.spans import corrupt
from switchjax.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, train_tokenizer
from switchjax.errors import UserError

TEXT = "The cat sat on the mat, and the dog, as ever, did not: it lay beside the door.\n" * 3


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "pieces.model"
    train_tokenizer([TEXT], 284, path)
    return {"bytes": ByteTokenizer(), "pieces": SentencePieceTokenizer(path)}


def test_a_corrupted_text_is_a_prompt(tokenizers):  # case 49
    """What span corruption leaves of a text, written out and read again, is the same ids."""
    tokenizer = tokenizers["bytes"]
    sentinels = np.asarray([tokenizer.sentinel(i) for i in range(100)], np.int32)
    inputs, _ = corrupt(
        tokenizer.encode(TEXT),
        np.random.default_rng(0),
        noise_density=0.15,
        mean_span_length=3.0,
        sentinels=sentinels,
        eos_id=tokenizer.eos_id,
    )
    written = tokenizer.decode(inputs)
    assert "<extra_id_11>" in written
    np.testing.assert_array_equal(encode_prompt(written, tokenizer, "encoder_decoder"), inputs)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_gaps_stand_among_the_text_around_them(tokenizers, kind):  # case 49
    tokenizer = tokenizers[kind]
    ids = encode_prompt("A <extra_id_0> walks <extra_id_1>", tokenizer, "encoder_decoder")
    expected = [
        *tokenizer.encode("A "),
        tokenizer.sentinel(0),
        *tokenizer.encode(" walks "),
        tokenizer.sentinel(1),
        tokenizer.eos_id,
    ]
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_decoder_reads_plain_text_as_in_training(tokenizers, kind):
    tokenizer = tokenizers[kind]
    text = "The cat <extra_id_0>"
    ids = encode_prompt(text, tokenizer, "decoder_only")
    document = np.append(tokenizer.encode(text + " sat"), tokenizer.eos_id)
    packed = PackedExamples(document, np.zeros(1, int), tokenizer, row_length=64)
    in_training = packed.example(0, np.random.default_rng(0)).tokens_L
    np.testing.assert_array_equal(ids, in_training[: len(ids)])


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_only"])
def test_rows_are_filled_up(architecture):
    rows = prompt_rows(
        [np.asarray([5, 6, 7], np.int32), np.asarray([8], np.int32)],
        length=4,
        num_rows=3,
        pad_id=0,
        architecture=architecture,
    )
    tokens = [[5, 6, 7, 0], [8, 0, 0, 0], [0, 0, 0, 0]]
    segments = [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    if architecture == "decoder_only":
        assert rows.encoder_tokens_BS is None and rows.encoder_segment_BS is None
        assert (rows.tokens_BL.tolist(), rows.segment_BL.tolist()) == (tokens, segments)
    else:
        assert rows.encoder_tokens_BS.tolist() == tokens
        assert rows.encoder_segment_BS.tolist() == segments
        assert rows.tokens_BL.tolist() == [[0], [0], [0]]
        assert rows.segment_BL.tolist() == [[1], [1], [0]]
    assert rows.row_B.tolist() == [0, 1, 2]


def test_mistakes():
    tokenizer = ByteTokenizer()
    with pytest.raises(UserError, match="no <extra_id_125>, the tokenizer has 125 sentinels"):
        encode_prompt("a <extra_id_125>", tokenizer, "encoder_decoder")
    for architecture in ("encoder_decoder", "decoder_only"):
        with pytest.raises(UserError, match="is not UTF-8"):
            encode_prompt("a \udce9", tokenizer, architecture)
