"""What a step reports: sums and losses on the device, one flat record on the host."""

from typing import NamedTuple

import numpy as np
from jax import Array

from switchjax.moe.layer import RouterStats
from switchjax.scaling import LossScale


class StepMetrics(NamedTuple):
    """One optimizer step over the whole global batch; the same on every device."""

    loss: Array  # ce + balance_coefficient · aux + z_coefficient · z
    ce: Array  # nats per real target
    aux: Array  # balance loss, mean over Switch layers (and micro-batches)
    z: Array  # router z-loss, likewise
    grad_norm: Array  # global, before clipping; not finite if the step was skipped
    learning_rate: Array
    tokens: Array  # real tokens that the model read, int32
    router: (
        RouterStats | None
    )  # summed over micro-batches [layers, ...]; None without Switch layers
    loss_scale: LossScale | None  # after the step


def router_record(router: RouterStats | None) -> dict[str, float]:
    """How evenly the experts are used, over X Switch layers; zeros where there are none.

    Args:
        router: on the host, arrays [X, ...].

    Returns:
        `load_max` and `load_min`: the largest and smallest share of its layer's choices that any
        expert got; `dead_experts`: how many got none; `drop_fraction`: of all choices (where
        experts choose: of all tokens).
    """
    if router is None:
        return {"drop_fraction": 0.0, "load_max": 0.0, "load_min": 0.0, "dead_experts": 0}
    load_XE = np.asarray(router.load_E)
    share_XE = load_XE / np.maximum(load_XE.sum(axis=1, keepdims=True), 1)
    return {
        "drop_fraction": float(router.dropped.sum() / max(router.asked.sum(), 1)),
        "load_max": float(share_XE.max()),
        "load_min": float(share_XE.min()),
        "dead_experts": int((load_XE == 0).sum()),
    }
