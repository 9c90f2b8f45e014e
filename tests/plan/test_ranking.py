"""Layouts in order: what divides, what it costs over which link, what is said of the first."""

import json
from dataclasses import replace
from io import StringIO

import builders
import pytest
from rich.console import Console

from switchjax.config import DataConfig, RunConfig
from switchjax.errors import UserError
from switchjax.mesh import read_mesh
from switchjax.plan import report
from switchjax.plan.candidates import candidates
from switchjax.plan.cost import LINK_SHARE, group_sizes, send_seconds
from switchjax.plan.drops import expected_drops, measured_loads
from switchjax.plan.hardware import read_hardware
from switchjax.plan.planning import _number
from switchjax.plan.ranking import best_of_each, estimate, ranked
from switchjax.plan.sizes import Sizes

H200 = read_hardware("h200")
MODEL = replace(
    builders.MODEL, d_model=256, d_ff=1024, num_heads=4, d_kv=64, vocab_size=1024, dtype="bfloat16"
)
CONFIG = RunConfig(model=MODEL, data=DataConfig(batch_size=64, sequence_length=256))


def rows(config=CONFIG, devices=16, hardware=H200):
    found = candidates(config, devices, hardware)
    return ranked(estimate(candidate, hardware) for candidate in found)


# --- What there is to choose from -----------------------------------------------------------


def test_candidates_divide_and_differ():
    found = candidates(CONFIG, 16, H200)
    assert len({(c.shape, c.config.model.remat, c.config.optim.accumulation) for c in found}) == (
        len(found)
    )
    for candidate in found:
        shape = candidate.shape
        assert shape.num_devices == 16
        assert MODEL.num_experts % shape.expert == 0 and MODEL.num_heads % shape.model == 0
        assert shape.model <= 4  # heads
        rows = CONFIG.data.batch_size // candidate.config.optim.accumulation
        assert rows % (shape.data * shape.expert) == 0
        assert (shape.exchange.dispatcher == "local") == (shape.expert == 1)
        assert shape.exchange.experts == "separate" or shape.model > 1
    kinds = {(c.shape.exchange.experts, c.shape.exchange.dispatcher) for c in found}
    assert len(kinds) == 2 * 4
    assert {c.config.model.remat for c in found} == {"none", "full"}
    assert {c.config.optim.accumulation for c in found} >= {1, 2, 4}


def test_a_dense_model_has_no_experts_to_place():
    dense = replace(CONFIG, model=replace(MODEL, moe_every=0))
    assert {c.shape.expert for c in candidates(dense, 16, H200)} == {1}


def test_nothing_divides():
    odd = replace(CONFIG, data=DataConfig(batch_size=3, sequence_length=256))
    with pytest.raises(UserError, match=r"no layout of 16 devices .* must divide .*batch_size 3"):
        candidates(odd, 16, H200)


# --- What sending costs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "axes", "group", "here"),
    [
        ("data=2,expert=8,model=1", ("expert",), 8, 8),
        ("data=2,expert=8,model=1", ("data",), 2, 1),
        ("data=2,expert=8,model=1", ("data", "expert"), 16, 8),
        ("data=1,expert=16,model=1", ("expert",), 16, 8),
        ("data=2,expert=4,model=4", ("expert",), 4, 2),
        ("data=2,expert=4,model=4", ("model",), 4, 4),
        ("data=2,expert=4,model=4", ("expert", "model"), 16, 8),
        ("data=4,expert=2,model=8", ("expert",), 2, 1),
    ],
)
def test_who_shares_a_node(mesh, axes, group, here):
    assert group_sizes(axes, read_mesh(mesh), H200) == (group, here)


def test_seconds_by_hand():
    inside, between = H200.inside, H200.between

    def seconds(kind, axes, mesh, size=1e9, runs=2):
        return send_seconds(kind, axes, size, runs, read_mesh(mesh), H200)

    near = seconds("all-to-all", ("expert",), "data=2,expert=8")
    assert near == ("inside", pytest.approx(1e9 / (450e9 * LINK_SHARE) + 2 * inside.latency))
    # Of 15 peers 8 are in the other node.
    far = seconds("all-to-all", ("expert",), "expert=16")
    crossing = 1e9 * 8 / 15 / (50e9 * LINK_SHARE)
    assert far == ("between", pytest.approx(crossing + 2 * between.latency))
    # A ring crosses with the ports of all eight devices that it has in a node: as fast as inside.
    ring = seconds("all-reduce", ("data", "expert"), "data=2,expert=8")
    assert ring == ("between", pytest.approx(1e9 / (400e9 * LINK_SHARE) + 2 * between.latency))
    # One port for each device where the others of its node are in other groups.
    lone = seconds("all-reduce", ("data",), "data=2,expert=8")
    assert lone == ("between", pytest.approx(1e9 / (50e9 * LINK_SHARE) + 2 * between.latency))


# --- The order ------------------------------------------------------------------------------


def test_order_is_by_time_among_those_that_fit():
    found = rows()
    assert all(row.fits for row in found)
    steps = [row.cost.step for row in found]
    assert steps == sorted(steps)
    for row in found[:20]:
        cost = row.cost
        assert cost.step == max(cost.compute, cost.memory) + sum(cost.sending.values())
        assert 0 < row.utilisation < 1 and 0 <= row.sending_share < 1
        tokens = 64 * (256 + 58)  # a decoder row has 58
        assert row.tokens_per_second == pytest.approx(tokens / cost.step, rel=0.01)


def test_what_does_not_fit_comes_last():
    sizes = sorted(row.device_bytes for row in rows())
    small = replace(H200, memory=int(sizes[len(sizes) // 2]))
    found = rows(hardware=small)
    fits = [row.fits for row in found]
    assert fits == sorted(fits, reverse=True) and {True, False} == set(fits)
    beyond = [row.device_bytes for row in found if not row.fits]
    assert beyond == sorted(beyond)


def test_one_row_a_mesh():
    first = best_of_each(rows())
    assert len({row.candidate.shape for row in first}) == len(first)
    assert first[0] == rows()[0]


def test_a_faster_network_never_slows_a_step():
    fast = replace(H200, between=replace(H200.between, bandwidth=400e9))
    slow = {row.candidate.name: row.cost.step for row in rows()}
    for row in rows(hardware=fast):
        assert row.cost.step <= slow[row.candidate.name]


# --- What is said ---------------------------------------------------------------------------


def test_the_table_and_the_json_have_all_of_it():
    shown = best_of_each(rows())[:3]
    console = Console(width=200, record=True, file=StringIO())
    console.print(report.table(shown, H200, [0.1, 0.2, 0.0]))
    said = console.export_text()
    for row, drops in zip(shown, ("10.0%", "20.0%", "0.0%"), strict=True):
        (line,) = (line for line in said.splitlines() if f"│ {row.candidate.name} " in line)
        assert f"{row.cost.step * 1e3:.1f}" in line and drops in line
    values = json.loads(json.dumps(report.as_json(shown[0])))
    assert values["mesh"] == {
        axis: getattr(shown[0].candidate.shape, axis) for axis in ("data", "expert", "model")
    }
    assert sum(values["bytes_by_class"].values()) == pytest.approx(values["device_bytes"])
    assert values["seconds"]["step"] == shown[0].cost.step
    assert {send["purpose"] for send in values["sends"]} <= {
        "activations", "tokens", "gradients", "gradients of experts"
    }  # fmt: skip


def test_why_the_first_is_first():
    shown = best_of_each(rows())
    said = report.why(shown)
    assert said.startswith(f"{shown[0].candidate.name} ")
    if "comes first" in said:
        assert shown[1].candidate.name in said
    assert report.why(shown[:1]).endswith("is the only one that fits.")


def test_what_would_change_it():
    found = rows()
    kept = [row.candidate for row in found]

    def rank(hardware):
        return ranked(estimate(candidate, hardware) for candidate in kept)[0]

    said = report.what_if(rank, H200, found[0])
    assert "would come first" in said or said.startswith("It stays first with twice the network")
    # A device with half of what the first needs puts another one first, or none fits.
    tight = replace(H200, memory=int(found[0].device_bytes * 1.5))
    other = rank(replace(tight, memory=tight.memory // 2))
    said = report.what_if(rank, tight, rank(tight))
    assert other.candidate.name != found[0].candidate.name
    assert "would come first" in said


def test_a_written_mesh_is_the_one_of_the_row(tmp_path):
    for row in best_of_each(rows()):
        path = tmp_path / f"{row.candidate.shape.name}.toml"
        path.write_text(report.mesh_file(row.candidate.shape, "Written by a test"))
        for read in (read_mesh(str(path)), read_mesh(report.mesh_words(row.candidate.shape))):
            assert read.sizes == row.candidate.shape.sizes
            assert read.exchange == row.candidate.shape.exchange


def test_a_picture(tmp_path):
    report.draw(best_of_each(rows())[:4], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("text", "number"), [("65536", 65536), ("512K", 2**19), ("1M", 2**20)])
def test_numbers_of_tokens(text, number):
    assert _number(text) == number


@pytest.mark.parametrize("text", ["", "M", "-1", "1.5M", "many", "0K"])
def test_no_numbers_of_tokens(text):
    with pytest.raises(UserError, match="must be such as 65536, 512K or 1M"):
        _number(text)


# --- Drops from measured loads --------------------------------------------------------------


def test_even_loads_drop_what_chance_does():
    sizes = Sizes(CONFIG, read_mesh("data2_expert8"))
    even = {"encoder 2": [1 / 8] * 8, "decoder 2": [1 / 8] * 8}
    some = expected_drops(even, sizes)
    assert 0 < some < 0.05
    skewed = {name: [0.65] + [0.05] * 7 for name in even}
    # 256 tokens, 40 slots: of the first expert's 166 choices 126 find none.
    assert expected_drops({"encoder 2": skewed["encoder 2"]}, sizes) == pytest.approx(
        0.49, abs=0.01
    )
    ragged = Sizes(CONFIG, read_mesh("data2_expert8,dispatcher=ragged"))
    assert expected_drops(skewed, ragged) == 0
    with pytest.raises(UserError, match="the loads are of 4 experts in encoder 2, not of a"):
        expected_drops({"encoder 2": [0.25] * 4}, sizes)


def test_loads_of_no_run(tmp_path):
    with pytest.raises(UserError, match="expert_load.npz holds no loads of experts"):
        measured_loads(tmp_path)
