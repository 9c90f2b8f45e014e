"""Programs for GPUs that are not there, compiled in a process of its own."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import builders
import compile_absent
import numpy as np
import pytest
from compile_absent import CONFIGS, LARGE, SMALL
from jax.experimental import topologies

from switchjax.errors import UserError
from switchjax.expert_cache import gathered_bytes, kept_bytes
from switchjax.layout import Layout
from switchjax.mesh import read_mesh
from switchjax.plan.absent import absent_mesh, compile_train_step
from switchjax.plan.exchange import exchange_bytes, least_bytes
from switchjax.plan.hardware import read_hardware

FOLDER = Path(__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="XLA's plugin for CUDA is for Linux")


@cache
def reports(size: str) -> dict:
    """What the steps of one size send, by mesh."""
    path = os.pathsep.join([str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, FOLDER / "compile_absent.py", size],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_tokens(size: str, mesh: str) -> list[dict]:
    """The exchanges of tokens, without what says where they go."""
    return [e for e in reports(size)[mesh]["exchanges"] if set(e["dtypes"]) & {"bf16", "u8"}]


def bytes_of_a_layer(size: str, mesh: str) -> float:
    """That tokens take on the wire, in one step."""
    layers = CONFIGS[size].model.num_layers // CONFIGS[size].model.moe_every
    return sum(e["wire_bytes"] * e["runs"] for e in of_tokens(size, mesh)) / layers


def tokens_of_a_device(size: str, mesh: str) -> int:
    data, shape = CONFIGS[size].data, read_mesh(mesh)
    return data.batch_size * data.sequence_length // (shape.data * shape.expert)


@linux
@pytest.mark.parametrize("size", ["small", "large"])
def test_all_to_all_sends_what_must_move_and_no_more(size):
    """Four exchanges a Switch layer over the eight GPUs of a host, at a capacity factor of 1."""
    mesh = "data2_expert8"
    exchanges = of_tokens(size, mesh)
    assert Counter(e["phase"] for e in exchanges) == {"dispatch": 2, "combine": 2}
    for exchange in exchanges:
        assert (exchange["kind"], exchange["axes"]) == ("all-to-all", ["expert"])
        assert (exchange["group_size"], exchange["dtypes"]) == (8, ["bf16"])
        assert not exchange["conditional"] and "wire.py:" in exchange["source"]
    config, tokens = CONFIGS[size], tokens_of_a_device(size, mesh)
    sent = bytes_of_a_layer(size, mesh)
    least = least_bytes(config.model, read_mesh(mesh), tokens=tokens)
    assert least <= sent <= 1.05 * least
    group = config.data.sequence_length
    assert sent == exchange_bytes(config.model, read_mesh(mesh), tokens=tokens, group_size=group)


@linux
def test_a_wire_of_8_bits_takes_about_half_of_16():
    """A row of 64 values and its scale: 68 bytes for 128."""
    narrow = bytes_of_a_layer("small", "data2_expert8,wire=float8")
    assert narrow <= 0.55 * bytes_of_a_layer("small", "data2_expert8")


@linux
def test_folded_experts_send_to_their_own_column():
    """Half of what a device with both columns would send."""
    mesh = "data=2,expert=4,model=2,experts=folded"
    assert {tuple(e["axes"]) for e in of_tokens("small", mesh)} == {("expert",)}
    tokens = tokens_of_a_device("small", mesh)
    separate = read_mesh("data=2,expert=4,model=2")
    assert bytes_of_a_layer("small", mesh) == least_bytes(SMALL.model, separate, tokens=tokens) / 2


@linux
def test_only_what_peers_need_is_sent_unless_a_buffer_is_too_small():
    mesh = "data=2,expert=4,model=2,dispatcher=all_gather,buffer=1.5"
    exchanges = of_tokens("small", mesh)
    assert {(e["kind"], tuple(e["axes"]), e["conditional"]) for e in exchanges} == {
        ("all-to-all", ("expert",), True)
    }
    least = least_bytes(SMALL.model, read_mesh(mesh), tokens=tokens_of_a_device("small", mesh))
    assert bytes_of_a_layer("small", mesh) == 1.5 * least


@linux
def test_ragged_runs_travel_by_the_ragged_exchange():  # case 39: forward and backward
    exchanges = of_tokens("small", "data2_expert8,dispatcher=ragged")
    ragged = [e for e in exchanges if e["kind"] == "ragged-all-to-all"]
    assert [(e["axes"], e["conditional"]) for e in ragged] == [(["expert"], True)] * 4


@linux
def test_the_schedule_shows_experts_at_work_under_chunked_exchanges():
    """Of the bytes exchanged, the share with a product of experts in flight."""
    shares = {mesh: report["share"] for mesh, report in reports("large").items()}
    chunks = {mesh: len(of_tokens("large", mesh)) // 4 for mesh in shares}
    assert chunks == {"data2_expert8": 1, "data2_expert8,chunks=2": 2, "data2_expert8,chunks=4": 4}
    assert shares["data2_expert8"] < shares["data2_expert8,chunks=2"]
    assert shares["data2_expert8,chunks=4"] >= 0.6
    one_product = 2 * tokens_of_a_device("large", "data2_expert8") // 4 * 1024 * 4096
    for exchange in of_tokens("large", "data2_expert8,chunks=4"):
        assert exchange["expert_flops"] % one_product == 0


@linux
def test_a_split_state_is_gathered_and_scattered():
    """With zero 3 on GPUs too; what busy experts take is gathered once, what others may not be."""
    mesh = "data=8,expert=2,zero=3,hot_experts=8"
    shape, sums = read_mesh(mesh), Counter()
    for sent in reports("small")[mesh]["sent"]:
        sums[sent["kind"], *sent["axes"], sent["conditional"]] += sent["wire_bytes"] * sent["runs"]
    of_cold = gathered_bytes(SMALL, shape) - kept_bytes(SMALL.model, shape) * 7 / 8
    assert sums["all-gather", "data", True] == of_cold > 0
    assert sums["all-gather", "data", False] > kept_bytes(SMALL.model, shape) * 7 / 8
    assert sums["reduce-scatter", "data", True] == of_cold / 2  # once, not twice
    summed_whole = sum(size for key, size in sums.items() if key[:2] == ("all-reduce", "data"))
    scattered = sums["reduce-scatter", "data", True] + sums["reduce-scatter", "data", False]
    assert summed_whole < 0.03 * scattered  # statistics, norms


def test_a_missing_plugin_is_the_users_to_install(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(UserError, match=r"pip install 'switchjax\[plan\]'.*JAX_PLATFORMS=cpu"):
        absent_mesh(read_hardware("h200"), read_mesh("data2_expert8"))


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(UserError, match="8 devices a node must divide its 12 devices"):
        absent_mesh(read_hardware("h200"), builders.sizes(3, 4, 1))
    config = replace(LARGE, data=replace(LARGE.data, batch_size=8))
    with pytest.raises(UserError, match=r"data \* expert = 16 must divide rows"):
        compile_train_step(config, read_mesh("data2_expert8"), Layout(), read_hardware("h200"))


@linux
def test_model_is_inside_a_node_and_data_across():
    """Sixteen GPUs in two nodes: `model` varies fastest, `data` slowest."""
    for size in compile_absent.MESHES:
        for mesh in compile_absent.MESHES[size]:
            shape = read_mesh(mesh)
            nodes = np.reshape(reports(size)[mesh]["nodes"], shape.sizes)
            assert (nodes.reshape(-1) == [0] * 8 + [1] * 8).all()
            assert (nodes == nodes[:, :, :1]).all()  # along `model`
            first = shape.data // 2
            assert (nodes[:first] == 0).all() and (nodes[first:] == 1).all()
