"""What is minimised, as sums over real tokens that the caller divides by global counts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class TargetSums(NamedTuple):
    """Sums over real targets: add them over batches, then divide (never a mean of means)."""

    nats: Array  # Σ -log p(target)
    correct: Array  # targets whose logit was above all others, int32
    targets: Array  # their number, int32


def target_sums(
    logits_BLV: Float[Array, "B L V"],
    targets_BL: Int[Array, "B L"],
    target_mask_BL: Bool[Array, "B L"],
) -> TargetSums:
    """Cross-entropy and accuracy of the real targets.

    A label is picked by comparison with all V, since V may be split over devices.
    """
    is_label_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1], dtype=bool)
    label_logit_BL = jnp.where(is_label_BLV, logits_BLV, 0).sum(axis=-1)
    nats_BL = jax.nn.logsumexp(logits_BLV, axis=-1) - label_logit_BL
    correct_BL = label_logit_BL > jnp.where(is_label_BLV, -jnp.inf, logits_BLV).max(axis=-1)
    return TargetSums(
        nats=jnp.where(target_mask_BL, nats_BL, 0).sum(),
        correct=(correct_BL & target_mask_BL).sum(dtype=jnp.int32),
        targets=target_mask_BL.sum(dtype=jnp.int32),
    )
