"""T5's span corruption: hidden spans become sentinels, and the decoder says what they hid.

Decides lengths, spans and the order of sentinels. Knows nothing of files or batches.
"""

from bisect import bisect_right
from functools import cache

import numpy as np
from jaxtyping import Int32, Integer

from switchjax.data.examples import Example, fill, shift_right
from switchjax.data.tokenizer import Tokenizer
from switchjax.errors import UserError


def num_noise(length: int, noise_density: float, mean_span_length: float) -> tuple[int, int]:
    """(hidden tokens, hidden spans) of `length` >= 2 raw tokens.

    Source: T5, arXiv:1910.10683, section 3.1.4, and its released `random_spans_noise_mask`.
    Deviation: never more spans than tokens left visible, for each span follows a visible token;
    `span_lengths` refuses settings that ask for it, so it only touches a short last chunk.
    """
    noise = min(max(round(length * noise_density), 1), length - 1)
    spans = max(round(noise / mean_span_length), 1)
    return noise, min(spans, length - noise)


@cache
def span_lengths(
    sequence_length: int, noise_density: float, mean_span_length: float
) -> tuple[int, int]:
    """(raw tokens of an example, its target length): 512, .15, 3 gives 568 and 114.

    The most raw tokens whose corrupted form, one sentinel a span and EOS included, fits
    `sequence_length`; it then fills it. The target length is exact, EOS included.

    Raises:
        UserError: nothing fits, or there are too few visible tokens to keep the spans apart.
    """

    def input_length(raw: int) -> int:
        noise, spans = num_noise(raw, noise_density, mean_span_length)
        return raw - noise + spans + 1

    if sequence_length < input_length(2):
        raise UserError(
            f"data.sequence_length must be at least {input_length(2)} for span corruption, "
            f"got {sequence_length}"
        )
    above = 4
    while input_length(above) <= sequence_length:
        above *= 2
    # One raw token more makes the input no shorter, so the last that fits can be searched for.
    raw = 1 + bisect_right(range(2, above), sequence_length, key=input_length)
    noise, spans = num_noise(raw, noise_density, mean_span_length)
    if round(noise / mean_span_length) > raw - noise or input_length(raw) != sequence_length:
        raise UserError(
            f"data.noise_density {noise_density} with data.mean_span_length {mean_span_length} "
            f"leaves {raw - noise} of {raw} tokens visible, too few to keep the hidden spans apart"
        )
    return raw, noise + spans + 1


def corrupt(
    tokens: Integer[np.ndarray, "R"],
    rng: np.random.Generator,
    *,
    noise_density: float,
    mean_span_length: float,
    sentinels: Int32[np.ndarray, "Q"],
    eos_id: int,
) -> tuple[Int32[np.ndarray, "S"], Int32[np.ndarray, "L"]]:
    """(inputs, targets) of R >= 2 raw tokens.

    Visible and hidden spans take turns, a visible one first. Span i stands as `sentinels[i]` in
    the inputs, and as `sentinels[i]` and its tokens in the targets; both end in EOS.
    """
    noise, spans = num_noise(len(tokens), noise_density, mean_span_length)
    lengths = np.empty(2 * spans, np.int64)
    lengths[0::2] = _random_parts(len(tokens) - noise, spans, rng)
    lengths[1::2] = _random_parts(noise, spans, rng)
    hidden = np.repeat(np.arange(2 * spans) % 2 == 1, lengths)
    first_hidden = np.cumsum(lengths)[0::2]  # where each hidden span starts
    last_visible = first_hidden - 1

    inputs = tokens.astype(np.int32)
    inputs[first_hidden] = sentinels[:spans]
    in_inputs = ~hidden
    in_inputs[first_hidden] = True

    # The other way round: a visible span shrinks to its last place, which holds the sentinel.
    targets = tokens.astype(np.int32)
    targets[last_visible] = sentinels[:spans]
    in_targets = hidden
    in_targets[last_visible] = True

    eos = np.int32(eos_id)
    return np.append(inputs[in_inputs], eos), np.append(targets[in_targets], eos)


def _random_parts(total: int, parts: int, rng: np.random.Generator) -> Integer[np.ndarray, "P"]:
    """`parts` positive lengths that add up to `total`; every such split is equally likely."""
    cuts = 1 + np.sort(rng.choice(total - 1, parts - 1, replace=False, shuffle=False))
    return np.diff(cuts, prepend=0, append=total)


class SpanExamples:
    """A text as encoder-decoder examples: chunks of one raw length, corrupted anew each time.

    Documents are joined without a mark between them, as T5 does. The last chunk is what is
    left; it is corrupted by the same rule at its own length and padded under the mask. A single
    token left over cannot be corrupted (one token must stay visible) and is dropped.

    Raises:
        UserError: as `span_lengths`; a raw chunk needs more sentinels than the tokenizer has;
            the text itself holds sentinels.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, "N"],
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        noise_density: float,
        mean_span_length: float,
    ):
        self.encoder_length = sequence_length
        self.raw_length, self.decoder_length = span_lengths(
            sequence_length, noise_density, mean_span_length
        )
        self._rule = {"noise_density": noise_density, "mean_span_length": mean_span_length}
        self._sentinels = sentinels_for(self.raw_length, tokenizer, **self._rule)
        self._pad_id, self._eos_id = tokenizer.pad_id, tokenizer.eos_id
        self._tokens = tokens
        if np.isin(tokens, self._sentinels).any():
            name = tokenizer.decode(self._sentinels[:1])
            raise UserError(f"data.files: the text itself holds sentinels such as {name}")

    def __len__(self) -> int:
        full, rest = divmod(len(self._tokens), self.raw_length)
        return full + (rest >= 2)

    def example(self, index: int, rng: np.random.Generator) -> Example:
        raw = self._tokens[index * self.raw_length : (index + 1) * self.raw_length]
        inputs, targets = corrupt(
            raw, rng, sentinels=self._sentinels, eos_id=self._eos_id, **self._rule
        )
        targets_L = fill(targets, self.decoder_length, self._pad_id)
        position_L = np.arange(self.decoder_length)
        real_L = position_L < len(targets)
        return Example(
            tokens_L=shift_right(targets_L, (position_L == 0) | ~real_L, self._pad_id),
            segment_L=real_L.astype(np.int32),
            targets_L=targets_L,
            target_mask_L=real_L,
            encoder_tokens_S=fill(inputs, self.encoder_length, self._pad_id),
            encoder_segment_S=fill(np.ones_like(inputs), self.encoder_length, 0),
        )


def sentinels_for(
    raw_length: int, tokenizer: Tokenizer, *, noise_density: float, mean_span_length: float
) -> Int32[np.ndarray, "Q"]:
    """The tokenizer's sentinels in order, known to be enough for `raw_length` tokens.

    Raises:
        UserError: an example has more hidden spans than the tokenizer has sentinels.
    """
    _, spans = num_noise(raw_length, noise_density, mean_span_length)
    if spans > tokenizer.num_sentinels:
        raise UserError(
            f"data.sequence_length: an example of {raw_length} raw tokens hides {spans} spans, "
            f"but the tokenizer has {tokenizer.num_sentinels} sentinels"
        )
    return np.asarray([tokenizer.sentinel(i) for i in range(tokenizer.num_sentinels)], np.int32)
