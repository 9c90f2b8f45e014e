"""Packed rows: every token once, and no target to be told from another document."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from switchjax.data.examples import encode_documents
from switchjax.data.packing import PackedExamples
from switchjax.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def _rows(documents, row_length):
    tokens, starts = encode_documents(documents, BYTES, eos=True)
    examples = PackedExamples(tokens, starts, BYTES, row_length=row_length)
    return [examples.example(i, np.random.default_rng(0)) for i in range(len(examples))]


def test_hand_table():
    # case 43: A (3 + EOS) and B (5 + EOS) in rows of 6; B's end and C go to the next row.
    a, b, c = (int(BYTES.encode(x)[0]) for x in "abc")
    first, second = _rows(["aaa", "bbbbb", "c"], 6)
    assert first.targets_L.tolist() == [a, a, a, 1, b, b]
    assert first.tokens_L.tolist() == [0, a, a, a, 0, b]  # nothing crosses the seam
    assert first.segment_L.tolist() == [1, 1, 1, 1, 2, 2]
    assert first.target_mask_L.all()
    assert second.targets_L.tolist() == [b, b, b, 1, c, 1]
    assert second.tokens_L.tolist() == [0, b, b, b, 0, c]
    assert second.segment_L.tolist() == [1, 1, 1, 1, 2, 2]


def test_padding_is_masked():
    (row,) = _rows(["ab"], 6)
    assert row.targets_L.tolist() == [100, 101, 1, 0, 0, 0]
    assert row.tokens_L.tolist() == [0, 100, 101, 0, 0, 0]
    assert row.segment_L.tolist() == [1, 1, 1, 0, 0, 0]
    assert row.target_mask_L.tolist() == [True] * 3 + [False] * 3


def test_document_that_starts_at_a_row_and_empty_ones():
    first, second, third = _rows(["ab", "", "", "c"], 3)
    assert first.segment_L.tolist() == [1, 1, 1]
    assert second.targets_L.tolist() == [1, 1, 102]
    assert second.tokens_L.tolist() == [0, 0, 0]
    assert second.segment_L.tolist() == [1, 2, 3]
    assert third.targets_L.tolist() == [1, 0, 0]
    assert third.tokens_L.tolist() == [0, 0, 0]
    assert third.segment_L.tolist() == [1, 0, 0]


@given(st.lists(st.text("ab", max_size=20), min_size=1), st.integers(1, 16))
def test_every_token_once_and_no_seam_crossed(documents, row_length):
    rows = _rows(documents, row_length)
    told = [int(t) for row in rows for t in row.targets_L[row.target_mask_L]]
    assert told == [t for text in documents for t in [*BYTES.encode(text).tolist(), 1]]
    for row in rows:
        assert row.segment_L.dtype == row.tokens_L.dtype == np.int32
        assert ((row.segment_L > 0) == row.target_mask_L).all()
        for number in range(1, row.segment_L.max() + 1):
            inside = row.segment_L == number
            assert row.tokens_L[inside].tolist() == [0, *row.targets_L[inside][:-1]]
    # All rows but the last are full.
    assert all(row.target_mask_L.all() for row in rows[:-1])
