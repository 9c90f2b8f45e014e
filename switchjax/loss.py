"""What is minimised, as sums over real tokens that the caller divides by global counts."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


def cross_entropy_sum(
    logits_BLV: Float[Array, "B L V"],
    targets_BL: Int[Array, "B L"],
    target_mask_BL: Bool[Array, "B L"],
) -> Float[Array, ""]:
    """Σ -log p(target) over real targets, in nats.

    The label is picked by comparison with an iota, since V may be split over devices.
    """
    labels_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1], dtype=bool)
    target_logit_BL = jnp.where(labels_BLV, logits_BLV, 0).sum(axis=-1)
    nats_BL = jax.nn.logsumexp(logits_BLV, axis=-1) - target_logit_BL
    return jnp.where(target_mask_BL, nats_BL, 0).sum()
