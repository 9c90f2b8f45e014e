"""Text to token ids and back: plain bytes, or a SentencePiece model file.

Decides ids, the sentinels of span corruption among them. Knows nothing of spans or rows.
"""

import io
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, SupportsIndex, runtime_checkable

import numpy as np
from jaxtyping import Int32
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from switchjax.errors import UserError

_NOT_TEXT = "\N{REPLACEMENT CHARACTER}"


@runtime_checkable
class Tokenizer(Protocol):
    """Ids 0 to `vocab_size` - 1; `vocab_size` counts the sentinels."""

    vocab_size: int
    pad_id: int
    eos_id: int
    num_sentinels: int

    def encode(self, text: str) -> Int32[np.ndarray, "L"]:
        """Ids of the text alone: no EOS, no sentinel."""
        ...

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text for people: no pad, no EOS, sentinels as <extra_id_0>, U+FFFD for no text."""
        ...

    def sentinel(self, index: int) -> int:
        """Id of the sentinel that hides span `index` of an example."""
        ...


class ByteTokenizer:
    """UTF-8 bytes, with the ids of ByT5.

    Source: ByT5, arXiv:2105.13626, section 3.1 and its released vocabulary: pad, EOS, unknown,
    256 bytes, 125 sentinels that count down from the top.
    """

    pad_id = 0
    eos_id = 1
    num_sentinels = 125
    _first_byte = 3
    vocab_size = _first_byte + 256 + num_sentinels

    def encode(self, text: str) -> Int32[np.ndarray, "L"]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + self._first_byte

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        bytes_of_text = range(self._first_byte, self._first_byte + 256)
        return _decode(ids, self, bytes_of_text, self._decode_run)

    def sentinel(self, index: int) -> int:
        return _from_top(self, index)

    def _decode_run(self, ids: list[int]) -> str:
        return bytes(i - self._first_byte for i in ids).decode(errors="replace")


class SentencePieceTokenizer:
    """Any SentencePiece model file, T5's included.

    Sentinels are the model's own pieces <extra_id_0>, <extra_id_1>, ... if it has them;
    otherwise 100 ids on top of its pieces that count down, as T5 adds them.

    A model without a pad piece pads with id 0: padding is masked explicitly, so the id means
    nothing there, and as the decoder's start token any fixed id will do.

    Raises:
        UserError: the file is missing, no SentencePiece model, or has no EOS piece.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._model = _load_model(path)
        size = self._model.get_piece_size()
        self.eos_id = self._model.eos_id()
        if self.eos_id < 0:
            raise UserError(f"data.tokenizer: {path}: the model has no EOS piece (</s>)")
        self.pad_id = max(self._model.pad_id(), 0)
        self._own_sentinels = _own_sentinels(self._model)
        self.num_sentinels = len(self._own_sentinels) or 100
        self.vocab_size = size if self._own_sentinels else size + self.num_sentinels

    def encode(self, text: str) -> Int32[np.ndarray, "L"]:
        return np.asarray(self._model.encode(text, out_type=int), np.int32)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return _decode(ids, self, range(self._model.get_piece_size()), self._model.decode)

    def sentinel(self, index: int) -> int:
        return self._own_sentinels[index] if self._own_sentinels else _from_top(self, index)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: "bytes" or the path of a model file.

    Raises:
        UserError: as `SentencePieceTokenizer`.
    """
    return ByteTokenizer() if name == "bytes" else SentencePieceTokenizer(os.path.expanduser(name))


def train_tokenizer(documents: Iterable[str], vocab_size: int, out: Path) -> None:
    """Writes a SentencePiece unigram model of `vocab_size` pieces to `out`, the same each time.

    Sentinels come on top of `vocab_size`. Text is left as it is, spaces included, and bytes
    stand in for characters without a piece: `decode(encode(text)) == text`, unless the text
    holds U+2581, SentencePiece's own mark for a space.

    Raises:
        UserError: the text cannot give that many pieces, or needs more; `out` is not writable.
    """
    if vocab_size < 1:
        raise UserError(f"tokenizer: the vocabulary must be positive, got {vocab_size}")
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_sentences(documents),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            num_threads=2,  # sums run in this many parts: another number, other roundings
            minloglevel=2,  # errors only
        )
    except RuntimeError as error:
        raise UserError(_training_mistake(str(error), vocab_size)) from None
    try:
        out.write_bytes(model.getvalue())
    except OSError as error:
        raise UserError(f"tokenizer: cannot write {out}: {error.strerror}") from None


def _load_model(path: str | os.PathLike[str]) -> SentencePieceProcessor:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}") from None
    model = SentencePieceProcessor()
    try:
        # An empty file parses as a model without pieces, which later calls only log.
        loaded = bool(raw) and model.LoadFromSerializedProto(raw)
    except RuntimeError:
        loaded = False
    if not loaded:
        raise UserError(f"data.tokenizer: {path} is no SentencePiece model")
    return model


def _own_sentinels(model: SentencePieceProcessor) -> list[int]:
    ids: list[int] = []
    while True:
        piece = f"<extra_id_{len(ids)}>"
        candidate = model.piece_to_id(piece)
        if model.id_to_piece(candidate) != piece:  # unknown pieces share the id of <unk>
            return ids
        ids.append(candidate)


def _from_top(tokenizer: Tokenizer, index: int) -> int:
    if not 0 <= index < tokenizer.num_sentinels:
        raise IndexError(f"sentinel {index} of {tokenizer.num_sentinels}")
    return tokenizer.vocab_size - 1 - index


def _decode(
    ids: Iterable[SupportsIndex],
    tokenizer: Tokenizer,
    text_ids: range,
    decode_run: Callable[[list[int]], str],
) -> str:
    """Text with sentinels spelled out; `decode_run` turns neighbouring `text_ids` into text."""
    sentinels = {tokenizer.sentinel(i): i for i in range(tokenizer.num_sentinels)}
    text: str = ""
    run: list[int] = []
    for token in map(operator.index, ids):
        if token in (tokenizer.pad_id, tokenizer.eos_id):
            continue
        if token in text_ids and token not in sentinels:
            run.append(token)
            continue
        # A model whose vocabulary was rounded up can also emit ids that mean nothing.
        mark = f"<extra_id_{sentinels[token]}>" if token in sentinels else _NOT_TEXT
        text += decode_run(run) + mark
        run = []
    return text + decode_run(run)


def _sentences(documents: Iterable[str]) -> Iterator[str]:
    """Lines, cut where SentencePiece would leave them out for their length (in UTF-8 bytes)."""
    longest = 1000  # characters of at most 4 bytes; SentencePiece's limit is 4192 bytes
    for document in documents:
        for line in document.splitlines(keepends=True):
            yield from (line[i : i + longest] for i in range(0, len(line), longest))


def _training_mistake(error: str, vocab_size: int) -> str:
    if found := re.search(r"Vocabulary size too high .* value <= (\d+)", error):
        return (
            f"tokenizer: a vocabulary of {vocab_size} is too large for this text; "
            f"at most {found[1]}"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return (
            f"tokenizer: a vocabulary of {vocab_size} is too small for this text's characters; "
            f"at least {found[1]}"
        )
    if "!sentences_.empty()" in error:
        return "tokenizer: there is no text to train a vocabulary on"
    return f"tokenizer: training a vocabulary of {vocab_size} failed: {error.strip()}"
