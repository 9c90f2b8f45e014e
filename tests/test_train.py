"""The training loop as a user runs it: what it leaves, how it ends, how it goes on.

Programs are compiled once and then read from a cache on disk, so that every test may train.
"""

import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console
from test_runlog import read_events

from switchjax import mesh, scaling
from switchjax.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    read_config,
    to_dict,
    write_config,
)
from switchjax.errors import NonFiniteError, UserError
from switchjax.evaluate import evaluate_run
from switchjax.generate import generate
from switchjax.generate_config import GenerateConfig
from switchjax.layout import Layout
from switchjax.runlog import STEP_METRICS
from switchjax.saved_steps import SavedSteps, checkpoint_directory, named_leaves
from switchjax.state import abstract_state
from switchjax.train import Result, train
from switchjax.weights import in_dtypes_of, load_model, open_weights

STEPS = 24
CLOCK = {"seconds", "tokens_per_second"}
CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory):
    """Environment for processes that shall share the cache of this one."""
    before = {name: getattr(jax.config, name) for name in (*CACHE, "jax_compilation_cache_dir")}
    settings = CACHE | {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    # As a user has it, without the settings of these tests.
    yield {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"} | {
        name.upper(): str(value) for name, value in settings.items()
    }
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of words of which few are frequent: a small model learns them in a few steps."""
    words = "the cat sat on a mat and so did every other animal of this old village".split()
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, len(words) + 1)
    chosen = rng.choice(words, size=12_000, p=share / share.sum())
    path = tmp_path_factory.mktemp("text") / "village.txt"
    path.write_text(" ".join(chosen))
    return path


@pytest.fixture(scope="module")
def config(text):
    return RunConfig(
        model=ModelConfig(
            d_model=16, d_ff=16, num_heads=8, d_kv=2, num_layers=1, moe_every=1, dropout=0.1
        ),
        data=DataConfig(files=(str(text),), batch_size=16, sequence_length=32),
        optim=OptimConfig(learning_rate=3e-2, warmup_steps=5),
        steps=STEPS,
        eval_every=10,
        checkpoint_every=8,
    )


class Run(NamedTuple):
    out: Path
    config: RunConfig
    result: Result
    said: str


def run(config, out, **changes) -> Run:
    config = replace(config, out=str(out), **changes)
    said = StringIO()
    result = train(config, Console(file=said, width=100))
    return Run(out, config, result, said.getvalue())


def read_lines(out, name="metrics.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def without_clock(records):
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in records]


def losses(out, first=1, last=STEPS):
    return [record["loss"] for record in read_lines(out) if first <= record["step"] <= last]


def read_state(out, step):
    """Every array of a checkpoint on the host, and the position in the data."""
    config = read_config(out)
    devices = mesh.make_mesh(mesh.read_mesh(config.mesh))
    with jax.set_mesh(devices):
        state, position = SavedSteps(checkpoint_directory(out)).restore(
            step, abstract_state(config, Layout())
        )
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}
    return arrays, position


def assert_same_state(one, other, step):
    (arrays, position), (others, other_position) = read_state(one, step), read_state(other, step)
    assert position == other_position
    assert arrays.keys() == others.keys()
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], others[name], err_msg=name)


@pytest.fixture(scope="module")
def compiles():
    """Names of the functions compiled during the test run `whole`, in order."""
    return []


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory, compiles):
    """A run from the first step to the last."""

    class Listener(logging.Handler):
        def emit(self, record):
            if found := re.match(r"Compiling jit\((\w+)\)", record.getMessage()):
                compiles.append(found[1])

    listener, logger = Listener(), logging.getLogger("jax")
    logger.addHandler(listener)
    try:
        with jax.log_compiles():
            return run(config, tmp_path_factory.mktemp("whole") / "run")
    finally:
        logger.removeHandler(listener)


@pytest.fixture(scope="module")
def half(config, tmp_path_factory):
    """The same run, ended after 13 steps; tests go on with copies of it."""
    return run(config, tmp_path_factory.mktemp("half") / "run", steps=13)


@pytest.fixture
def copy(half, tmp_path):
    return Path(shutil.copytree(half.out, tmp_path / "copy"))


# --- What a run leaves ----------------------------------------------------------------------


def test_metrics_of_every_step(whole):
    records = read_lines(whole.out)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert set(record) == set(STEP_METRICS)
        assert all(math.isfinite(value) for value in record.values()), record
    tokens = [record["tokens"] for record in records]
    assert sorted(set(tokens)) == tokens  # counts up
    seconds = [record["seconds"] for record in records]
    assert sorted(seconds) == seconds and seconds[0] > 0


def test_loss_falls(whole):
    first, last = np.mean(losses(whole.out)[:3]), np.mean(losses(whole.out)[-3:])
    assert last < 0.75 * first


def test_evaluations_every_n_steps_and_at_the_end(whole):
    records = read_lines(whole.out, "evaluations.jsonl")
    assert [record["step"] for record in records] == [10, 20, STEPS]
    last = {"step": STEPS, **whole.result.evaluation}
    assert records[-1] == last
    assert last["perplexity"] == pytest.approx(math.exp(last["ce"]))
    assert last["drop_fraction"] == 0  # S13
    assert records[-1]["ce"] < records[0]["ce"]


def test_events_for_tensorboard(whole):
    events = read_events(whole.out)
    assert [step for tag, step, _ in events if tag == "train/loss"] == list(range(1, STEPS + 1))
    assert [step for tag, step, _ in events if tag == "evaluation/ce"] == [10, 20, STEPS]


def test_expert_load_is_stored_and_drawn(whole):
    assert (whole.out / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    with np.load(whole.out / "expert_load.npz") as arrays:
        assert arrays.files


def test_the_run_keeps_its_config(whole):
    assert read_config(whole.out) == whole.config
    steps = SavedSteps(checkpoint_directory(whole.out))
    assert to_dict(steps.read_config(STEPS)) == to_dict(whole.config)


def test_newest_two_checkpoints_stay(whole):
    kept = sorted(int(path.name) for path in (whole.out / "checkpoints").iterdir())
    assert kept == [16, STEPS]


def test_what_is_said(whole):
    for line in (
        r"mesh data2_expert2_model2 \(data=2,expert=2,model=2\) on cpu",
        r"[\d,]+ parameters; [\d,]+ examples for training, \d+ for evaluation",
        r"unigram entropy of the held-out targets: \d\.\d{3} nats",
        r"compiling the train step and the evaluation step",
        r"compiled in [\d.]+ s",
        r"step  1/24  loss [\d.]+  drop [\d.]+ %  [\d,]+ tokens/s  eta -",
        r"step 8 saved",
        r"step 24/24  evaluation: ce",
        r"step 24 saved",
        r"held-out cross-entropy [\d.]+ nats, \d+% (below|above) the unigram entropy",
    ):
        assert re.search(line, whole.said), line


def test_one_compile_each(whole, compiles):  # case 41
    """The last held-out batch is filled up, and an evaluation comes thrice."""
    assert compiles.count("train_step") == 1
    assert compiles.count("eval_step") == 1
    assert compiles.count("_are_finite") == 1


# --- The same numbers -----------------------------------------------------------------------


def test_resumed_equals_uninterrupted(whole, copy):  # cases 7, 10; S15
    resumed = run(whole.config, copy, resume=True)
    assert "resuming after step 13" in resumed.said
    assert without_clock(read_lines(copy)) == without_clock(read_lines(whole.out))
    evaluations = read_lines(copy, "evaluations.jsonl")
    assert [r for r in evaluations if r["step"] != 13] == read_lines(whole.out, "evaluations.jsonl")
    assert_same_state(whole.out, copy, STEPS)
    steps = [step for tag, step, _ in read_events(copy) if tag == "train/loss"]
    assert steps == list(range(1, STEPS + 1))


def test_same_seed_same_losses(whole, half):
    """Also, the number of steps changes no step."""
    assert without_clock(read_lines(half.out)) == without_clock(read_lines(whole.out))[:13]


# What a run starts from another's model begins anew; what `resume` keeps is tested above.
STILL = OptimConfig(learning_rate=1e-30, warmup_steps=5)


def assert_model_of(half, started):
    """The first step of `started` moved nothing, so it still has the model that it began with."""
    (before, _), (after, position) = read_state(half.out, 13), read_state(started.out, 1)
    assert (after["step"], position["stream"]["step"]) == (1, 1)
    for name in after:
        if name.startswith("model."):
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def test_started_from_the_model_of_a_run(config, half, tmp_path):  # case 68
    started = run(config, tmp_path / "run", init_from=str(half.out), optim=STILL, steps=1)
    assert (
        f"model of step 13 in {half.out / 'checkpoints'}; step, learning-rate schedule, "
        "optimizer state and data begin anew"
    ) in started.said
    assert_model_of(half, started)
    (record,) = read_lines(started.out)
    assert record["step"] == 1 and record["learning_rate"] == pytest.approx(1e-30 / 5)
    first, last = losses(half.out, 1, 1), losses(half.out, 13, 13)
    assert record["loss"] < (first[0] + last[0]) / 2  # of a model that has learned


def test_resumed_before_its_first_checkpoint(config, half, tmp_path):  # case 68
    changes = {"init_from": str(half.out), "optim": STILL, "steps": 1}
    write_config(replace(config, **changes), tmp_path)
    resumed = run(config, tmp_path, **changes, resume=True)
    assert "no step was saved yet: starting from the first" in resumed.said
    assert_model_of(half, resumed)


def test_started_from_another_model(config, half, tmp_path):
    model = replace(config.model, num_experts=16)
    with pytest.raises(UserError, match=r"do not fit: .*router_DE is float32\[1,16,8\]"):
        run(config, tmp_path / "run", init_from=str(half.out), model=model)
    assert not (tmp_path / "run").exists()


def test_resumed_on_another_mesh(whole, copy):  # case 7
    mesh = "data4_expert2,zero=3,hot_experts=4"
    resumed = run(whole.config, copy, resume=True, mesh=mesh, steps=16)
    assert "4 of 8 experts of each Switch layer stay gathered: " in resumed.said
    assert {record["cold_share"] > 0 for record in read_lines(copy)} == {False, True}
    np.testing.assert_allclose(losses(copy, 14, 16), losses(whole.out, 14, 16), rtol=1e-5)


def test_resumed_with_its_state_on_the_host_and_without(whole, copy):  # cases 7, 71
    """What is saved does not say whose memory it came from."""
    mesh = whole.config.mesh
    run(whole.config, copy, resume=True, mesh=f"{mesh},offload=optimizer", steps=16)
    run(whole.config, copy, resume=True, mesh=mesh, steps=STEPS)
    np.testing.assert_allclose(losses(copy, 14), losses(whole.out, 14), rtol=1e-5)


def test_resumed_on_one_device(whole, copy, compile_cache):  # case 7
    ended = call(compile_cache, "--resume", "--out", copy, "--mesh", "single", "--steps", 16)
    assert (ended.returncode, ended.stderr) == (0, "")
    np.testing.assert_allclose(losses(copy, 14, 16), losses(whole.out, 14, 16), rtol=1e-5)


@pytest.mark.parametrize("name", [None, "data8,zero=3"])
def test_evaluation_of_the_run(whole, name):
    batches = whole.config.eval_batches
    record = evaluate_run(EvalConfig(run=str(whole.out), mesh=name, batches=batches))
    assert record.pop("step") == STEPS
    assert f"targets: {record.pop('unigram_entropy'):.3f} nats" in whole.said
    expected = whole.result.evaluation
    assert record == (expected if name is None else pytest.approx(expected, rel=1e-5))


def test_evaluation_of_an_older_step(whole):
    config = EvalConfig(run=str(whole.out), step=16)
    assert evaluate_run(config)["step"] == 16
    with pytest.raises(UserError, match="step 3: there is no such checkpoint"):
        evaluate_run(replace(config, step=3))


# --- Other runs -----------------------------------------------------------------------------


def test_a_short_run_is_evaluated_and_saved(config, tmp_path):
    short = run(config, tmp_path / "run", steps=1)
    assert [r["step"] for r in read_lines(short.out)] == [1]
    assert [r["step"] for r in read_lines(short.out, "evaluations.jsonl")] == [1]
    assert SavedSteps(checkpoint_directory(short.out)).latest() == 1


def test_dense_twin(config, tmp_path):
    dense = run(config, tmp_path / "run", model=replace(config.model, moe_every=0))
    assert losses(dense.out)[-1] < 0.75 * losses(dense.out)[0]
    assert not list(dense.out.glob("expert_load*"))
    assert read_lines(dense.out)[-1]["drop_fraction"] == 0


def test_decoder_only_in_micro_batches(config, tmp_path):  # S11
    causal = run(
        config,
        tmp_path / "run",
        model=replace(config.model, architecture="decoder_only"),
        optim=replace(config.optim, optimizer="adafactor", accumulation=2),
    )
    records = read_lines(causal.out)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    rates = [record["learning_rate"] for record in records]
    assert rates[:5] == rates[:1] * 5 and sorted(rates[4:], reverse=True) == rates[4:]
    assert losses(causal.out)[-1] < 0.75 * losses(causal.out)[0]
    assert (causal.out / "expert_load.png").exists()


def test_the_bias_of_the_router_is_saved_and_goes_on(config, tmp_path):  # case 63
    """And evaluation does not move it: one run evaluates after every step, the other never."""
    rate = 2.0**-6  # so that sums of it are exact
    optim = replace(config.optim, bias_rate=rate)
    changed = {"optim": optim, "eval_batches": 1}
    first = run(config, tmp_path / "run", **changed, steps=2, eval_every=1)
    before = read_state(first.out, 2)[0]["router_bias_XE"]
    whole = run(config, tmp_path / "whole", **changed, steps=5, eval_every=5)
    resumed = run(config, first.out, **changed, steps=5, eval_every=1, resume=True)
    assert_same_state(resumed.out, whole.out, 5)
    after = read_state(resumed.out, 5)[0]["router_bias_XE"]
    assert before.shape == after.shape == (2, 8)
    for bias_XE, steps in ((before, 2), (after, 5)):
        assert 0 < np.abs(bias_XE).max() <= steps * rate
        assert (bias_XE % rate == 0).all()
    evaluated = evaluate_run(EvalConfig(run=str(whole.out), batches=1))
    assert evaluated["ce"] == whole.result.evaluation["ce"]


# --- In few bits ------------------------------------------------------------------------------


def in_float16(config, **changes):
    changes = {"architecture": "decoder_only", "dtype": "float16"} | changes
    return {
        "model": replace(config.model, **changes),
        "optim": replace(config.optim, loss_scale="dynamic"),
    }


def test_float16_skips_what_overflows_and_goes_on(config, tmp_path, monkeypatch):
    """A scale that is too large at first; then a resumed run is the whole one, bit for bit."""
    monkeypatch.setattr(scaling, "FIRST_SCALE", 2.0**28)
    changed = in_float16(config, param_dtype="bfloat16")
    whole = run(config, tmp_path / "whole", **changed)
    records = read_lines(whole.out)
    skipped = int(records[-1]["skipped_steps"])
    assert 2 < skipped < 12
    for record in records[:skipped]:
        assert record["skipped_steps"] == record["step"]
        assert record["loss_scale"] == 2.0 ** (28 - record["step"])
        assert record["grad_norm"] is None and math.isfinite(record["loss"])
    for record in records[skipped:]:
        assert record["skipped_steps"] == skipped
        assert record["loss_scale"] == 2.0 ** (28 - skipped)
        assert math.isfinite(record["grad_norm"])
    rates = [record["learning_rate"] for record in records]
    peak = config.optim.learning_rate
    assert rates[: skipped + 2] == pytest.approx([peak / 5] * (skipped + 1) + [2 * peak / 5])
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    assert re.search(r"tokens/s  eta .*  scale 134217728  skipped 1\n", whole.said)
    assert_whole_again(config, whole, tmp_path, changed)


def assert_whole_again(config, whole, tmp_path, changed):
    """After a stop where some steps were skipped; and its model is read by others."""
    first = run(config, tmp_path / "run", **changed, steps=8)
    resumed = run(config, first.out, **changed, resume=True)
    assert without_clock(read_lines(resumed.out)) == without_clock(read_lines(whole.out))
    assert_same_state(resumed.out, whole.out, STEPS)
    evaluated = evaluate_run(EvalConfig(run=str(whole.out), batches=whole.config.eval_batches))
    assert evaluated["ce"] == whole.result.evaluation["ce"]
    (said,) = generate(
        GenerateConfig(checkpoint=str(whole.out), prompt=("the cat",), max_new_tokens=2)
    )
    assert isinstance(said, str)


def test_no_scale_is_small_enough(config, tmp_path, monkeypatch):
    """Overflow that is not the scale's doing ends a run, in one line, with all that was saved."""
    monkeypatch.setattr(scaling, "FIRST_SCALE", 2.0)
    changed = in_float16(config, moe_every=0, init_scale=1e12)
    with pytest.raises(NonFiniteError, match="^step 2: gradients overflow float16 at every loss"):
        run(config, tmp_path / "run", **changed)
    assert [record["step"] for record in read_lines(tmp_path / "run")] == [1, 2]


def test_started_in_bfloat16_from_a_run_in_float32(config, half, tmp_path):
    """And back: what is rounded or widened is said, and nothing else changes."""
    model = replace(config.model, param_dtype="bfloat16")
    narrow = run(
        config, tmp_path / "narrow", init_from=str(half.out), model=model, optim=STILL, steps=1
    )
    assert re.search(r"step 13 .*; \d+ arrays rounded from float32 to bfloat16; ", narrow.said)
    (before, _), (after, _) = read_state(half.out, 13), read_state(narrow.out, 1)
    for name in (name for name in after if name.startswith("model.")):
        kept = name.endswith(("router_DE", "norm_D", "relative_UH"))
        expected = before[name] if kept else before[name].astype(jnp.bfloat16)
        np.testing.assert_array_equal(after[name], expected, err_msg=name, strict=True)
    wide = open_weights(narrow.out)
    with jax.set_mesh(mesh.make_mesh(mesh.read_mesh(config.mesh))):
        target = abstract_state(config, Layout()).model
        converted, words = in_dtypes_of(target, wide)
        again = named_leaves(load_model(converted, target))
    assert re.fullmatch(r"\d+ arrays widened from bfloat16 to float32", words)
    for name, array in again.items():
        np.testing.assert_array_equal(array, after[f"model.{name}"].astype(np.float32))
    with pytest.raises(UserError, match=r"do not fit: .* is bfloat16\[.*\], not float32"):
        load_model(wide, target)


# --- How a run ends early -------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
    """A model that compiles quickly, after two steps."""
    model = ModelConfig(
        architecture="decoder_only",
        d_model=8,
        d_ff=8,
        num_heads=2,
        d_kv=2,
        num_layers=1,
        moe_every=0,
    )
    return run(
        replace(config, model=model, optim=OptimConfig(warmup_steps=1)),
        tmp_path_factory.mktemp("plain") / "run",
        steps=2,
    )


def test_a_loss_that_is_not_finite(plain, tmp_path, compile_cache):  # case 62
    out = shutil.copytree(plain.out, tmp_path / "run")
    words = ("--resume", "--out", out, "--steps", 10, "--optim.learning-rate", 1e30)
    ended = call(compile_cache, *words)
    assert ended.returncode == 1
    assert re.fullmatch(r"switchjax: step 4: (loss|ce|grad_norm) is (nan|inf)\n", ended.stderr), (
        ended.stderr
    )
    # Step 3 ended with absurd parameters, step 4 showed it; 8 was to be the next checkpoint.
    assert [record["step"] for record in read_lines(out)] == [1, 2, 3, 4]
    assert_same_state(out, plain.out, 2)
    run(plain.config, out, resume=True, steps=5)
    assert len(losses(out)) == 5 and np.isfinite(losses(out)).all()


def test_a_state_that_is_not_finite_is_not_saved(plain, tmp_path):  # case 62
    """The loss of step 3 is finite, its update is not; the loss of step 4 would show it."""
    out = Path(shutil.copytree(plain.out, tmp_path / "run"))
    optim = replace(plain.config.optim, learning_rate=3e38, weight_decay=100.0)
    with pytest.raises(NonFiniteError, match=r"^step 3: model\.[\w.]+ is not finite$"):
        run(plain.config, out, optim=optim, resume=True, steps=10, checkpoint_every=1, keep=1)
    assert SavedSteps(checkpoint_directory(out)).latest() == 2


def test_full_disk(whole, copy, compile_cache):
    """No file may grow beyond 16 KB; the last good checkpoint stays, and goes on."""
    ended = call(
        compile_cache,
        *("--resume", "--out", copy, "--steps", STEPS),
        prefix=("sh", "-c", 'ulimit -f 32 && exec "$@"', "sh"),
    )
    assert (ended.returncode, ended.stderr) == (
        2,
        "switchjax: step 16 could not be saved: File too large; "
        f"the last good checkpoint is step 13 in {copy / 'checkpoints' / '13'}\n",
    )
    run(whole.config, copy, resume=True)
    assert_same_state(whole.out, copy, STEPS)


# --- Signals --------------------------------------------------------------------------------


def command(*words):
    # A shell has background jobs ignore Ctrl-C, the tests' own processes among them.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from switchjax.cli import main; main()"
    )
    return [sys.executable, "-c", program, "train", *map(str, words)]


def call(environment, *words, prefix=()):
    return subprocess.run(
        [*prefix, *command(*words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


class Training:
    """A long run in a process of its own."""

    def __init__(self, environment, *words):
        self.process = subprocess.Popen(
            command(*words),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""

    def wait_for(self, words):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if words in line:
                return
        raise AssertionError(f"{self.said}\n{self.process.communicate()}")

    def end(self):
        said, errors = self.process.communicate(timeout=120)
        self.said += said
        return self.process.returncode, errors


def flags(config, out):
    """What a user would type for this config."""
    model, data = config.model, config.data
    return [
        *("--model.d-model", model.d_model, "--model.d-ff", model.d_ff, "--model.dropout", 0.1),
        *("--model.num-heads", model.num_heads, "--model.d-kv", model.d_kv),
        *("--model.num-layers", model.num_layers, "--model.moe-every", model.moe_every),
        *("--data.files", *data.files, "--data.batch-size", data.batch_size),
        *("--data.sequence-length", data.sequence_length),
        *("--model.init-scale", model.init_scale, "--optim.optimizer", config.optim.optimizer),
        *("--optim.balance-coefficient", config.optim.balance_coefficient),
        *("--optim.learning-rate", config.optim.learning_rate),
        *("--optim.warmup-steps", config.optim.warmup_steps),
        *("--eval-every", 10, "--checkpoint-every", 100_000, "--out", out),
    ]


def test_signals_save_and_resume_continues(config, whole, tmp_path, compile_cache):
    out = tmp_path / "run"
    training = Training(compile_cache, *flags(config, out), "--steps", 100_000)
    training.wait_for("step      1/100000")
    training.process.send_signal(signal.SIGTERM)
    assert training.end() == (143, "")
    first = read_lines(out)[-1]["step"]
    assert f"SIGTERM: saving step {first}; a second one leaves at once" in training.said
    assert f"step {first} saved" in training.said
    assert f"stopped after step {first}, which is saved: --resume continues" in training.said

    training = Training(compile_cache, "--resume", "--out", out)
    training.wait_for(f"step {first + 1:6}/100000")
    training.process.send_signal(signal.SIGINT)
    assert training.end() == (130, "")
    second = read_lines(out)[-1]["step"]
    assert f"step {second} saved" in training.said

    training = Training(compile_cache, "--resume", "--out", out)
    training.wait_for(f"step {second + 1:6}/100000")
    training.process.send_signal(signal.SIGINT)
    training.wait_for("a second one leaves at once")
    training.process.send_signal(signal.SIGINT)
    assert training.end() == (-signal.SIGINT, "")  # a shell says 130

    # Whatever was interrupted, the run can still go on, and is the one never stopped.
    steps = max(STEPS, SavedSteps(checkpoint_directory(out)).latest() or 0) + 1
    ended = run(read_config(out), out, resume=True, steps=steps)
    assert ended.result.step == steps
    assert [record["step"] for record in read_lines(out)] == list(range(1, steps + 1))
    assert without_clock(read_lines(out))[:STEPS] == without_clock(read_lines(whole.out))


def test_a_run_that_saved_nothing_resumes_from_the_first_step(config, tmp_path, compile_cache):
    out = tmp_path / "run"
    training = Training(compile_cache, *flags(config, out), "--steps", 3)
    training.wait_for("compiling")
    training.process.send_signal(signal.SIGINT)
    assert training.end() == (-signal.SIGINT, "")
    with pytest.raises(UserError, match="holds another run: add --resume"):
        run(config, out, steps=3)
    ended = run(config, out, steps=3, resume=True)
    assert "no step was saved yet: starting from the first" in ended.said
    assert len(losses(out)) == 3
