"""What an example is, and how examples become a batch.

Decides the rows' shape, their masks and the decoder's input. Knows nothing of how text is cut
into examples, nor of their order.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Integer

from switchjax.batch import Batch
from switchjax.data.tokenizer import Tokenizer


class Example(NamedTuple):
    """One row; the fields are those of `Batch` without its B. Integers are int32."""

    tokens_L: Int32[np.ndarray, "L"]
    segment_L: Int32[np.ndarray, "L"]
    targets_L: Int32[np.ndarray, "L"]
    target_mask_L: Bool[np.ndarray, "L"]
    encoder_tokens_S: Int32[np.ndarray, "S"] | None = None
    encoder_segment_S: Int32[np.ndarray, "S"] | None = None


@runtime_checkable
class Examples(Protocol):
    """All examples of a text, each made when it is asked for."""

    def __len__(self) -> int: ...

    def example(self, index: int, rng: np.random.Generator) -> Example:
        """Example `index`; what is random about it comes from `rng` alone."""
        ...


def encode_documents(
    documents: Iterable[str], tokenizer: Tokenizer, *, eos: bool
) -> tuple[Integer[np.ndarray, "N"], Integer[np.ndarray, "M"]]:
    """Tokens of all documents end to end, and where each of the M documents starts.

    Tokens are uint16 where the vocabulary allows it: half the memory of int32. With `eos` each
    document ends in the tokenizer's EOS.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    end = np.asarray([tokenizer.eos_id] if eos else [], dtype)
    pieces = [np.append(tokenizer.encode(text).astype(dtype), end) for text in documents]
    lengths = np.asarray([0, *map(len, pieces)], np.int64)
    return np.concatenate([end[:0], *pieces]), np.cumsum(lengths)[:-1]


def fill(values: np.ndarray, length: int, filler: int) -> Int32[np.ndarray, "L"]:
    """`values`, then `filler` up to `length`; whoever calls it keeps the mask."""
    assert len(values) <= length, (len(values), length)
    filled = np.full(length, filler, np.int32)
    filled[: len(values)] = values
    return filled


def shift_right(
    targets_L: Int32[np.ndarray, "L"], starts_L: Bool[np.ndarray, "L"], start_id: int
) -> Int32[np.ndarray, "L"]:
    """The decoder's input: at each position the target before it, `start_id` where one starts.

    Source: T5, arXiv:1910.10683, as released: the pad id is the start token.
    """
    return np.where(starts_L, np.int32(start_id), np.roll(targets_L, 1))


def empty_like(example: Example, pad_id: int) -> Example:
    """A row of padding in the shape of `example`: no segment, no target."""
    encoder_tokens_S, encoder_segment_S = example.encoder_tokens_S, example.encoder_segment_S
    return Example(
        tokens_L=np.full_like(example.tokens_L, pad_id),
        segment_L=np.zeros_like(example.segment_L),
        targets_L=np.full_like(example.targets_L, pad_id),
        target_mask_L=np.zeros_like(example.target_mask_L),
        encoder_tokens_S=None
        if encoder_tokens_S is None
        else np.full_like(encoder_tokens_S, pad_id),
        encoder_segment_S=None if encoder_segment_S is None else np.zeros_like(encoder_segment_S),
    )


def to_batch(examples: Sequence[Example], rows: Sequence[int]) -> Batch:
    """A batch of these examples, which are the rows `rows` of the whole batch."""
    columns = [None if c[0] is None else np.stack(c) for c in zip(*examples, strict=True)]
    return Batch(np.asarray(rows, np.int32), *columns)
