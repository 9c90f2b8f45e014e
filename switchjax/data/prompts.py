"""Prompts as rows: the same tokens that training examples have, as far as a prompt goes.

Knows nothing of models; a row's length and the number of rows are the caller's.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from switchjax.batch import Prompts
from switchjax.data.examples import fill
from switchjax.data.tokenizer import Tokenizer
from switchjax.errors import UserError

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


def encode_prompt(text: str, tokenizer: Tokenizer, architecture: str) -> Int32[np.ndarray, "L"]:
    """What the encoder reads, sentinels and EOS included; or a decoder alone, behind its start.

    `<extra_id_0>` in the text is a sentinel to an encoder-decoder, and text to a decoder alone,
    which was trained on none.

    Raises:
        UserError: the tokenizer has no such sentinel; the text is not UTF-8.
    """
    try:
        if architecture == "decoder_only":
            return np.append(np.int32(tokenizer.pad_id), tokenizer.encode(text))
        texts = _SENTINEL.split(text)  # text, number, text, number, ..., text
        pieces = [tokenizer.encode(part) for part in texts[0::2]]
    except UnicodeEncodeError:
        raise UserError(f"prompt {text!r} is not UTF-8") from None
    for number in texts[1::2]:
        if int(number) >= tokenizer.num_sentinels:
            raise UserError(
                f"prompt {text!r}: there is no <extra_id_{number}>, "
                f"the tokenizer has {tokenizer.num_sentinels} sentinels"
            )
    ids = [pieces[0]]
    for number, piece in zip(texts[1::2], pieces[1:], strict=True):
        ids += [np.asarray([tokenizer.sentinel(int(number))], np.int32), piece]
    return np.concatenate([*ids, np.asarray([tokenizer.eos_id], np.int32)])


def prompt_rows(
    prompts: Sequence[Int32[np.ndarray, "L"]],
    *,
    length: int,
    num_rows: int,
    pad_id: int,
    architecture: str,
) -> Prompts:
    """Prompts of at most `length` tokens, then rows that hold none up to `num_rows`."""
    rows = [*prompts, *[np.zeros(0, np.int32)] * (num_rows - len(prompts))]
    tokens_BP = np.stack([fill(row, length, pad_id) for row in rows])
    segment_BP = (np.arange(length)[None] < [[len(row)] for row in rows]).astype(np.int32)
    row_B = np.arange(num_rows, dtype=np.int32)
    if architecture == "decoder_only":
        return Prompts(row_B, tokens_BP, segment_BP)
    # The pad id starts the decoder, as `examples.shift_right` has it.
    start_B1 = np.full((num_rows, 1), pad_id, np.int32)
    return Prompts(row_B, start_B1, segment_BP[:, :1], tokens_BP, segment_BP)
