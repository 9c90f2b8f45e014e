"""Layouts in order: what divides, what it costs over which link, what is said of the first."""

import json
from dataclasses import replace
from functools import cache
from io import StringIO

import builders
import pytest
from rich.console import Console

from switchjax.config import DataConfig, RunConfig
from switchjax.errors import UserError
from switchjax.mesh import read_mesh
from switchjax.plan import explain, report
from switchjax.plan.candidates import Candidate, candidates
from switchjax.plan.cost import LINK_SHARE, group_sizes, send_seconds
from switchjax.plan.drops import expected_drops, measured_loads
from switchjax.plan.hardware import read_hardware
from switchjax.plan.planning import _number
from switchjax.plan.ranking import best_of_each, by_formula, estimate, ranked
from switchjax.plan.sizes import Sizes

H200 = read_hardware("h200")
MODEL = replace(
    builders.MODEL, d_model=256, d_ff=1024, num_heads=4, d_kv=64, vocab_size=1024, dtype="bfloat16"
)
CONFIG = RunConfig(model=MODEL, data=DataConfig(batch_size=16, sequence_length=256))
FOUND = candidates(CONFIG, 16, H200)


def rows_on(hardware):
    return ranked(estimate(candidate, hardware) for candidate in FOUND)


@cache
def rows():
    return rows_on(H200)


# --- What there is to choose from -----------------------------------------------------------


def test_candidates_divide_and_differ():
    found = FOUND
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
    assert {c.config.model.remat for c in found} == {"none", "moe", "dots", "full"}
    assert {c.shape.storage.zero for c in found if c.shape.data > 1} == {0, 1, 2, 3}
    assert {c.shape.storage.zero for c in found if c.shape.data == 1} == {0}
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
    assert group_sizes(axes, read_mesh(mesh).sizes, 8) == (group, here)


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
        tokens = 16 * (256 + 58)  # a decoder row has 58
        assert row.tokens_per_second == pytest.approx(tokens / cost.step, rel=0.01)


def test_what_does_not_fit_comes_last():
    sizes = sorted(row.device_bytes for row in rows())
    small = replace(H200, memory=int(sizes[len(sizes) // 2]))
    found = rows_on(small)
    fits = [row.fits for row in found]
    assert fits == sorted(fits, reverse=True) and {True, False} == set(fits)
    beyond = [row.device_bytes for row in found if not row.fits]
    assert beyond == sorted(beyond)


def test_one_row_a_mesh():
    first = best_of_each(rows())
    shapes = [row.candidate.shape for row in first]
    assert len({(shape.sizes, shape.exchange) for shape in shapes}) == len(first)
    assert first[0] == rows()[0]


def test_what_is_passed_over_would_not_come_first():
    """With memory for all, for some and for none: the same rows as when all are estimated."""
    sizes = sorted(row.device_bytes for row in rows())
    for memory in (sizes[-1] * 2, sizes[len(sizes) // 10], sizes[0] / 2):
        hardware = replace(H200, memory=int(memory))
        assert by_formula(FOUND, hardware) == best_of_each(rows_on(hardware))


def test_a_faster_network_never_slows_a_step():
    fast = replace(H200, between=replace(H200.between, bandwidth=400e9))
    slow = {row.candidate.name: row.cost.step for row in rows()}
    for row in rows_on(fast):
        assert row.cost.step <= slow[row.candidate.name]


# --- The ladder of memory ------------------------------------------------------------------


def ladder(mesh, **changes):
    """Memory by the name of each rung."""
    config = replace(CONFIG, **changes)
    candidate = Candidate(config=config, shape=read_mesh(mesh))
    return {name: estimate(rung, H200).memory for name, rung in explain.rungs(candidate, H200)}


def test_zero_divides_a_class_by_the_data_degree():
    """But for norms and positions, which stay whole."""
    found = ladder("data=8,expert=2", data=DataConfig(batch_size=64, sequence_length=256))
    rungs = [f"zero = {zero}" for zero in range(4)]
    assert [name for name in found if "zero" in name] == [*rungs, "zero = 3, hot_experts = 4"]
    whole = found["zero = 0"]
    for zero in range(4):
        used = found[f"zero = {zero}"]
        for name, first in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
            share = getattr(used, name) / getattr(whole, name)
            assert share == pytest.approx(1 / 8 if zero >= first else 1, rel=0.02), (name, zero)
        assert (used.gathered > 0) == (zero == 3)
    assert not any("zero" in name for name in ladder("expert=8,model=2"))


def test_remat_keeps_ever_less():
    found = ladder("data=8,expert=2")
    kept = [found[f"remat {remat}"].activations for remat in ("none", "moe", "dots", "full")]
    assert kept == sorted(kept, reverse=True) and kept[3] < 0.25 * kept[0]
    dense = ladder("data=16,dispatcher=local", model=replace(MODEL, moe_every=0))
    assert "remat moe" not in dense and "remat dots" in dense


def test_offload_moves_bytes_to_the_host():
    """A deep model's optimizer comes a period at a time, and with `full` what periods receive."""
    deep = replace(MODEL, num_layers=64, remat="full")
    found = ladder("data=8,expert=2", model=deep)
    here, optimizer, both = (
        found[f"offload = {name}"] for name in ("none", "optimizer", "optimizer+activations")
    )
    assert here.on_host == 0 < optimizer.on_host < both.on_host
    assert optimizer.optimizer < 0.05 * here.optimizer
    assert optimizer.activations == here.activations > 4 * both.activations
    for used in (optimizer, both):
        assert used.total + used.on_host == pytest.approx(here.total)
    assert "offload = optimizer+activations" not in ladder("data=8,expert=2")


def test_offload_takes_time_and_a_link_that_is_known():
    def seconds(mesh, hardware=H200):
        row = estimate(Candidate(config=CONFIG, shape=read_mesh(mesh)), hardware)
        return row.cost, row.memory.on_host

    here, (away, on_host) = (
        seconds("expert=8,model=2")[0],
        seconds("expert=8,model=2,offload=optimizer"),
    )
    assert here.sending["host"] == 0
    assert away.sending["host"] == pytest.approx(2 * on_host / (64e9 * LINK_SHARE))
    assert away.step == pytest.approx(here.step + away.sending["host"])
    unknown = replace(H200, host_bandwidth=None)
    with pytest.raises(
        UserError, match="^NVIDIA H200 has no host_bandwidth .* offload = optimizer"
    ):
        seconds("expert=8,model=2,offload=optimizer", unknown)
    assert {c.shape.storage.offload for c in FOUND} == {
        "none",
        "optimizer",
        "optimizer+activations",
    }
    assert {c.shape.storage.offload for c in candidates(CONFIG, 16, unknown)} == {"none"}


def test_experts_that_stay_gathered_take_room_and_save_time():
    """2 of 4 experts of a device, in a Switch layer of each of 2 stacks, are 8 MB in bfloat16."""
    config = replace(CONFIG, optim=replace(CONFIG.optim, accumulation=2))
    cold, hot = (
        estimate(Candidate(config=config, shape=read_mesh(f"data=2,expert=2,zero=3{more}")), H200)
        for more in ("", ",hot_experts=4")
    )
    size = 2 * 2 * 2 * (2 * 256 * 1024)
    assert hot.memory.gathered - cold.memory.gathered == size
    sent = [
        sum(send.wire_bytes for send in row.sends if send.purpose == "weights")
        for row in (cold, hot)
    ]
    assert sent[0] - sent[1] == 3 * size / 2  # once for four times, and half of it is here
    assert hot.cost.step < cold.cost.step
    assert {c.shape.storage.hot_experts for c in FOUND if c.shape.storage.zero == 3} == {0, 4}


def test_narrow_parameters_leave_masters_that_data_splits():
    found = ladder("data=8,expert=2,zero=1")
    wide, narrow = (found[f"param_dtype {dtype}"] for dtype in ("float32", "bfloat16"))
    gone, masters = wide.parameters - narrow.parameters, narrow.optimizer - wide.optimizer
    assert gone == pytest.approx(wide.parameters / 2, rel=0.05)
    assert masters == pytest.approx(2 * gone / 8, rel=0.02)
    assert narrow.gradients == wide.gradients


@pytest.mark.parametrize(
    ("name", "mesh", "said"),
    [
        ("parameters", "data=8,expert=2,zero=2", "zero = 3 in the mesh file"),
        ("parameters", "data=8,expert=2,zero=3", "more devices"),
        ("parameters", "expert=8,model=2", "more devices"),
        ("optimizer", "data=8,expert=2", "zero = 1 in the mesh file"),
        ("optimizer", "data=8,expert=2,zero=1", "offload = optimizer in the mesh file"),
        ("optimizer", "data=8,expert=2,zero=1,offload=optimizer", "optim.optimizer adafactor"),
        ("gradients", "data=8,expert=2,zero=1", "zero = 2 in the mesh file"),
        ("activations", "data=8,expert=2", "--model.remat full"),
        ("buffers", "data=8,expert=2", "more accumulation"),
    ],
)
def test_advice_is_what_is_left_to_do(name, mesh, said):
    candidate = Candidate(config=CONFIG, shape=read_mesh(mesh))
    assert explain.advice(name, candidate).startswith(said)


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
        "activations", "tokens", "gradients", "gradients of experts", "weights"
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
    kept = [row.candidate for row in best_of_each(found)]

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
            assert read.storage == row.candidate.shape.storage


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
