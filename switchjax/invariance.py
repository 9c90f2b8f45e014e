"""The same steps on different meshes: what is compared, how far apart it is, how far it may be.

Sums are taken in another order on every mesh, so float32 numbers differ in their last bits. Each
quantity has one measure of deviation and one limit, whatever the mesh, model or optimizer:

- Losses and the norm of the gradient, of every step: |a - b| / |b|, at most 1e-5.
- The first step's gradient, element by element: |a - b| / (|b| + 0.01), at most 1e-4, which is the
  relative tolerance 1e-4 with the absolute one 1e-6.
- Where parameters moved to in all steps, and the optimizer's state: Σ|a - b| / Σ|b| over the
  parameters of a kind, over an array of the state; at most 1e-4. Sums, because optimizers that
  divide by the gradient's own size make a step of full length out of an element that is 0 but for
  rounding, and its sign is anyone's; such elements are few. The gradient has shown each element.
- Counts (expert load, drops, tokens), initial parameters, and how arrays lie: equal.

More steps amplify rounding, as training does. And a token whose two best experts are equal but for
rounding may go to either: then loads differ by one or two, and the seed next to it shows none.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from switchjax.batch import Batch
from switchjax.config import RunConfig
from switchjax.layout import Layout
from switchjax.metrics import StepMetrics
from switchjax.saved_steps import named_leaves
from switchjax.state import TrainState, abstract_state
from switchjax.step import step_with_gradient

LOSS_LIMIT = 1e-5
GRADIENT_LIMIT = 1e-4
_GRADIENT_FLOOR = 1e-6 / GRADIENT_LIMIT

# What a parameter is part of, by the name of its array.
_KINDS = {
    "router": ("router_DE",),
    "experts": ("w_in_EDF", "w_gate_EDF", "w_out_EFD"),
    "attention": ("w_q_DHK", "w_k_DHK", "w_v_DHK", "w_o_HKD"),
    "position": ("relative_UH",),
    "feed-forward": ("w_in_DF", "w_gate_DF", "w_out_FD"),
    "norm": ("norm_D",),
    "embedding": ("embed_VD",),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}

Arrays = dict[str, np.ndarray]


class Observed(NamedTuple):
    """Some steps on one mesh, on the host; parameters by their names."""

    losses: Arrays  # and the norm of the gradient, [steps]
    counts: Arrays  # of tokens and choices, [steps, ...]
    initial: Arrays  # parameters before the first step
    gradient: Arrays  # of the first step, before clipping
    moved: Arrays  # parameters after the last step, less the initial ones
    others: Arrays  # the optimizer's state and the router bias after the last step
    held: dict[str, int]  # elements of each kind of parameter that a device holds
    misplaced: int  # arrays of the state that do not lie as the layout says
    unequal: int  # arrays of the state of which two devices hold different copies
    programs: int  # that the compiler made for all steps
    fell_back: bool  # a buffer was too small, and the slower way was taken


class Row(NamedTuple):
    """One quantity, compared."""

    name: str
    deviation: float
    limit: float

    @property
    def holds(self) -> bool:
        """False for NaN too."""
        return self.deviation <= self.limit


def observe(
    config: RunConfig,
    layout: Layout,
    state: TrainState,
    batches: Iterable[Batch],
    compiler_options: dict[str, Any] | None = None,
) -> Observed:
    """Takes a step on each batch, on the mesh in use, in one program as training runs it.

    Args:
        state: before the first step; its arrays are gone afterwards.
    """
    step = jax.jit(
        partial(step_with_gradient, config, layout),
        donate_argnums=0,
        compiler_options=compiler_options,
    )
    initial, metrics, gradient = _on_host(state.model), [], {}
    with _count_programs() as programs:
        for number, batch in enumerate(batches):
            state, measured, of_step = step(state, layout.place(batch))
            metrics.append(jax.device_get(measured))
            if number == 0:
                gradient = _on_host(of_step)
    losses, counts = _of_metrics(metrics)
    return Observed(
        losses=losses,
        counts=counts,
        initial=initial,
        gradient=gradient,
        moved={name: x - initial[name] for name, x in _on_host(state.model).items()},
        others=_on_host((state.opt_state, state.router_bias_XE)),
        held=_held(state),
        misplaced=_count_misplaced(state, abstract_state(config, layout)),
        unequal=sum(map(copies_differ, jax.tree.leaves(state))),
        programs=len(programs),
        fell_back=any(m.router is not None and m.router.fell_back.any() for m in metrics),
    )


def _on_host(tree: Any) -> Arrays:
    """Copies, since the next step takes the arrays' memory."""
    return {name: np.array(x) for name, x in named_leaves(tree).items()}


def _of_metrics(metrics: list[StepMetrics]) -> tuple[Arrays, Arrays]:
    names = {"loss": "loss", "ce": "ce", "aux": "aux", "z": "z", "grad_norm": "gradient norm"}
    losses = {name: np.stack([getattr(m, field) for m in metrics]) for field, name in names.items()}
    counts = {"tokens": np.stack([m.tokens for m in metrics])}
    routers = [m.router for m in metrics if m.router is not None]
    if routers:
        counts["expert load"] = np.stack([router.load_E for router in routers])
        counts["drops"] = np.stack([router.dropped for router in routers])
        counts["choices"] = np.stack([router.asked for router in routers])
    return losses, counts


@contextmanager
def _count_programs() -> Iterator[list[str]]:
    """Gives a list that gets an entry for every program compiled meanwhile."""
    programs: list[str] = []

    def listen(event: str, duration_secs: float, **details: Any) -> None:
        if event.endswith("/backend_compile_duration"):
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _held(state: TrainState) -> dict[str, int]:
    """As the largest part of each array on any device."""
    held = dict.fromkeys(_KINDS, 0)
    for name, x in named_leaves(state.model).items():
        held[_kind(name)] += max(shard.data.size for shard in x.addressable_shards)
    return held


def _kind(name: str) -> str:
    return _KIND_OF[name.rsplit(".", 1)[-1]]


def _count_misplaced(state: TrainState, promised: TrainState) -> int:
    """Parts on every device are compared, not only what the array says of itself."""
    misplaced = 0
    for x, other in zip(jax.tree.leaves(state), jax.tree.leaves(promised), strict=True):
        shapes = {shard.data.shape for shard in x.addressable_shards}
        lies_as_promised = x.sharding.is_equivalent_to(other.sharding, x.ndim)
        misplaced += not lies_as_promised or shapes != {other.sharding.shard_shape(x.shape)}
    return misplaced


def copies_differ(x: jax.Array) -> bool:
    """Does any part of the array have different bits on two devices that hold it?"""
    first: dict[str, bytes] = {}
    parts = [(str(shard.index), np.asarray(shard.data).tobytes()) for shard in x.addressable_shards]
    return any(first.setdefault(place, part) != part for place, part in parts)


def compare(got: Observed, want: Observed, *, moved_limit: float = GRADIENT_LIMIT) -> list[Row]:
    """How far `got` is from the reference, one row a quantity.

    Args:
        moved_limit: of where parameters moved to, and of the optimizer's state.
    """
    assert got.initial.keys() == want.initial.keys() and got.others.keys() == want.others.keys()
    kinds = [kind for kind in _KINDS if any(_kind(name) == kind for name in want.initial)]
    others = [_of_sums([got.others[name]], [x]) for name, x in want.others.items()]
    return [
        Row("initial parameters", _max(map(_gap, *_both(got.initial, want.initial))), 0),
        *(Row(n, _relative(got.losses[n], x), LOSS_LIMIT) for n, x in want.losses.items()),
        *(Row(n, _gap(got.counts[n], x), 0) for n, x in want.counts.items()),
        *(_gradient_row(kind, got, want) for kind in kinds),
        *(_parameters_row(kind, got, want, moved_limit) for kind in kinds),
        Row("optimizer state", _max(others), moved_limit),
        # These are faults of one mesh by itself, and the reference is one too.
        Row("arrays misplaced", max(got.misplaced, want.misplaced), 0),
        Row("copies unequal", max(got.unequal, want.unequal), 0),
        Row("programs beyond one", max(abs(got.programs - 1), abs(want.programs - 1)), 0),
    ]


def _gradient_row(kind: str, got: Observed, want: Observed) -> Row:
    """The farthest element."""
    of_kind = _both(got.gradient, want.gradient, kind)
    gaps = [_relative(a, b, _GRADIENT_FLOOR) for a, b in zip(*of_kind, strict=True)]
    return Row(f"gradient: {kind}", _max(gaps), GRADIENT_LIMIT)


def _parameters_row(kind: str, got: Observed, want: Observed, limit: float) -> Row:
    """All of the kind together."""
    return Row(f"parameters: {kind}", _of_sums(*_both(got.moved, want.moved, kind)), limit)


def _both(
    got: Arrays, want: Arrays, kind: str | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    names = [name for name in want if kind in (None, _kind(name))]
    return [got[name] for name in names], [want[name] for name in names]


def _gaps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|a - b| in float64; NaN where one of them is, or both are the same infinity."""
    with np.errstate(invalid="ignore"):
        return np.abs(np.subtract(got, want, dtype=np.float64))


def _gap(got: np.ndarray, want: np.ndarray) -> float:
    """Largest |a - b|."""
    return _max([_gaps(got, want).max()])


def _relative(got: np.ndarray, want: np.ndarray, floor: float = 0.0) -> float:
    """Largest |a - b| / (|b| + floor); what is equal is so to 0 too."""
    gaps, sizes = _gaps(got, want), np.abs(want, dtype=np.float64) + floor
    with np.errstate(divide="ignore", invalid="ignore"):
        return _max((gaps / sizes)[gaps != 0])


def _of_sums(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Σ|a - b| / Σ|b| over all arrays; what is equal is so to 0 too."""
    gap = np.sum([_gaps(a, b).sum() for a, b in zip(got, want, strict=True)])
    size = np.sum([np.abs(b, dtype=np.float64).sum() for b in want])
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(gap / size) if gap != 0 else 0.0


def _max(values: Iterable[float]) -> float:
    """0 of nothing; NaN if one is."""
    return float(np.max(np.fromiter(values, np.float64), initial=0.0))
