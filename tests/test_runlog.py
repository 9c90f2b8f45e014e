"""Each step is reported once, however often the run was killed, and the picture is drawn."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from switchjax import runlog
from switchjax.expert_load import MAX_COLUMNS, ExpertLoad
from switchjax.runlog import STEP_METRICS, RunLog

LAYERS = ("encoder 1", "decoder 1")
EXPERTS = 4
PNG = b"\x89PNG\r\n\x1a\n"


def record(step):
    values = dict.fromkeys(STEP_METRICS, 0.5) | {"step": step, "loss": 3.0 + 1 / step}
    values |= {"loss_scale": 1.0, "skipped_steps": 0}
    return values | {"drop_fraction": 0.041, "tokens_per_second": 12345.6}


def counts(step):
    """Expert 0 of the first layer gets more and more; the second layer stays fair."""
    return np.array([[step, 10, 10, 10], [5, 5, 5, 5]])


def open_log(out, console=None, **changed):
    options = {"total_steps": 10, "first_step": 1, "layer_names": LAYERS, "num_experts": EXPERTS}
    plain = Console(file=io.StringIO())
    return RunLog(out, console=console or plain, **options | changed)


def run(out, first=1, last=10, **changed):
    with open_log(out, first_step=first, **changed) as log:
        for step in range(first, last + 1):
            log.step(record(step), counts(step))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def picture_of(out):
    with np.load(out / "expert_load.npz") as saved:
        return dict(saved)


def read_events(out):
    """Tag, step and value of every TensorBoard scalar, read from the record format."""
    found = []
    for path in sorted((out / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


def test_every_step_is_a_line_and_an_event(tmp_path):
    run(tmp_path)
    assert read_lines(tmp_path / "metrics.jsonl") == [record(step) for step in range(1, 11)]
    losses = [(step, value) for tag, step, value in read_events(tmp_path) if tag == "train/loss"]
    assert losses == [(step, pytest.approx(3.0 + 1 / step)) for step in range(1, 11)]


def test_a_line_is_on_disk_at_once(tmp_path):
    with open_log(tmp_path) as log:
        log.step(record(1), counts(1))
        assert read_lines(tmp_path / "metrics.jsonl") == [record(1)]


def test_evaluations_have_a_file_and_a_line_of_their_own(tmp_path):
    console = Console(file=io.StringIO())
    with open_log(tmp_path, console) as log:
        log.evaluation(5, {"ce": 3.21049, "accuracy": 0.251})
    assert read_lines(tmp_path / "evaluations.jsonl") == [
        {"step": 5, "ce": 3.21049, "accuracy": 0.251}
    ]
    assert console.file.getvalue() == "step  5/10  evaluation: ce 3.210  accuracy 25.1 %\n"
    assert ("evaluation/ce", 5, pytest.approx(3.21049)) in read_events(tmp_path)


def test_resume_leaves_each_step_once(tmp_path):
    with open_log(tmp_path) as log:
        for step in range(1, 8):
            log.step(record(step), counts(step))
        log.evaluation(4, {"ce": 4.0, "accuracy": 0.0})
        log.evaluation(6, {"ce": 6.0, "accuracy": 0.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # killed while writing
    with open_log(tmp_path, first_step=6) as log:
        for step in range(6, 11):
            log.step(record(step), counts(step))
        log.evaluation(6, {"ce": 5.9, "accuracy": 0.0})
    assert read_lines(tmp_path / "metrics.jsonl") == [record(step) for step in range(1, 11)]
    assert [line["ce"] for line in read_lines(tmp_path / "evaluations.jsonl")] == [4.0, 5.9]


def test_a_record_with_another_metric_is_refused(tmp_path):
    with open_log(tmp_path) as log, pytest.raises(AssertionError, match="perplexity"):
        log.step(record(1) | {"perplexity": 1.0}, counts(1))


# --- Console -------------------------------------------------------------------------------


def test_plain_lines(tmp_path):
    console = Console(file=io.StringIO(), width=40)
    with open_log(tmp_path, console, total_steps=200) as log:
        for step in range(1, 201):
            log.step(record(step), counts(step))
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "step   1/200  loss 4.000  drop 4.1 %  12,346 tokens/s  eta -"
    assert lines[4] == "step  40/200  loss 3.025  drop 4.1 %  12,346 tokens/s  eta 0:00"
    assert [line[5:8] for line in lines[1:]] == [f"{step:3}" for step in range(10, 201, 10)]


def test_a_slow_run_is_heard_of(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "SECONDS_BETWEEN_LINES", 0)
    console = Console(file=io.StringIO())
    run(tmp_path, last=7, total_steps=10**6, console=console)
    assert len(console.file.getvalue().splitlines()) == 7


def test_time_left(tmp_path):
    with open_log(tmp_path, total_steps=4000) as log:
        log._pace = (10, 100.0)
        assert log._eta(10, 100.0) == "-"
        assert log._eta(20, 105.0) == "33:10"
        assert log._eta(20, 110.0) == "1:06:20"


def test_progress_bar(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with open_log(tmp_path, console) as log:
        for step in range(1, 11):
            log.step(record(step), counts(step))
            if step == 5:
                log.say("saved step 5 [in full]")
    text = console.file.getvalue()
    assert "saved step 5 [in full]" in text
    assert "step 10/10" in text and "loss 3.100  drop 4.1 %  12,346 tokens/s  eta 0:00" in text


# --- Expert load ---------------------------------------------------------------------------


def test_expert_load_is_saved_and_drawn(tmp_path):
    run(tmp_path)
    picture = picture_of(tmp_path)
    assert tuple(picture["layer_names"]) == LAYERS
    np.testing.assert_array_equal(picture["steps"], range(1, 11))
    expected = np.stack([counts(s) / counts(s).sum(1, keepdims=True) for s in range(1, 11)])
    np.testing.assert_allclose(picture["load"], expected, rtol=1e-6)
    assert (tmp_path / "expert_load.png").read_bytes().startswith(PNG)


def test_no_switch_layer_no_picture(tmp_path):
    with open_log(tmp_path, layer_names=()) as log:
        log.step(record(1), None)
    assert not list(tmp_path.glob("*expert_load*"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_picture_survives_an_error(tmp_path, error):
    with pytest.raises(error), open_log(tmp_path) as log:
        log.step(record(1), counts(1))
        raise error
    assert (tmp_path / "expert_load.png").exists()


def test_a_run_that_ends_before_its_first_step(tmp_path):
    with open_log(tmp_path):
        pass
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_memory_is_bounded():
    load = ExpertLoad(LAYERS, EXPERTS)
    last = 5 * MAX_COLUMNS
    for step in range(1, last + 1):
        load.add(step, counts(step))
    assert load.width == 8
    assert load.filled.sum() == last // 8
    first = np.mean([counts(s)[0] / counts(s)[0].sum() for s in range(1, 9)], axis=0)
    np.testing.assert_allclose(load.share[0, 0], first, rtol=1e-5)
    np.testing.assert_allclose(load.share[load.filled].sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("killed", "first"), [(700, 601), (700, 602), (1500, 1001)])
def test_resume_continues_the_picture(tmp_path, killed, first):
    def add(load, begin, end):
        for step in range(begin, end):
            load.add(step, counts(step))
        return load

    path = tmp_path / "expert_load.npz"
    add(ExpertLoad(LAYERS, EXPERTS), 1, killed + 1).write(path)
    resumed = ExpertLoad(LAYERS, EXPERTS)
    resumed.read(path, before=first)
    add(resumed, first, 2001)
    whole = add(ExpertLoad(LAYERS, EXPERTS), 1, 2001)
    assert resumed.width == whole.width
    np.testing.assert_array_equal(resumed._counts, whole._counts)
    # The bin that is cut keeps the mean of a few more steps.
    np.testing.assert_allclose(resumed.share, whole.share, rtol=2e-3)


def test_a_fresh_run_takes_nothing_over(tmp_path):
    run(tmp_path)
    run(tmp_path, last=3)
    assert len(picture_of(tmp_path)["steps"]) == 3
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 3


def test_a_killed_run_keeps_its_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(runlog, "SECONDS_BETWEEN_LOADS", -1)
    with open_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.step(record(step), counts(step))
        assert len(picture_of(tmp_path)["steps"]) == 3  # before anything was closed


def test_needs_neither_jax_nor_matplotlib_until_it_draws():
    code = "import sys, switchjax.runlog; print({'jax', 'matplotlib'} & sys.modules.keys())"
    root = str(Path(__file__).parent.parent)
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout == "set()\n"
