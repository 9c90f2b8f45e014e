"""Packed rows for a decoder-only model: documents end to end, cut at the row's end.

Decides what a row holds and what its segments are. Knows nothing of files or batches.
"""

import numpy as np
from jaxtyping import Integer

from switchjax.data.examples import Example, fill, shift_right
from switchjax.data.tokenizer import Tokenizer


class PackedExamples:
    """A text as full rows: row i is the i-th `row_length` tokens, so only the last has padding.

    Each document ends in EOS. What a row holds of one document is a segment, numbered from 1; a
    document that a row's end cuts goes on as the first segment of the next row. Inside a segment
    the decoder reads the targets shifted right by one behind the start token, so that no target
    is to be told from another document's tokens.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, "N"],
        starts: Integer[np.ndarray, "M"],
        tokenizer: Tokenizer,
        *,
        row_length: int,
    ):
        """`starts` says where in `tokens` the documents start; `encode_documents` gives both."""
        self.row_length = row_length
        self._tokens, self._starts = tokens, starts
        self._pad_id = tokenizer.pad_id

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.row_length)

    def example(self, index: int, rng: np.random.Generator) -> Example:
        """Row `index`; nothing about it is random."""
        del rng
        begin = index * self.row_length
        targets = self._tokens[begin : begin + self.row_length]
        first, last = np.searchsorted(self._starts, [begin, begin + len(targets)])
        starts_L = np.zeros(self.row_length, bool)
        starts_L[self._starts[first:last] - begin] = True
        starts_L[0] = True
        starts_L[len(targets) :] = True  # padding reads the start token, not the last target
        real_L = np.arange(self.row_length) < len(targets)
        targets_L = fill(targets, self.row_length, self._pad_id)
        return Example(
            tokens_L=shift_right(targets_L, starts_L, self._pad_id),
            segment_L=np.where(real_L, np.cumsum(starts_L), 0).astype(np.int32),
            targets_L=targets_L,
            target_mask_L=real_L,
        )
