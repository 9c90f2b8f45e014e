"""From a data config to training and evaluation batches: text, tokens, examples, split.

Decides which examples are held out and what an evaluation sees. Knows nothing of devices; a
process is the rows that it holds here.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Integer

from switchjax.batch import Batch
from switchjax.config import DataConfig
from switchjax.data.corpus import documents_of
from switchjax.data.examples import Examples, empty_like, encode_documents, to_batch
from switchjax.data.packing import PackedExamples
from switchjax.data.spans import SpanExamples, sentinels_for, span_lengths
from switchjax.data.stream import TrainStream
from switchjax.data.tokenizer import Tokenizer, load_tokenizer
from switchjax.errors import UserError

# Evaluations must be comparable over seeds: their random spans come from this key alone.
_EVAL_KEY = 20210111


@dataclass(frozen=True, kw_only=True)
class Data:
    """All that a run asks of its text. Lengths are in tokens."""

    train: TrainStream
    eval_batches: list[Batch]
    """Batches of held-out examples, this process's rows; always the same ones."""
    tokenizer: Tokenizer
    decoder_length: int
    encoder_length: int | None
    """None for a decoder-only model."""
    num_train_examples: int
    num_eval_examples: int
    """Held-out examples that `eval_batches` hold, over all processes."""
    num_tokens: int
    """Of the whole text, held-out part included."""
    unigram_entropy: float
    """Of the targets of `eval_batches` over all processes; see `unigram_entropy`."""


def row_lengths(config: DataConfig, architecture: str) -> tuple[int, ...]:
    """(encoder length, decoder length), or (row length,) for a decoder; reads no text.

    Raises:
        UserError: no example of span corruption has these lengths.
    """
    if architecture == "decoder_only":
        return (config.sequence_length,)
    _, decoder_length = span_lengths(
        config.sequence_length, config.noise_density, config.mean_span_length
    )
    return config.sequence_length, decoder_length


def load_data(
    config: DataConfig,
    architecture: str,
    *,
    seed: int,
    vocab_size: int,
    eval_batches: int | None,
    rows: Sequence[int] | None = None,
) -> Data:
    """Reads the text and gives its batches; `vocab_size` is the model's; all held-out batches if
    `eval_batches` is None.

    Args:
        rows: of each batch, those that this process holds; None = all.

    Raises:
        UserError: text, tokenizer or numbers do not fit; what needs no text is checked first.
    """
    lengths = row_lengths(config, architecture)
    tokenizer = _fitting_tokenizer(config, architecture, vocab_size)
    documents = documents_of(config.files, config.json_field)
    examples, tokens = build_examples(documents, tokenizer, config, architecture)
    train, held_out = split(len(examples), config.holdout)
    stream = TrainStream(
        examples,
        train,
        batch_size=config.batch_size,
        seed=seed,
        identity=_identity(config, architecture, tokens),
        rows=rows,
    )
    evaluated = held_out[: None if eval_batches is None else eval_batches * config.batch_size]
    batches = held_out_batches(examples, evaluated, config.batch_size, tokenizer.pad_id)
    return Data(
        train=stream,
        eval_batches=batches if rows is None else [_take_rows(batch, rows) for batch in batches],
        tokenizer=tokenizer,
        decoder_length=lengths[-1],
        encoder_length=None if architecture == "decoder_only" else lengths[0],
        num_train_examples=len(train),
        num_eval_examples=len(evaluated),
        num_tokens=len(tokens),
        unigram_entropy=unigram_entropy(batches),
    )


def build_examples(
    documents: Sequence[str], tokenizer: Tokenizer, config: DataConfig, architecture: str
) -> tuple[Examples, Integer[np.ndarray, "N"]]:
    """The text as examples of `architecture`, and its N tokens."""
    if architecture == "decoder_only":
        tokens, starts = encode_documents(documents, tokenizer, eos=True)
        return PackedExamples(tokens, starts, tokenizer, row_length=config.sequence_length), tokens
    tokens, _ = encode_documents(documents, tokenizer, eos=False)
    examples = SpanExamples(
        tokens,
        tokenizer,
        sequence_length=config.sequence_length,
        noise_density=config.noise_density,
        mean_span_length=config.mean_span_length,
    )
    return examples, tokens


def split(
    num_examples: int, holdout: float
) -> tuple[Integer[np.ndarray, "T"], Integer[np.ndarray, "H"]]:
    """Indices of (training, held-out) examples: disjoint, the same for every seed.

    At least one example is held out. Multiples of 2**64 / golden ratio, modulo 2**64, spread
    evenly over the text, and so does every prefix of the held-out ones: a short evaluation sees
    all of the text too.
    """
    with np.errstate(over="ignore"):
        hashed = np.arange(1, num_examples + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    order = np.argsort(hashed, kind="stable")
    num_held_out = max(1, round(num_examples * holdout))
    return np.sort(order[num_held_out:]), order[:num_held_out]


def held_out_batches(
    examples: Examples, indices: Integer[np.ndarray, "H"], batch_size: int, pad_id: int
) -> list[Batch]:
    """Whole batches of these examples in this order, each example the same at every call.

    The last one is filled up with rows of padding (segment 0, no target), so that one compiled
    shape serves all.
    """
    rows = [examples.example(int(i), np.random.default_rng((_EVAL_KEY, int(i)))) for i in indices]
    missing = -len(rows) % batch_size
    rows += [empty_like(rows[0], pad_id)] * missing if rows else []
    return [
        to_batch(rows[i : i + batch_size], range(batch_size))
        for i in range(0, len(rows), batch_size)
    ]


def unigram_entropy(batches: Iterable[Batch]) -> float:
    """Entropy of the real targets' own distribution, in nats a token; NaN if there are none.

    What a model reaches at best that knows how often each token occurs and nothing else.
    """
    targets = [np.asarray(b.targets_BL)[np.asarray(b.target_mask_BL)] for b in batches]
    if not targets or not (counts := np.bincount(np.concatenate(targets))).any():
        return math.nan
    share = counts[counts > 0] / counts.sum()
    return float(-np.sum(share * np.log(share)))


def _fitting_tokenizer(config: DataConfig, architecture: str, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer)
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {vocab_size} must be at least the tokenizer's "
            f"{tokenizer.vocab_size} ({config.tokenizer}, sentinels included)"
        )
    if architecture != "decoder_only":
        density, mean = config.noise_density, config.mean_span_length
        raw_length, _ = span_lengths(config.sequence_length, density, mean)
        sentinels_for(raw_length, tokenizer, noise_density=density, mean_span_length=mean)
    return tokenizer


def _identity(
    config: DataConfig, architecture: str, tokens: Integer[np.ndarray, "N"]
) -> dict[str, str | int | float]:
    """What a position in the stream is a position in; paths may change, their text may not."""
    names = ["sequence_length", "holdout"]
    if architecture != "decoder_only":
        names += ["noise_density", "mean_span_length"]
    settings = {name: getattr(config, name) for name in names}
    text = hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=8).hexdigest()
    return {"architecture": architecture, "text": text, **settings}


def _take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    return Batch(*(None if values is None else values[list(rows)] for values in batch))
