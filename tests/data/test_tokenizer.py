"""Ids and round trips of both tokenizers; no model file comes from outside."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from switchjax.data.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from switchjax.errors import UserError

WORDS = "the quick brown fox jumped over  lazy dög's\t tail running quickly thereover".split(" ")
TEXT = [" ".join(WORDS[(i * j + j * j) % 13] for j in range(9)) + ".\n\n" for i in range(99)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "own.model"
    train_tokenizer(TEXT, 300, path)
    return path


def _foreign_model(path, **options):
    """A model as someone else would train it: SentencePiece's own defaults."""
    model = io.BytesIO()
    defaults = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, **(defaults | options)
    )
    path.write_bytes(model.getvalue())
    return str(path)


def test_bytes_have_the_ids_of_byt5():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 384)
    assert tokenizer.encode("aé").tolist() == [100, 0xC3 + 3, 0xA9 + 3]
    assert tokenizer.encode("aé").dtype == np.int32
    assert [tokenizer.sentinel(0), tokenizer.sentinel(124)] == [383, 259]
    with pytest.raises(IndexError):
        tokenizer.sentinel(125)


def test_decode_shows_sentinels_and_what_is_no_text():
    tokenizer = ByteTokenizer()
    ids = [383, *tokenizer.encode("hé"), 382, 2, 1000, 1, 0, 0xC3 + 3, 0]
    assert tokenizer.decode(ids) == "<extra_id_0>hé<extra_id_1>\ufffd\ufffd\ufffd"


@given(st.text())
def test_bytes_round_trip(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


@given(st.text().filter(lambda text: "\u2581" not in text))
@settings(deadline=None)
def test_trained_round_trip(trained, text):
    tokenizer = load_tokenizer(str(trained))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_trained_model(trained, tmp_path, capfd):
    train_tokenizer(TEXT, 300, tmp_path / "again.model")
    assert (tmp_path / "again.model").read_bytes() == trained.read_bytes()
    assert capfd.readouterr() == ("", "")
    tokenizer = load_tokenizer(str(trained))
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)
    assert (tokenizer.num_sentinels, tokenizer.vocab_size) == (100, 400)  # T5: 32000 -> 32100
    assert [tokenizer.sentinel(0), tokenizer.sentinel(99)] == [399, 300]
    ids = tokenizer.encode(TEXT[0])
    assert len(ids) < len(TEXT[0])
    assert tokenizer.decode([399, *ids, 1, 398, 0]) == f"<extra_id_0>{TEXT[0]}<extra_id_1>"


@pytest.mark.parametrize(
    "documents, size, message",
    [
        (TEXT, 100_000, "100000 is too large for this text; at most "),
        (TEXT, 100, "100 is too small for this text's characters; at least "),
        (TEXT, 0, "must be positive, got 0"),
        ([], 300, "there is no text"),
    ],
)
def test_vocabulary_that_the_text_cannot_give(tmp_path, capfd, documents, size, message):
    with pytest.raises(UserError) as caught:
        train_tokenizer(documents, size, tmp_path / "x.model")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_unwritable_output(tmp_path):
    with pytest.raises(UserError, match="cannot write .*missing"):
        train_tokenizer(TEXT, 300, tmp_path / "missing" / "x.model")


def test_foreign_model_without_pad(tmp_path):
    tokenizer = SentencePieceTokenizer(_foreign_model(tmp_path / "x.model"))
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 2)


def test_foreign_model_with_its_own_sentinels(tmp_path):
    names = [f"<extra_id_{i}>" for i in range(3)]
    path = _foreign_model(tmp_path / "x.model", user_defined_symbols=names)
    tokenizer = SentencePieceTokenizer(path)
    assert tokenizer.num_sentinels == 3
    assert len({tokenizer.sentinel(i) for i in range(3)}) == 3
    assert max(tokenizer.sentinel(i) for i in range(3)) < tokenizer.vocab_size <= 60
    assert tokenizer.decode([tokenizer.sentinel(1)]) == "<extra_id_1>"


def test_foreign_model_without_eos(tmp_path):
    with pytest.raises(UserError, match="x.model: the model has no EOS piece"):
        load_tokenizer(_foreign_model(tmp_path / "x.model", eos_id=-1))


def test_file_that_is_no_model(tmp_path, capfd):
    with pytest.raises(UserError, match="cannot read .*missing.model: No such file"):
        load_tokenizer(str(tmp_path / "missing.model"))
    for content in (b"", b"hello world", bytes(range(256)) * 4):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(UserError, match="bad.model is no SentencePiece model"):
            load_tokenizer(str(tmp_path / "bad.model"))
    assert capfd.readouterr() == ("", "")
