"""Compiles for absent GPUs in processes of their own, and what the command makes of them."""

import importlib.metadata
import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from test_absent import linux
from test_ranking import CONFIG, H200

from switchjax.config import DataConfig
from switchjax.errors import UserError
from switchjax.mesh import read_mesh
from switchjax.plan import compiling, report
from switchjax.plan.candidates import Candidate
from switchjax.plan.compiling import Failure, Program, compile_all
from switchjax.plan.options import PlanConfig
from switchjax.plan.planning import plan, with_answer
from switchjax.plan.ranking import estimate, ranked, with_program

SMALL = replace(
    CONFIG,
    model=replace(CONFIG.model, architecture="decoder_only", d_model=64, d_ff=64, d_kv=16),
    data=DataConfig(batch_size=16, sequence_length=64),
)
CANDIDATE = Candidate(config=SMALL, shape=read_mesh("data=2,expert=8"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of these tests alone."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "switchjax" / "plan"


@pytest.fixture(scope="module")
def program(cache) -> Program:
    (answer,) = compile_all([CANDIDATE], H200)
    assert isinstance(answer, Program), answer
    return answer


@linux
def test_a_program_in_numbers(program):
    assert program.device_bytes >= program.argument_bytes + program.temp_bytes > 0
    kinds = {(c.kind, c.axes) for c, _ in program.collectives}
    assert {("all-to-all", ("expert",)), ("all-reduce", ("data", "expert"))} <= kinds
    assert any(flops > 0 for _, flops in program.collectives)
    sizes = [size for size, _, _ in program.largest]
    assert sizes == sorted(sizes, reverse=True) and 0 < sizes[0] <= program.temp_bytes


@linux
def test_the_compiler_has_the_last_word(program):
    by_formula = estimate(CANDIDATE, H200)
    row = with_program(by_formula, program, H200)
    assert row.compiled and row.device_bytes == program.device_bytes
    assert row.cost.compute == by_formula.cost.compute
    assert 0 < row.cost.hidden <= sum(row.cost.sending.values())
    assert row.cost.exposed < sum(row.cost.sending.values())


@linux
def test_a_second_question_is_answered_at_once(program, cache):
    (path,) = cache.glob("*.json")
    (again,) = compile_all([CANDIDATE], H200)
    assert again == program  # and so are the seconds that compiling took
    assert list(cache.glob("*.json")) == [path]
    path.write_text(path.read_text()[:100])  # cut off
    (anew,) = compile_all([CANDIDATE], H200)
    assert isinstance(anew, Program) and anew.device_bytes == program.device_bytes


@linux
def test_a_failed_compile_stays_in_the_table(program, cache):
    """As one that cannot be compiled at all does, which a plan would not come to."""
    impossible = replace(CANDIDATE, shape=read_mesh("expert=16"))
    answer, other = compile_all([impossible, CANDIDATE], H200)
    assert isinstance(answer, Failure) and isinstance(other, Program)
    assert answer.message.endswith("expert = 16 must divide model.num_experts = 8")
    assert len(list(cache.glob("*.json"))) == 1  # failures are asked again
    row = with_answer(estimate(CANDIDATE, H200), answer, H200)
    fine = with_answer(estimate(CANDIDATE, H200), program, H200)
    assert ranked([row, fine]) == [fine, row] and not row.fits
    console = Console(width=200, record=True, file=StringIO())
    console.print(report.table([fine, row], H200))
    assert "failed: " in console.export_text()


@linux
def test_one_mesh_explained(program, capsys):
    options = PlanConfig(mesh="data=2,expert=8", nodes=2, explain=True)
    (row,) = plan(SMALL, options)
    said = capsys.readouterr().out
    assert row.compiled
    for words in (
        "parameters",
        "gradients",
        "by the compiler",
        "all-to-all",
        "wire.py:",
        "tokens:",
        "zero = 0 *",
        "zero = 3 ",
        "remat none *",
        "remat full ",
    ):
        assert words in said, words
    assert f"{program.largest[0][1]}" in said


@linux
def test_too_large_is_said_with_what_would_help(program, tmp_path, capsys):
    text = (compiling.PACKAGE / "plan" / "accelerators" / "h200.toml").read_text()
    (tmp_path / "small.toml").write_text(text.replace("151_397_597_184", "100_000"))
    options = {"hardware": str(tmp_path / "small.toml"), "nodes": 2, "compile": 0}
    with pytest.raises(UserError, match=r"does not fit: .* GB of the .* less of them: "):
        plan(SMALL, PlanConfig(mesh="data=2,expert=8", **options))
    with pytest.raises(UserError, match=r"no layout fits; the smallest, .*; most are "):
        plan(SMALL, PlanConfig(**options))


def test_without_the_plugin_formulas_do(monkeypatch, capsys):
    version = importlib.metadata.version

    def without(name):
        if name == "jax-cuda13-pjrt":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    rows = plan(SMALL, PlanConfig(nodes=2, compile=2, json=True))
    said = capsys.readouterr()
    assert not any(row.compiled for row in rows)
    assert "pip install 'switchjax[plan]'" in said.err
    assert [row["layout"] for row in json.loads(said.out)] == [r.candidate.name for r in rows]


def test_a_tpu_is_not_compiled_for(capsys):
    plan(SMALL, PlanConfig(hardware="v5e", devices_per_node=16, compile=2))
    assert "TPU v5e is not compiled for: all numbers are by formula" in capsys.readouterr().out


def test_a_layout_that_cannot_exist():
    with pytest.raises(UserError, match="expert = 16 must divide model.num_experts = 8"):
        plan(SMALL, PlanConfig(mesh="expert=16", nodes=2))
    with pytest.raises(UserError, match="batch_tokens 100 = 100 must be a multiple of the 64"):
        plan(SMALL, PlanConfig(batch_tokens="100", nodes=2))
    with pytest.raises(UserError, match="plan.nodes 3 of 8 devices .* the 16 devices of mesh "):
        plan(SMALL, PlanConfig(mesh="data=2,expert=8", nodes=3))
    with pytest.raises(UserError, match="plan.explain needs plan.mesh"):
        PlanConfig(explain=True)
