"""Whole train steps are the same on every mesh, however tokens travel: the invariance matrix.

Three steps on skewed, padded rows whose queues overflow, compared with one device by the package's
own `compare`, whose limits are those of `switchjax verify`. The default run has every pair of
options; `pytest -m exhaustive` has every combination, and takes hours.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import builders
import jax
import numpy as np
import pytest
from covering import cover_pairs, pairs_of, possible

from switchjax.config import Remat, RunConfig
from switchjax.invariance import Observed, Row, compare, observe

Report = Callable[[str, list[Row]], None]

STEPS, ROWS = 3, 32
# For XLA: the same programs of the same operations, compiled in half the time. The XLA of jax 0.10
# has an older code generator too, which takes a third.
FAST: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    FAST["xla_cpu_use_fusion_emitters"] = False
OPTIMIZERS = {
    "sgd": dict(learning_rate=1.0, clip_norm=None),
    "adamw": dict(learning_rate=1e-3, clip_norm=0.1),
    "adafactor": dict(learning_rate=1e-2),
}
# Both layers are Switch layers, so the scan has something to loop over.
TIGHT = replace(builders.MODEL, num_layers=2, moe_every=1, capacity_factor=1.0)
ARCHITECTURES = {
    "decoder_only": replace(
        TIGHT, architecture="decoder_only", activation="geglu", jitter=0.1, dropout=0.1
    ),
    "encoder_decoder": TIGHT,
}
FACTORS = {
    # The files, and the one shape of the usual eight that has none.
    "mesh": [*builders.small_meshes()[1:], "expert=2,model=4"],
    "dispatcher": ["all_to_all", "all_gather", "ragged", "local"],
    "architecture": [*ARCHITECTURES],
    "optimizer": [*OPTIMIZERS],
    "accumulation": [1, 4],
    "remat": ["none", "moe", "dots", "full"],
    "scan": [True, False],
    "zero": [0, 1, 2, 3],
}


class Case(NamedTuple):
    """What decides the numbers; all else must not."""

    architecture: str
    optimizer: str
    accumulation: int
    drops: bool

    def config(self, **model) -> RunConfig:
        of_architecture = ARCHITECTURES[self.architecture]
        if not self.drops:  # as many slots as tokens
            model["capacity_factor"] = float(of_architecture.num_experts)
        return builders.run_config(
            replace(of_architecture, **model),
            rows=ROWS,
            optimizer=self.optimizer,
            warmup_steps=1,
            accumulation=self.accumulation,
            **OPTIMIZERS[self.optimizer],
        )


class Run(NamedTuple):
    """A combination of the factors, in their order."""

    mesh: str
    dispatcher: Literal["all_to_all", "all_gather", "ragged", "local"]
    architecture: str
    optimizer: str
    accumulation: int
    remat: Remat
    scan: bool
    zero: int

    @property
    def name(self) -> str:
        """Of the mesh, with how tokens travel on it and where the state is."""
        zero = f",zero={self.zero}" if self.zero else ""
        return f"{self.mesh},dispatcher={self.dispatcher}{zero}"

    @property
    def case(self) -> Case:
        drops = self.dispatcher != "ragged"
        return Case(self.architecture, self.optimizer, self.accumulation, drops)

    @property
    def id(self) -> str:
        return " ".join(
            [
                f"{self.mesh},{self.dispatcher}",
                *[f"zero {self.zero}"] * (self.zero > 0),
                self.architecture,
                self.optimizer,
                *[f"accumulation {self.accumulation}"] * (self.accumulation > 1),
                *["remat " + self.remat] * (self.remat != "none"),
                *["unrolled"] * (not self.scan),
            ]
        )


def is_possible(combination: tuple) -> bool:
    mesh, dispatcher, zero = builders.read_mesh(combination[0]), combination[1], combination[-1]
    return (dispatcher != "local" or mesh.expert == 1) and (not zero or mesh.data > 1)


ALL = [Run(*combination) for combination in possible(FACTORS, is_possible)]
PAIRWISE = cover_pairs(ALL, share=lambda run: run.case)


def on_two_pythons(runs: list[Run]) -> list:
    """The first run of every mesh is also one of the mesh-equality tests."""
    first = {run.mesh: run for run in reversed(runs)}
    return [
        pytest.param(run, id=run.id, marks=[pytest.mark.mesh] * (run == first[run.mesh]))
        for run in runs
    ]


def steps(config: RunConfig, mesh_name: str) -> Observed:
    layout = builders.layout(mesh_name)
    batches = [builders.random_batch(config.model, ROWS, seed=number) for number in range(STEPS)]
    with jax.set_mesh(builders.mesh(mesh_name)):
        return observe(config, layout, builders.start(config, layout), batches, FAST)


@cache
def reference(config: RunConfig) -> Observed:
    return steps(config, "single")


def assert_same(run: Observed, config: RunConfig, name: str, report: Report) -> None:
    rows = compare(run, reference(config))
    report(name, rows)
    beyond = [f"{row.name} {row.deviation:.1e} > {row.limit}" for row in rows if not row.holds]
    assert not beyond, "; ".join(beyond)


def assert_parts_are_held(run: Observed, config: RunConfig, mesh_name: str) -> None:
    """Experts are split over `expert` and `model`, tensors over `model`, and the rest is whole;
    with zero 3 all but the scales of norms and the bias of positions are over `data` too.
    """
    shape = builders.read_mesh(mesh_name)
    parts = shape.data if shape.storage.zero == 3 else 1
    devices = {
        "router": parts,
        "experts": shape.expert * shape.model * parts,
        "attention": shape.model * parts,
        "feed-forward": shape.model * parts,
        "norm": 1,
        "position": shape.model,
        "embedding": shape.model * parts,
    }
    whole = reference(config).held
    assert run.held == {kind: whole[kind] // devices[kind] for kind in devices}


def check(run: Run, report: Report) -> None:
    observed = steps(run.case.config(remat=run.remat, scan=run.scan), run.name)
    expected = run.case.config()
    assert_same(observed, expected, run.id, report)
    assert_parts_are_held(observed, expected, run.name)


@pytest.mark.parametrize("run", on_two_pythons(PAIRWISE))
def test_steps_are_the_same(run, report_deviations):
    """Cases 1, 2, 3, 15, 18, 34, 38 and 41: what goes wrong in each would show as a factor."""
    check(run, report_deviations)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ALL, ids=lambda run: run.id)
def test_steps_are_the_same_in_every_combination(run, report_deviations):
    check(run, report_deviations)


# Case 57: tensors in groups of four, and experts whole, split, over the group, or over more.
OF_WAYS = Case("decoder_only", "sgd", 4, drops=True).config()
WAYS = {
    "hidden over model": "data=2,model=4",
    "experts over both": "expert=2,model=4,experts=folded",
    "only what peers need": "expert4_model2,dispatcher=all_gather,buffer=1.5",
    "the slower way": "data2_expert2_model2,dispatcher=all_gather,buffer=0.3",
    "in chunks": "expert=4,experts=folded,chunks=2",
    "where they are": "data4_model2,experts=folded,dispatcher=local",
    "the busiest to weights at hand": "data2_expert2_model2,zero=3,hot_experts=4",
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_the_same_whichever_way_tokens_travel(way, report_deviations):
    observed = steps(OF_WAYS, WAYS[way])
    assert_same(observed, OF_WAYS, way, report_deviations)
    assert_parts_are_held(observed, OF_WAYS, WAYS[way])
    assert observed.fell_back == (way == "the slower way")


# Who is asked, and by whom, is not in the product above.
PLAIN = Case("encoder_decoder", "sgd", 1, drops=True).config()
KINDS = {
    "top 2, groups": replace(
        PLAIN, model=replace(PLAIN.model, top_k=2, group_size=4, capacity_factor=0.5)
    ),
    "expert choice, second at random, bias": replace(
        PLAIN,
        model=replace(
            PLAIN.model,
            encoder_router="expert_choice",
            top_k=2,
            random_second=True,
            capacity_factor=0.5,
        ),
        optim=replace(PLAIN.optim, accumulation=4, bias_rate=0.05),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_same_whoever_chooses(kind, report_deviations):
    observed = steps(KINDS[kind], "data2_expert2_model2")
    assert_same(observed, KINDS[kind], kind, report_deviations)


# --- The matrix itself ------------------------------------------------------------------------


def test_every_pair_of_options_is_tried():
    """And those that cannot be are not: `local` sends nothing to other experts, and a state is
    split over `data` where it has devices.
    """
    tried = set().union(*map(pairs_of, PAIRWISE))
    assert tried == set().union(*map(pairs_of, ALL))
    sizes = [len(options) for options in FACTORS.values()]
    pairs = sum(a * b for i, a in enumerate(sizes) for b in sizes[:i])
    shapes = [builders.read_mesh(name) for name in FACTORS["mesh"]]
    impossible = sum((shape.expert > 1) + 3 * (shape.data == 1) for shape in shapes)
    assert len(tried) == pairs - impossible
    assert {builders.read_mesh(m).sizes for m in FACTORS["mesh"]} >= {
        (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (1, 2, 4), (2, 4, 1)
    }  # fmt: skip


CONFIGS = {str(run.case): run.case.config() for run in PAIRWISE} | KINDS


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reference_drops_and_pads_and_learns(name):
    """Tokens drop, routing is skewed, rows are padded, and every parameter has a gradient."""
    config = CONFIGS[name]
    run = reference(config)
    choices, drops = run.counts["choices"].sum(axis=1), run.counts["drops"].sum(axis=1)
    if config.model.capacity_factor < config.model.num_experts:
        assert (drops > 0.1 * choices).all()
    else:
        assert not drops.any()
    load_TXE = run.counts["expert load"]
    assert (load_TXE.max(axis=(1, 2)) > 1.5 * load_TXE.mean(axis=(1, 2))).all()
    places = ROWS * (builders.DECODER_LENGTH + builders.ENCODER_LENGTH)
    if config.model.architecture == "decoder_only":
        places = ROWS * builders.DECODER_LENGTH
    assert (0.6 * places < run.counts["tokens"]).all() and (
        run.counts["tokens"] < 0.8 * places
    ).all()
    for name, gradient in run.gradient.items():
        assert np.abs(gradient).max() > 1e-5, name
        assert np.abs(run.moved[name]).max() > 1e-5, name
    assert run.losses["loss"][-1] < run.losses["loss"][0]


def rows_beyond(observed: Observed) -> set[str]:
    return {row.name for row in compare(observed, reference(PLAIN)) if not row.holds}


def scaled(arrays: dict[str, np.ndarray], word: str, factor: float) -> dict[str, np.ndarray]:
    """Of one array whose name contains the word."""
    name = next(name for name in arrays if word in name)
    return {n: x * np.float32(factor) if n == name else x for n, x in arrays.items()}


def test_the_comparison_sees_what_is_wrong():
    """What deviates by a tenth, or a loss by a thousandth, is beyond its limit and nothing else."""
    right = reference(PLAIN)
    assert not rows_beyond(right)
    assert {row.deviation for row in compare(right, right)} == {0}
    for name in right.losses:
        assert rows_beyond(right._replace(losses=scaled(right.losses, name, 1.001))) == {name}
    for name, x in right.counts.items():
        assert rows_beyond(right._replace(counts=right.counts | {name: x + 1})) == {name}
    words = {
        "router": "router_DE", "experts": "w_out_EFD", "attention": "w_q_DHK",
        "position": "relative_UH", "norm": "cross_norm", "embedding": "embed_VD",
    }  # fmt: skip
    for kind, word in words.items():
        wrong = right._replace(gradient=scaled(right.gradient, word, 1.1))
        assert rows_beyond(wrong) == {f"gradient: {kind}"}
        wrong = right._replace(moved=scaled(right.moved, word, 1.1))
        assert rows_beyond(wrong) == {f"parameters: {kind}"}
        wrong = right._replace(initial=scaled(right.initial, word, 1 + 1e-6))
        assert rows_beyond(wrong) == {"initial parameters"}
    assert rows_beyond(right._replace(others=scaled(right.others, "count", 2)))
    assert rows_beyond(right._replace(misplaced=1)) == {"arrays misplaced"}
    assert rows_beyond(right._replace(unequal=1)) == {"copies unequal"}
    for programs in (0, 2):
        assert rows_beyond(right._replace(programs=programs)) == {"programs beyond one"}


def test_nan_is_equal_to_nothing():
    """Also not to NaN: a comparison of nothing but NaN must not hold."""
    right = reference(PLAIN)
    nans = {name: x * np.float32(np.nan) for name, x in right.losses.items()}
    wrong = right._replace(losses=nans)
    assert {row.name for row in compare(wrong, wrong) if not row.holds} == set(nans)
    infinite = right._replace(gradient=scaled(right.gradient, "router_DE", np.inf))
    assert {row.name for row in compare(infinite, infinite) if not row.holds} == {
        "gradient: router"
    }
