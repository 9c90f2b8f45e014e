"""What one training or evaluation step eats; numpy on the way in, `jax.Array` on the device.

Masks are explicit. A *segment* numbers the documents packed into one row from 1; 0 is padding.
Tokens see only tokens of their own segment.
"""

from typing import Any, NamedTuple

Array = Any  # numpy.ndarray or jax.Array: this module knows neither


class Batch(NamedTuple):
    """Rows of tokens. `encoder_*` is None for a decoder-only model. Integers are int32."""

    row_B: Array  # number of the row in the whole batch of one optimizer step: keys the noise
    tokens_BL: Array  # what the decoder reads: the targets shifted right by one
    segment_BL: Array  # 0 = padding
    targets_BL: Array  # what the decoder should say next
    target_mask_BL: Array  # bool: positions that enter the loss
    encoder_tokens_BS: Array | None = None
    encoder_segment_BS: Array | None = None


class Prompts(NamedTuple):
    """Rows of tokens to be continued. `encoder_*` is None for a decoder-only model.

    The decoder reads its tokens, and what follows the last real one is the continuation: for an
    encoder-decoder they are the start token alone. A row of segment 0 throughout is no prompt.
    """

    row_B: Array  # number of the prompt: keys what is drawn for it
    tokens_BL: Array
    segment_BL: Array  # 1, or 0 = padding
    encoder_tokens_BS: Array | None = None
    encoder_segment_BS: Array | None = None
