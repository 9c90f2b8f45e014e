"""Programs for GPUs that are not there, compiled in a process of its own."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import builders
import pytest
from compile_absent import CHUNKS, CONFIG, SHAPE
from jax.experimental import topologies

from switchjax.data.pipeline import row_lengths
from switchjax.errors import UserError
from switchjax.layout import Layout
from switchjax.moe.routing import capacity
from switchjax.plan.absent import absent_mesh, compile_train_step
from switchjax.plan.hardware import H200

FOLDER = Path(__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="XLA's plugin for CUDA is for Linux")


@pytest.fixture(scope="module")
def reports() -> dict:
    path = os.pathsep.join([str(FOLDER.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, FOLDER / "compile_absent.py"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@linux
def test_the_step_sends_what_its_numbers_say(reports):
    """Four exchanges a Switch layer, two each way, over the eight GPUs of a host.

    One way a device has E·G·C·D bfloat16, of which one in eight stays there. Two periods, each
    with one Switch layer.
    """
    model = CONFIG.model
    (length,) = row_lengths(CONFIG.data, model.architecture)
    groups = CONFIG.data.batch_size // SHAPE.num_devices
    slots = capacity(length, model.num_experts, model.top_k, model.capacity_factor)
    sent = model.num_experts * groups * slots * model.d_model * 2 * 7 / 8
    exchanges = reports["step"]["exchanges"]
    assert Counter((e["phase"], e["wire_bytes"]) for e in exchanges) == {
        ("dispatch", sent): 2,
        ("combine", sent): 2,
    }
    for exchange in exchanges:
        assert (exchange["kind"], exchange["axes"]) == ("all-to-all", ["expert"])
        assert (exchange["group_size"], exchange["dtypes"]) == (8, ["bf16"])
        assert (exchange["runs"], exchange["conditional"]) == (2, False)
        assert "all_to_all.py:" in exchange["source"]


@linux
def test_the_schedule_shows_experts_at_work_under_chunked_exchanges(reports):
    """Only a chunk has another chunk's experts to overlap with."""
    chunked = reports["chunked"]
    phases = Counter(c["phase"] for c in chunked["exchanges"])
    assert phases == {"dispatch": CHUNKS, "combine": CHUNKS}
    assert {c["wire_bytes"] for c in chunked["exchanges"]} == {8 * 1024 * 1024 * 2 * 7 / 8}
    one_matmul = 2 * (8 * 1024) * 1024 * 4096
    assert {c["expert_flops"] % one_matmul for c in chunked["exchanges"]} == {0}
    assert 0.25 <= chunked["share"] < 1


def test_a_missing_plugin_is_the_users_to_install(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(UserError, match=r"pip install 'switchjax\[plan\]'.*JAX_PLATFORMS=cpu"):
        absent_mesh(H200, SHAPE)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(UserError, match="gpus_per_host = 8 must divide its 12 devices"):
        absent_mesh(H200, builders.sizes(3, 4, 1))
    config = replace(CONFIG, data=replace(CONFIG.data, batch_size=8))
    with pytest.raises(UserError, match=r"data \* expert = 16 must divide rows"):
        compile_train_step(config, SHAPE, Layout(), H200)
