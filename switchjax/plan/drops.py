"""Which share of choices will find no slot, from the loads that a run has measured."""

import math
from pathlib import Path

import numpy as np

from switchjax.errors import UserError
from switchjax.plan.sizes import Sizes

_LAST_SHARE = 0.1  # of a run's steps: routing changes early on


def measured_loads(path: str | Path) -> dict[str, np.ndarray]:
    """Share of the choices that each expert got, by Switch layer, over the end of a run.

    Args:
        path: a run's directory, or its `expert_load.npz`.

    Raises:
        UserError: there is no such file, or it is another one.
    """
    path = Path(path)
    path = path / "expert_load.npz" if path.is_dir() else path
    try:
        with np.load(path) as saved:
            load_BXE, names = saved["load"], saved["layer_names"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} holds no loads of experts: {error}") from None
    last = max(1, round(len(load_BXE) * _LAST_SHARE))
    return dict(zip(map(str, names), load_BXE[-last:].mean(axis=0), strict=True))


def expected_drops(loads: dict[str, np.ndarray], sizes: Sizes) -> float:
    """Mean over the layers; each group is a draw of its tokens' experts by the measured shares.

    Raises:
        UserError: the loads are of another number of experts.
    """
    if sizes.shape.exchange.dispatcher == "ragged" or not loads:
        return 0.0
    stacks = {stack.name: stack for stack in sizes.stacks}
    dropped = []
    for layer, share_E in loads.items():
        if len(share_E) != sizes.model.num_experts or layer.split()[0] not in stacks:
            raise UserError(
                f"the loads are of {len(share_E)} experts in {layer}, "
                f"not of a {sizes.model.architecture} model with {sizes.model.num_experts}"
            )
        stack = stacks[layer.split()[0]]
        choices = sizes.group(stack) * sizes.model.top_k
        slots = sizes.slots(stack)
        dropped.append(sum(_above(choices, p, slots) for p in share_E) / choices)
    return float(np.mean(dropped))


def _above(choices: int, share: float, slots: int) -> float:
    """Expected choices beyond the slots: of a binomial, as the normal one that it is close to."""
    mean, spread = choices * share, math.sqrt(choices * share * (1 - share))
    if spread == 0:
        return max(0.0, mean - slots)
    z = (mean - slots) / spread
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return (mean - slots) * (1 + math.erf(z / math.sqrt(2))) / 2 + spread * density
