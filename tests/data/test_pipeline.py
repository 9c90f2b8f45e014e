"""A config's whole way to batches: split, evaluation, lengths, refusals."""

import math

import numpy as np
import pytest

from switchjax.batch import Batch
from switchjax.config import DataConfig
from switchjax.data.pipeline import load_data, row_lengths, split, unigram_entropy
from switchjax.errors import UserError

ARCHITECTURES = ("encoder_decoder", "decoder_only")


@pytest.fixture
def config(tmp_path):
    words = " ".join(f"word{i}" for i in range(1500))
    (tmp_path / "text.txt").write_text(words)
    return DataConfig(files=(f"{tmp_path}/*.txt",), batch_size=8, sequence_length=32)


def _load(config, architecture="encoder_decoder", **changes):
    arguments = {"seed": 0, "vocab_size": 384, "eval_batches": 3}
    return load_data(config, architecture, **(arguments | changes))


def _raw_rows(batch):
    """The text tokens (bytes) of each row, hidden spans put back in their places."""
    for row, targets in enumerate(batch.targets_BL):
        targets = targets[batch.target_mask_BL[row]].tolist()
        if batch.encoder_tokens_BS is None:
            yield tuple(targets)
            continue
        spans = {}
        for token in targets[:-1]:
            if token >= 259:
                span = spans[token] = []
            else:
                span.append(token)
        inputs = batch.encoder_tokens_BS[row][batch.encoder_segment_BS[row] > 0].tolist()
        yield tuple(raw for token in inputs for raw in spans.get(token, [token]))


def _same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for values, expected in zip(batch, other, strict=True):
            np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shapes_dtypes_and_lengths(config, architecture):
    data = _load(config, architecture)
    lengths = row_lengths(config, architecture)
    batch = next(data.train)
    decoder = batch[1:5]
    assert all(values.shape == (8, lengths[-1]) for values in decoder)
    assert data.decoder_length == lengths[-1]
    assert batch.row_B.tolist() == list(range(8))
    assert batch.target_mask_BL.dtype == bool
    assert all(v.dtype == np.int32 for v in batch if v is not None and v.dtype != bool)
    if architecture == "encoder_decoder":
        assert lengths == (32, data.decoder_length) and data.encoder_length == 32
        assert batch.encoder_tokens_BS.shape == batch.encoder_segment_BS.shape == (8, 32)
    else:
        assert lengths == (32,) and data.encoder_length is None
        assert batch.encoder_tokens_BS is None and batch.encoder_segment_BS is None


def test_row_lengths_read_no_text():
    config = DataConfig(files=("nowhere/*.txt",), sequence_length=512)
    assert row_lengths(config, "encoder_decoder") == (512, 114)
    assert row_lengths(config, "decoder_only") == (512,)


@pytest.mark.parametrize("count, holdout, held_out", [(100, 0.05, 5), (10, 0.01, 1), (2, 0.9, 2)])
def test_split(count, holdout, held_out):
    train, evaluation = split(count, holdout)
    assert len(evaluation) == held_out
    assert sorted([*train, *evaluation]) == list(range(count))


def test_held_out_examples_lie_all_over_the_text():
    _, held_out = split(10_000, 0.05)
    for some in (held_out, held_out[:50]):
        in_tenths = np.bincount(some // 1000, minlength=10)
        assert in_tenths.min() >= 0.06 * len(some)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_held_out_text_is_not_trained_on(config, architecture):
    # Every row of this text is another, so one that is in both would be a leak.
    data = _load(config, architecture, eval_batches=1000)
    steps = 2 * data.num_train_examples // config.batch_size
    seen = {text for _ in range(steps) for text in _raw_rows(next(data.train))}
    held_out = {text for batch in data.eval_batches for text in _raw_rows(batch)} - {()}
    assert len(held_out) == data.num_eval_examples > 0
    assert len(seen) == data.num_train_examples
    assert not held_out & seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_evaluation_is_the_same_for_every_seed_and_process_count(config, architecture):
    data = _load(config, architecture)
    _same(data.eval_batches, _load(config, architecture, seed=7).eval_batches)
    shares = [range(row, row + 2) for row in range(0, config.batch_size, 2)]
    parts = [_load(config, architecture, rows=rows) for rows in shares]
    assert {part.unigram_entropy for part in parts} == {data.unigram_entropy}
    joined = [
        Batch(*(None if v[0] is None else np.concatenate(v) for v in zip(*batches, strict=True)))
        for batches in zip(*(part.eval_batches for part in parts), strict=True)
    ]
    _same(data.eval_batches, joined)


def test_last_evaluation_batch_is_filled_with_empty_rows(config):
    data = _load(config, eval_batches=1000)
    missing = -data.num_eval_examples % config.batch_size
    assert missing > 0
    last = data.eval_batches[-1]
    assert len(last.row_B) == config.batch_size
    for masks in (last.segment_BL, last.target_mask_BL, last.encoder_segment_BS):
        assert masks[:-missing].any(axis=1).all()
        assert not masks[-missing:].any()
    assert len(_load(config, eval_batches=1).eval_batches) == 1


def test_same_seed_same_stream_through_the_whole_pipeline(config):
    def take(data):
        return [next(data.train) for _ in range(30)]

    first = take(_load(config, seed=5))
    _same(first, take(_load(config, seed=5)))
    other = take(_load(config, seed=6))
    assert not np.array_equal(first[0].targets_BL, other[0].targets_BL)


def test_state_is_of_one_text(config, tmp_path):
    state = _load(config).train.get_state()
    _load(config).train.set_state(state)
    (tmp_path / "more.txt").write_text("more")
    with pytest.raises(UserError, match="not the stream that was saved: text [0-9a-f]+ is now"):
        _load(config).train.set_state(state)


def test_unigram_entropy_by_hand():
    # Real targets 5, 5, 5, 7 and padding 0: 3/4 ln(4/3) + 1/4 ln 4.
    targets = np.asarray([[5, 5], [5, 0]]), np.asarray([[7, 0], [0, 0]])
    masks = np.asarray([[True, True], [True, False]]), np.asarray([[True, False], [False] * 2])
    batches = [Batch(np.arange(2), t, m, t, m) for t, m in zip(targets, masks, strict=True)]
    expected = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert unigram_entropy(batches) == pytest.approx(expected, rel=1e-12)
    assert unigram_entropy(batches[:1]) == 0
    assert math.isnan(unigram_entropy([]))


@pytest.mark.parametrize(
    "changes, arguments, message",
    [
        ({"files": ("nowhere/*.txt",)}, {}, "no file matches 'nowhere/"),
        ({"tokenizer": "nowhere.model"}, {}, "cannot read nowhere.model"),
        ({}, {"vocab_size": 383}, "vocab_size 383 must be at least the tokenizer's 384"),
        ({"batch_size": 800}, {}, "too short for one batch: [0-9]+ .* data.batch_size 800"),
        ({"sequence_length": 2560}, {}, "hides 142 spans, but the tokenizer has 125"),
        ({"sequence_length": 2}, {}, "sequence_length must be at least 3"),
        ({"sequence_length": 30_000}, {"architecture": "decoder_only"}, "1? training examples"),
    ],
)
def test_refusals(config, changes, arguments, message):
    arguments = {"architecture": "encoder_decoder", **arguments}
    changed = DataConfig(**(vars(config) | changes))
    with pytest.raises(UserError, match=message) as caught:
        _load(changed, arguments.pop("architecture"), **arguments)
    assert "\n" not in str(caught.value)


def test_builtin_corpus():
    data = _load(DataConfig())
    assert data.num_tokens > 1_000_000
    assert data.num_eval_examples == 3 * 32
    assert 2 < data.unigram_entropy < 5
    assert next(data.train).row_B.shape == (32,)
