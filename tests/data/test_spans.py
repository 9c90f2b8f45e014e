"""Span corruption: T5's lengths, and nothing lost between inputs and targets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from switchjax.data.spans import SpanExamples, corrupt, num_noise, span_lengths
from switchjax.data.tokenizer import ByteTokenizer
from switchjax.errors import UserError

T5 = {"noise_density": 0.15, "mean_span_length": 3.0}
SENTINELS = np.arange(9999, 8999, -1, dtype=np.int32)  # of a tokenizer with plenty
EOS = 1


def _merge(inputs, targets):
    """The raw tokens: each sentinel of the inputs gives way to what follows it in the targets."""
    hidden = {}
    for token in targets:
        if token in SENTINELS:
            span = hidden.setdefault(token, [])
        else:
            span.append(token)
    return [t for token in inputs for t in hidden.get(token, [token])]


@pytest.mark.parametrize("length, raw, target", [(512, 568, 114), (256, 284, 58)])
def test_lengths_are_those_of_t5(length, raw, target):
    assert span_lengths(length, **T5) == (raw, target)


@given(st.integers(3, 600), st.floats(0.01, 0.5), st.floats(2, 20))
def test_inputs_fill_their_buffer(length, density, mean):
    raw, target_length = span_lengths(length, density, mean)
    rng = np.random.default_rng(0)
    rule = {"noise_density": density, "mean_span_length": mean}
    inputs, targets = corrupt(np.full(raw, 7), rng, sentinels=SENTINELS, eos_id=EOS, **rule)
    assert (len(inputs), len(targets)) == (length, target_length)
    noise, spans = num_noise(raw + 1, **rule)
    assert raw + 1 - noise + spans + 1 > length  # one more would not fit


@given(st.integers(2, 400), st.floats(0.01, 0.99), st.floats(1, 20), st.integers(0, 2**32))
@settings(deadline=None)
def test_merging_gives_back_the_raw_tokens(raw_length, density, mean, seed):
    rng = np.random.default_rng(seed)
    raw = rng.integers(10, 500, raw_length).astype(np.uint16)
    rule = {"noise_density": density, "mean_span_length": mean}
    inputs, targets = corrupt(raw, rng, sentinels=SENTINELS, eos_id=EOS, **rule)
    assert inputs.dtype == targets.dtype == np.int32
    assert inputs[-1] == targets[-1] == EOS
    inputs, targets = inputs[:-1], targets[:-1]
    assert EOS not in inputs and EOS not in targets
    assert _merge(inputs, targets) == raw.tolist()
    noise, spans = num_noise(raw_length, density, mean)
    assert (len(inputs), len(targets)) == (raw_length - noise + spans, noise + spans)
    # Unique sentinels, in order, the same in both; the first span is visible; none touch.
    for side in (inputs, targets):
        assert side[np.isin(side, SENTINELS)].tolist() == SENTINELS[:spans].tolist()
    assert inputs[0] not in SENTINELS and targets[0] == SENTINELS[0]
    assert not (np.isin(inputs[1:], SENTINELS) & np.isin(inputs[:-1], SENTINELS)).any()


def test_every_split_is_drawn():
    # 6 tokens, half hidden, mean 1.5: 2 spans on each side, cut at 1 or 2 of 3: four ways.
    rng = np.random.default_rng(0)
    rule = {"noise_density": 0.5, "mean_span_length": 1.5}
    raw = np.arange(10, 16)
    drawn = [
        tuple(corrupt(raw, rng, sentinels=SENTINELS, eos_id=EOS, **rule)[1]) for _ in range(400)
    ]
    assert len(set(drawn)) == 4
    assert min(drawn.count(way) for way in set(drawn)) > 60  # 100 expected


def _examples(num_tokens, sequence_length=32):
    tokens = np.arange(num_tokens, dtype=np.uint16) % 256 + 3
    return SpanExamples(tokens, ByteTokenizer(), sequence_length=sequence_length, **T5)


def test_full_example_has_no_padding():
    examples = _examples(1000)
    row = examples.example(3, np.random.default_rng(0))
    assert row.encoder_segment_S.tolist() == [1] * 32
    assert row.segment_L.tolist() == [1] * examples.decoder_length
    assert row.target_mask_L.all()
    assert row.tokens_L.tolist() == [0, *row.targets_L[:-1]]
    assert row.targets_L[-1] == row.encoder_tokens_S[-1] == EOS
    visible = [t for t in row.encoder_tokens_S if t < 259 and t != EOS]
    assert visible[0] == 3 * examples.raw_length % 256 + 3


def test_short_tail_is_masked():
    raw_length = _examples(1000).raw_length
    examples = _examples(2 * raw_length + 7)
    assert len(examples) == 3
    row = examples.example(2, np.random.default_rng(0))
    # 7 tokens: 1 hidden, 1 span; inputs 6 + 1 + EOS, targets 1 + 1 + EOS.
    assert row.encoder_segment_S.tolist() == [1] * 8 + [0] * 24
    assert row.encoder_tokens_S[8:].tolist() == [0] * 24
    real = [True] * 3 + [False] * (examples.decoder_length - 3)
    assert row.target_mask_L.tolist() == real
    assert row.segment_L.tolist() == list(map(int, real))
    assert row.tokens_L.tolist() == [0, *row.targets_L[:2]] + [0] * (len(real) - 3)


@pytest.mark.parametrize("rest, count", [(0, 2), (1, 2), (2, 3)])
def test_one_token_is_no_example(rest, count):
    examples = _examples(2 * _examples(1000).raw_length + rest)
    assert len(examples) == count
    examples.example(count - 1, np.random.default_rng(0))


def test_too_few_sentinels():
    with pytest.raises(UserError, match="hides 142 spans, but the tokenizer has 125 sentinels"):
        _examples(10_000, sequence_length=2560)


def test_text_that_holds_sentinels():
    with pytest.raises(UserError, match="the text itself holds sentinels such as <extra_id_0>"):
        SpanExamples(np.asarray([5, 300, 6]), ByteTokenizer(), sequence_length=32, **T5)


def test_settings_that_cannot_be_met():
    with pytest.raises(UserError, match="sequence_length must be at least 3 .* got 2"):
        span_lengths(2, **T5)
    with pytest.raises(UserError, match="noise_density 0.9 with .*mean_span_length 1.0 leaves"):
        span_lengths(256, 0.9, 1.0)
