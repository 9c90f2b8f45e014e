"""The command line: what is typed, what is answered, and what is left behind.

Commands run in this process where they can, with its eight devices.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from switchjax.cli import main
from switchjax.config import read_config
from switchjax.data.tokenizer import load_tokenizer
from switchjax.mesh import mesh_names, read_mesh
from switchjax.presets import PRESETS

# Compiles in seconds; eight devices divide it along every axis.
SMALL = """
    --model.architecture decoder_only --model.d-model 8 --model.d-ff 8 --model.num-heads 8
    --model.d-kv 2 --model.num-layers 1 --model.moe-every 0 --data.batch-size 8
    --data.sequence-length 16 --data.holdout 0.2 --steps 2
""".split()
SWITCH = ("--model.moe-every", "1")


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def call(monkeypatch, capfd):
    """Runs `switchjax WORDS`; gives exit status, stdout and stderr."""

    def run(*words, config=None):
        monkeypatch.setattr(sys, "argv", ["switchjax", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(config)
        return end.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def refused(call):
    """Runs a command that must be a mistake, and gives its one line."""

    def run(*words):
        status, _, errors = call(*words)
        assert status == 2
        assert re.fullmatch(r"switchjax: [^\n]+\n", errors), errors
        return errors.removeprefix("switchjax: ").rstrip()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files good and bad."""
    folder = tmp_path_factory.mktemp("cli")
    good = "the cat sat on the mat\n" * 400
    (folder / "good.txt").write_text(good)
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("a cat")
    (folder / "latin.txt").write_bytes(b"fine\nfine\ncaf\xe9\n")
    (folder / "good.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"body": "c"}\n')
    (folder / "no.jsonl").write_text('{"text": "a"}\nnot json\n')
    (folder / "table.csv").write_text("a,b\n")
    (folder / "broken.toml").write_text("data = ")
    (folder / "two.toml").write_text("data = 2\nexpert = 2\n")
    (folder / "good.toml").write_text("data = 2\nexpert = 1\nmodel = 4\n")
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    """A run of two steps, after a first try that was refused."""
    out = folder / "finished"
    words = ["train", *SMALL, "--data.files", str(folder / "*.txt"), "--out", str(out)]
    assert run_process(*words, "--mesh", "data8").returncode == 2  # bad files among them
    words[words.index(str(folder / "*.txt"))] = str(folder / "good.txt")
    ended = run_process(*words, "--mesh", "data8")
    assert (ended.returncode, ended.stderr) == (0, "")
    return out


def run_process(*words, program="from switchjax.cli import main; main()"):
    """As a user does, whose environment does not keep JAX from looking for GPUs."""
    command = [sys.executable, "-c", program, *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


# --- Mistakes -------------------------------------------------------------------------------

MISTAKES = {
    # A mesh and devices that differ.
    "mesh of 4 on 8": ("--mesh data=4", "data=4,expert=1,model=1.* JAX sees 8 of kind cpu"),
    "mesh of 16 on 8": (
        "--mesh data2_expert8 --data.batch-size 16",
        "needs 16 devices .* JAX sees 8",
    ),
    "devices": ("--devices 4", r"needs 8 devices \(data=2,expert=2,model=2\), but --devices is 4"),
    # Sizes that do not divide.
    "experts": (
        f"{SWITCH[0]} 1 --mesh expert8 --model.num-experts 12",
        "expert = 8 .*experts = 12",
    ),
    "heads": ("--mesh model8 --model.num-heads 6", "model = 8 must divide model.num_heads = 6"),
    "d_ff": ("--mesh model8 --model.d-ff 12", "model = 8 must divide model.d_ff = 12"),
    "vocabulary": ("--mesh model8 --model.vocab-size 390", "model = 8 .*model.vocab_size = 390"),
    "batch": ("--mesh data8 --data.batch-size 12", r"data \* expert = 8 .*batch_size 12"),
    "micro-batch": (
        "--mesh data8 --data.batch-size 24 --optim.accumulation 2",
        r"data \* expert = 8 must divide .*data.batch_size 24 / optim.accumulation 2\) = 12",
    ),
    "accumulation": ("--optim.accumulation 3", "batch_size 8 must be a multiple of .* 3"),
    "groups": (f"{SWITCH[0]} 1 --mesh data8 --model.group-size 12", "group_size = 12 .* = 16"),
    "layers": ("--model.moe-every 2", "model.num_layers 1 must be a multiple of .*moe_every 2"),
    # Where the state is.
    "zero over nothing": (
        "--mesh expert8,zero=3",
        "zero = 3 splits the state over data, and data = 1: it would do nothing, so leave it out",
    ),
    "zero that does not divide": (
        "--mesh data8,zero=1 --model.d-model 12",
        "with zero = 1 data = 8 must divide model.d_model = 12",
    ),
    "zero": ("--mesh data8,zero=4", "zero must be 0, 1, 2 or 3, got 4"),
    "half a zero": ("--mesh data8,zero=1.0", "zero must be 0, 1, 2 or 3, got 1.0"),
    "dtype of sums": (
        "--mesh data8,reduce_dtype=float8",
        "reduce_dtype must be one of compute, .*, got 'float8'",
    ),
    "hot experts of none": ("--mesh data8,zero=3,hot_experts=2", "hot_experts = 2, .*moe_every 0"),
    "all experts hot": (
        f"{SWITCH[0]} 1 --mesh data8,zero=3,hot_experts=8",
        "hot_experts = 8 must be less than model.num_experts = 8: to keep them all .* is zero = 2",
    ),
    "hot experts that do not divide": (
        f"{SWITCH[0]} 1 --mesh data4_expert2,zero=3,hot_experts=3",
        "expert = 2 must divide hot_experts = 3",
    ),
    "hot folded experts that do not divide": (
        f"{SWITCH[0]} 1 --mesh data2_expert2_model2,experts=folded,zero=3,hot_experts=6",
        r"expert \* model = 4 must divide hot_experts = 6",
    ),
    # How tokens reach their experts.
    "dispatcher": ("--dispatcher alltoall", "dispatcher: expected one of .*all_gather"),
    "dispatcher of one device": (
        f"{SWITCH[0]} 1 --mesh expert8 --dispatcher local",
        "local sends nothing, so it needs expert = 1, and expert = 8",
    ),
    "wire": ("--mesh expert8,wire=fp8", "wire must be one of compute, bfloat16, float8, got 'fp8'"),
    "folded": (
        f"{SWITCH[0]} 1 --mesh expert=4,model=2,experts=folded --model.num-experts 4",
        r"with folded experts expert \* model = 8 must divide model.num_experts = 4",
    ),
    "chunks": (
        f"{SWITCH[0]} 1 --mesh data2_expert2_model2,chunks=3",
        "chunks = 3 must divide the groups of one device's micro-batch = 2",
    ),
    "ragged with slots": (
        f"{SWITCH[0]} 1 --mesh expert8 --dispatcher ragged --model.eval-capacity-factor 2",
        "ragged drops nothing, so leave out model.eval_capacity_factor 2.0",
    ),
    "ragged where experts choose": (
        f"{SWITCH[0]} 1 --model.architecture encoder_decoder --mesh expert8 --dispatcher ragged "
        "--model.encoder-router expert_choice",
        "ragged is for experts that take whatever chooses them.*choose all_to_all",
    ),
    "buffer of none": ("--mesh expert8,buffer=2", "all_to_all has no buffer to bound"),
    "mesh": ("--mesh data9", f"no mesh 'data9'.*{mesh_names()[0]}.*{mesh_names()[-1]}"),
    "mesh file": ("--mesh {folder}/no.toml", "mesh file .*no.toml: No such file or directory"),
    "broken mesh file": ("--mesh {folder}/broken.toml", "mesh file .*broken.toml: Invalid value"),
    "mesh file without model": ("--mesh {folder}/two.toml", "two .*missing model"),
    "mesh axis": ("--mesh data=4,modle=2", "modle=2 .*unknown modle"),
    "mesh axis twice": ("--mesh data=4,data=2", "names a key twice"),
    # Names that are none.
    "preset": ("--preset switch-base-9", r"no preset 'switch-base-9'; did you mean switch-base-\d"),
    "option": (
        "--model.num-expert 4",
        r"^unknown option --model.num-expert; .*--model.num-experts",
    ),
    "option with =": ("--stpes=4", r"^unknown option --stpes; did you mean --steps\?$"),
    "option without section": ("--d-model 4", r"^unknown option --d-model; .* --model.d-model\?$"),
    "option like none": ("--qqqq", "^unknown option --qqqq; see --help$"),
    "argument": ("stray", "^unexpected argument 'stray'$"),
    "choice": (
        "--model.dtype float64",
        "^--model.dtype: expected one of float32, bfloat16, float16, got 'float64'$",
    ),
    "float16 alone": (
        "--model.dtype float16",
        "^model.dtype float16 loses small gradients without .*: add optim.loss_scale dynamic, or",
    ),
    "a scale for none": (
        "--optim.loss-scale dynamic",
        "^optim.loss_scale dynamic is for model.dtype float16: gradients in float32 do not .* out$",
    ),
    "parameters in float16": (
        "--model.param-dtype float16",
        "^--model.param-dtype: expected one of float32, bfloat16, got 'float16'$",
    ),
    "no number": ("--steps many", "^--steps: expected INT, got 'many'$"),
    "no whole number": ("--devices 1.5", r"^--devices: expected \{None\}\|INT, got '1.5'$"),
    "no value": ("--steps", "^--steps needs a value$"),
    # Sizes that are none.
    "d_model": ("--model.d-model 0", "^model.d_model must be positive, got 0$"),
    "experts 0": ("--model.num-experts 0", "model.num_experts must be positive, got 0"),
    "capacity": ("--model.capacity-factor -1", "model.capacity_factor must be positive, got -1.0"),
    "slots": ("--model.expert-capacity 0", "model.expert_capacity must be positive, got 0"),
    "slots twice": (
        "--model.expert-capacity 4 --model.eval-capacity-factor 2",
        "^model.expert_capacity 4 holds at evaluation too: leave out .*eval_capacity_factor 2.0$",
    ),
    "padding where experts choose": (
        "--model.architecture encoder_decoder --model.encoder-router expert_choice "
        "--model.padding-is-routed",
        "^model.padding_is_routed is for tokens that choose .*encoder_router expert_choice$",
    ),
    "group": ("--model.group-size 0", "model.group_size must be positive, got 0"),
    "top_k": ("--model.top-k 9", "^model.top_k must be at most model.num_experts 8, got 9$"),
    "top_k 0": ("--model.top-k 0", "^model.top_k must be positive, got 0$"),
    "one choice": ("--model.random-second", "^model.random_second needs model.top_k 2, got 1$"),
    "three choices": (
        "--model.random-second --model.top-k 3",
        "^model.random_second needs model.top_k 2, got 3$",
    ),
    "expert choice": (
        "--model.encoder-router expert_choice",
        "^model.encoder_router expert_choice needs .*encoder_decoder: .* later tokens$",
    ),
    "bias rate": ("--optim.bias-rate -0.1", "^optim.bias_rate must be 0 or more, got -0.1$"),
    "dropout": ("--model.dropout 1", "model.dropout must be at least 0 and below 1, got 1.0"),
    "negative batch": ("--data.batch-size -8", "data.batch_size must be positive, got -8"),
    "length": ("--data.sequence-length 0", "data.sequence_length must be positive, got 0"),
    "rate": ("--optim.learning-rate nan", "optim.learning_rate must be positive, got nan"),
    "endless rate": ("--optim.learning-rate inf", "optim.learning_rate must be finite, got inf"),
    "endless slots": ("--model.capacity-factor inf", "model.capacity_factor must be finite"),
    "large seed": ("--seed 4294967296", r"run.seed must be below 2\*\*32, got 4294967296"),
    "accumulation 0": ("--optim.accumulation 0", "optim.accumulation must be positive, got 0"),
    "steps": ("--steps -1", "^run.steps must be positive, got -1$"),
    "keep": ("--keep 0", "run.keep must be positive, got 0"),
    "negative seed": ("--seed -1", "run.seed must be 0 or more, got -1"),
    "devices 0": ("--devices 0", "run.devices must be positive, got 0"),
    "mesh size": ("--mesh data=0", "data must be a positive integer, got 0"),
    "mesh half": ("--mesh data=1.5", "data must be a positive integer, got 1.5"),
    # Text.
    "glob": ("--data.files {folder}/*.text", r"no file matches '.*/\*\.text'"),
    "second glob": ("--data.files {folder}/good.txt {folder}/x*", "no file matches '.*/x.'"),
    "empty": ("--data.files {folder}/empty.txt", "/empty.txt: the file is empty"),
    "not UTF-8": ("--data.files {folder}/latin.txt", r"/latin.txt:3: not UTF-8 \(byte 0xe9\)"),
    "no field": ("--data.files {folder}/good.jsonl", "/good.jsonl:3: no field 'text'.* 'body'"),
    "no JSON": ("--data.files {folder}/no.jsonl", "/no.jsonl:2: not JSON"),
    "other kind": ("--data.files {folder}/table.csv", "/table.csv: expected .txt, .jsonl"),
    "too short": ("--data.files {folder}/short.txt", "too short for one batch: .*batch_size 8"),
    "long rows": ("--data.sequence-length 4000", "too short for one batch"),
    # Tokenizers.
    "tokenizer": ("--data.tokenizer {folder}/good.txt", "/good.txt is no SentencePiece model"),
    "no tokenizer": ("--data.tokenizer {folder}/x.model", "cannot read .*/x.model: No such file"),
    "small vocabulary": ("--model.vocab-size 256", "model.vocab_size 256 .*tokenizer's 384"),
    # Directories.
    "out below a file": ("--out {folder}/good.txt/run", "cannot write .*good.txt/run: Not a dir"),
    "out is a file": ("--out {folder}/good.txt", "cannot write to the output directory .*good.txt"),
    "out is taken": ("--out {finished}", "/finished holds another run: add --resume .* --out$"),
    "nothing to resume": ("--resume", "out holds no run"),
    "resume and preset": ("--resume --preset tiny", "--resume keeps the run's own config"),
}


@pytest.mark.parametrize(("words", "answer"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(refused, folder, finished, words, answer):  # case 14
    out = folder / "out"
    before = sorted(folder.rglob("*"))
    words = words.format(folder=folder, finished=finished).split()
    good = [*SMALL, "--data.files", folder / "good.txt", "--out", out]
    assert re.search(answer, refused("train", *good, *words))
    assert sorted(folder.rglob("*")) == before  # nothing left behind, nothing claimed


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--model.d-model 16", r"step 2 in .* does not fit: .*float32\[384,8\], not .*\[384,16\]"),
        ("--model.num-layers 2", "step 2 in .* does not fit: "),
        ("--optim.optimizer adamw", "does not fit: missing opt_state.*; extra opt_state"),
        ("--data.sequence-length 8", "not the stream that was saved: sequence_length 16 is now 8"),
        ("--seed 7", "not the stream that was saved: seed 0 is now 7"),
        ("--steps 2", "the run has 2 steps already: raise --steps above 2"),
    ],
)
def test_a_run_goes_on_only_as_itself(refused, finished, words, answer):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    typed = ("--resume", "--out", finished, "--steps", 4, *words.split())
    assert re.search(answer, refused("train", *typed))
    assert before == {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("trian", "no command 'trian'; did you mean train? there are train, eval, "),
        ("tokenizer", "no command 'tokenizer'; did you mean tokenizer train? there are "),
        ("tokenizer trian --out x", "no command 'tokenizer trian'; did you mean tokenizer train?"),
        ("eval {folder}/none", "{folder}/none holds no run (config.json is missing)"),
        ("eval {finished} --step 7", "step 7: there is no such checkpoint, in {finished}"),
        ("eval {finished} --step 0", "eval.step must be positive, got 0"),
        ("eval {finished} --mesh data=3", "data * expert = 3 must divide "),
        ("eval {finished} --stpe 3", "unknown option --stpe; did you mean --step?"),
        ("plan --hardware h20", "no hardware 'h20'; did you mean h200? there are a100, "),
        ("plan --write mine", "plan.write must end in .toml, got 'mine'"),
        ("plan --picture {folder}/none/a.png", "there is no directory {folder}/none"),
        ("plan --nodes 0", "plan.nodes must be positive, got 0"),
        ("plan --mesh expert=16", "expert = 16 must divide model.num_experts = 8"),
        ("plan --batch-tokens 1G", "plan.batch_tokens must be such as 65536, 512K or 1M, got '1G'"),
        (
            "plan --model.num-expert 4",
            "unknown option --model.num-expert; did you mean --model.num",
        ),
        ("verify", "two or more different meshes to compare, got none"),
        ("verify --mesh data8", "two or more different meshes to compare, got data8"),
        ("verify --mesh data8 --mesh data8", "different meshes to compare, got data8, data8"),
        ("verify --mesh single --mesh dato8", "no mesh 'dato8'; did you mean data8?"),
        ("verify --mesh single --mesh data=3", "mesh data=3: data * expert = 3 must divide "),
        ("verify --mesh single --mesh data=16", "needs 16 devices (data=16,expert=1,model=1), and"),
        ("verify --mesh single --mesh data8 --model.dtype bfloat16", "add --model.dtype float32"),
        (
            "verify --mesh single --mesh data8,reduce_dtype=bfloat16",
            "mesh data8,reduce_dtype=bfloat16: reduce_dtype bfloat16 rounds sums of gradients",
        ),
        ("verify --mesh single --mesh expert8,wire=float8", "expert8,wire=float8: wire float8 rou"),
        ("verify --mesh single --mesh expert8,dispatcher=ragged", "with --model.capacity-factor 8"),
        ("verify --mesh single --mesh data8 --steps 0", "run.steps must be positive, got 0"),
        ("verify --mesh single --mesh data8 --out x", "unknown option --out; see --help"),
        ("verify --preset tinny", "no preset 'tinny'; did you mean tiny?"),
        ("verify {folder}/none --mesh single", "{folder}/none holds no run (config.json is mis"),
        ("verify {finished} --preset tiny", "verify RUN has the run's own config: leave out --pr"),
        ("upcycle {finished}", "--out is missing"),
        ("upcycle {finished} {folder}", "{folder} exists and is no empty directory"),
        ("upcycle {finished} {folder}/x --moe-every 2", "num_layers 1 must be a multiple of "),
        ("train --init-from {folder}/none", "{folder}/none holds no run (config.json is missing)"),
        ("generate", "--checkpoint is missing"),
        ("generate {finished}", "generate.prompt: there is nothing to continue"),
        ("generate {finished} --prompt a b", "unexpected argument 'b'"),
        ("generate {finished} --prompt a --step 7", "step 7: there is no such checkpoint"),
        ("generate {finished} --prompt a --top-k 2", "top_k 2 needs a temperature above 0"),
        ("tokenizer train", "--out is missing"),
        ("tokenizer train --out x --files {folder}/*.text", "no file matches '{folder}/*.text'"),
        ("tokenizer train --out x --vocab-size 0", "tokenizer.vocab_size must be positive, got 0"),
        ("tokenizer train --out {folder}/good.txt/x --files {folder}/good.txt", "too large"),
        ("convert", "no command 'convert'; there are train, "),
        ("convert hf-to-switch a b", "did you mean convert hf-to-switchjax?"),
        ("convert hf-to-switchjax {folder}/none {folder}/x", "none holds no Hugging Face model"),
        ("convert hf-to-switchjax {folder}", "--out is missing"),
        ("convert hf-to-switchjax a b c", "unexpected argument 'c'"),
        ("convert hf-to-switchjax a b --hf-semantic", "did you mean --hf-semantics?"),
        ("convert switchjax-to-hf {folder}/none {folder}/x", "none holds no run"),
        (
            "convert switchjax-to-hf {finished} {finished}",
            "finished holds a run or weights already",
        ),
        ("convert switchjax-to-hf {finished} {folder}/x", "no such model: model.architecture deco"),
    ],
)
def test_mistakes_of_other_commands(refused, folder, finished, words, answer):
    line = refused(*words.format(folder=folder, finished=finished).split())
    assert answer.format(folder=folder, finished=finished) in line


# --- Verify ---------------------------------------------------------------------------------


def test_meshes_are_compared(call, finished):
    """Of a run's config, on its own text; a dispatcher that drops nothing where nothing drops."""
    words = ["--mesh", "single", "--mesh", "data=2,expert=2,dispatcher=ragged"]
    words += [*SWITCH, "--model.capacity-factor", "8", "--steps", "2"]
    status, said, errors = call("verify", finished, *words)
    assert (status, errors) == (0, "")
    assert "dispatcher=ragged (data=2,expert=2,model=1): 2 steps in " in said
    assert "Deviation from single in 2 steps" in said
    for quantity in ("loss", "expert load", "gradient: router", "parameters: experts"):
        assert quantity in said
    assert said.endswith("the numbers are the same on all 2 meshes\n")


def test_a_difference_is_a_failure(call, folder):
    """Numbers that are none are the same as nothing."""
    words = [*SMALL, "--data.files", folder / "good.txt", "--mesh", "single", "--mesh", "data=2"]
    words += ["--optim.optimizer", "sgd", "--optim.learning-rate", "1e30", "--optim.warmup-steps"]
    status, said, errors = call("verify", *words, "1")
    assert (status, errors) == (1, "")
    assert "nan !" in said
    assert re.search(r"\d+ beyond their limits: .*parameters: embedding on data=2", said)


def test_too_many_devices_are_asked_for_elsewhere(folder, monkeypatch):  # case 25
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    ended = run_process("train", *SMALL, "--mesh", "data8", "--out", folder / "out")
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "switchjax: XLA_FLAGS asks for 4 CPU devices and this run needs 8"
    )
    assert ended.stderr.count("\n") == 1 and not (folder / "out").exists()


# --- Help -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--help", "tokenizer train"),
        ("train --help", "--model.num-experts INT"),
        ("train --preset switch-c --help", "(default: 2048)"),
        ("eval --help", "--batches"),
        ("generate --help", "knows of no other task, such as translation"),  # case 49
        ("verify --help", "--mesh STR"),
        ("upcycle --help", "--output-scale"),
        ("plan --help", "--batch-tokens"),
        ("tokenizer train --help", "--vocab-size"),
        ("tokenizer --help", "tokenizer train"),
        ("convert hf-to-switchjax --help", "--hf-semantics"),
        ("convert switchjax-to-hf --help", "--dtype"),
        ("train --model.num-expert 4", "did you mean --model.num-experts?"),
    ],
)
def test_help_is_quick_without_jax(words, said):
    program = """
import sys
from switchjax.cli import main
try:
    main()
finally:
    assert "jax" not in sys.modules
"""
    ended, seconds = timed(lambda: run_process(*words.split(), program=program))
    assert said in ended.stdout + ended.stderr
    assert ended.returncode == (0 if "--help" in words else 2), ended.stderr
    assert seconds < 1


def test_import_is_quick():
    program = "import sys, switchjax; assert 'jax' not in sys.modules"
    ended, seconds = timed(lambda: run_process(program=program))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert seconds < 1


def timed(run):
    """What `run` gives, and the processor seconds of the process that it waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_without_words_the_usage(call):
    status, said, errors = call()
    assert (status, errors) == (2, "")
    assert said.startswith("usage: switchjax COMMAND")


def test_help_names_every_preset(call):
    status, said, _ = call("train", "--help")
    assert status == 0
    assert all(name in re.sub(r"[\s│]", "", said) for name in PRESETS)


# --- What works -----------------------------------------------------------------------------


def test_evaluation(call, finished):
    status, said, errors = call("eval", finished, "--mesh", "data=4,model=2", "--batches", 8)
    assert (status, errors) == (0, "")
    record = {line[:16].strip(): float(line[16:]) for line in said.splitlines()}
    last = json.loads((finished / "evaluations.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 2
    assert record["ce"] == pytest.approx(last["ce"], rel=1e-4)  # printed with six digits
    assert record["targets"] == last["targets"] > 0
    assert "unigram entropy" in record


def test_continuations(call, finished):
    """Of two prompts, on another mesh, whatever the order; 16 tokens fit."""
    words = ("generate", finished, "--mesh", "data=4,model=2", "--max-new-tokens", 3)
    texts = ("the cat", " sat")
    status, said, errors = call(*words, "--prompt", texts[0], "--prompt", texts[1])
    assert (status, errors) == (0, "")
    _, turned, _ = call(*words, "--prompt", texts[1], "--prompt", texts[0])
    assert sorted(turned) == sorted(said)
    status, said, errors = call(*words, "--prompt", "the cat sat on the mat")
    assert (status, said) == (2, "")
    assert "prompt 1 has 23 tokens, " in errors and "its buffer room for 16" in errors


def test_an_experiment_file(folder):
    path = folder / "small_experiment.py"
    path.write_text(
        "from switchjax.cli import main\n"
        "from switchjax.config import DataConfig, ModelConfig, RunConfig\n"
        "MODEL = ModelConfig(architecture='decoder_only', d_model=8, d_ff=8, num_heads=2,\n"
        "                    d_kv=2, num_layers=1, moe_every=1, num_experts=4)\n"
        f"DATA = DataConfig(files=({str(folder / 'good.txt')!r},), sequence_length=16)\n"
        "CONFIG = RunConfig(model=MODEL, data=DATA, steps=1000)\n"
        "if __name__ == '__main__':\n"
        "    main(CONFIG)\n"
    )
    out = folder / "experiment"
    words = ["--steps", "2", "--out", str(out), "--data.batch-size", "8"]
    ended = subprocess.run(
        [sys.executable, str(path), *words], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "mesh data2_expert2_model2 (data=2,expert=2,model=2) on cpu" in ended.stdout
    config = read_config(out)
    assert (config.steps, config.data.batch_size, config.model.num_experts) == (2, 8, 4)
    assert (out / "expert_load.png").exists()

    asked = subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True)
    assert asked.stdout.startswith("usage: small_experiment.py")
    wrong = subprocess.run(
        [sys.executable, str(path), "--stesp", "3"], capture_output=True, text=True
    )
    assert (wrong.returncode, wrong.stderr) == (
        2,
        "switchjax: unknown option --stesp; did you mean --steps?\n",
    )


def test_own_tokenizer_and_mesh_file(call, folder):
    model = folder / "good.model"
    words = ("--files", folder / "good.txt", "--out", model, "--vocab-size", 270)
    status, said, errors = call("tokenizer", "train", *words)
    assert (status, errors) == (0, "")
    size = load_tokenizer(str(model)).vocab_size
    assert said == (
        f"{model}: {size} ids, sentinels included; train with "
        f"--data.tokenizer {model} --model.vocab-size 384\n"
    )
    out = folder / "pieces"
    status, said, errors = call(
        *("train", *SMALL, "--data.files", folder / "good.txt", "--out", out),
        *("--data.tokenizer", model, "--model.vocab-size", 384),
        *("--mesh", folder / "good.toml"),
    )
    assert (status, errors) == (0, "")
    assert "mesh good (data=2,expert=1,model=4) on cpu" in said
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_plan(call, folder):
    path = folder / "planned.toml"
    words = ("--preset", "switch-base-8", "--nodes", 2, "--compile", 0, "--write", path)
    status, said, errors = call("plan", *words)
    assert (status, errors) == (0, "")
    assert "16 x NVIDIA H200" in said and "MFU" in said
    assert f"switchjax train --mesh {path} --model.remat " in said
    shape = read_mesh(str(path))
    assert shape.num_devices == 16
    assert path.read_text().startswith("# Written by switchjax plan --preset switch-base-8 ")
    first = next(line for line in said.splitlines() if line.startswith("│ 1 "))
    assert f"{shape}" in first


def test_a_dense_run_becomes_a_sparse_one(call, finished, folder):  # case 65
    sparse, out = folder / "sparse", folder / "upcycled"
    status, said, errors = call("upcycle", finished, sparse, "--moe-every", 1, "--num-experts", 4)
    assert (status, errors) == (0, "")
    assert said == (
        f"{sparse}: 1 Switch layers a stack, 4 experts each, and no optimizer state; "
        f"train with --init-from {sparse}\n"
    )
    words = ("--data.files", folder / "good.txt", "--data.batch-size", 8, "--mesh", "data8")
    words = ("train", "--init-from", sparse, "--out", out, *words)
    words = (*words, "--data.sequence-length", 16, "--data.holdout", 0.2, "--steps", 1)
    status, said, errors = call(*words)
    assert (status, errors) == (0, "")
    assert f"model of {sparse}; step, learning-rate schedule, optimizer state and data" in said
    model, before = read_config(out).model, read_config(finished).model
    assert (model.moe_every, model.num_experts, before.moe_every) == (1, 4, 0)
    assert (model.architecture, model.d_model) == (before.architecture, before.d_model)


def test_started_from_a_run_in_a_process_of_its_own(finished, folder):
    """Which has no devices yet: reading a checkpoint must not decide how many there are."""
    words = ("train", "--init-from", finished, "--out", folder / "second", "--mesh", "data8")
    words = (*words, "--data.files", folder / "good.txt", "--data.batch-size", 8)
    words = (*words, "--data.sequence-length", 16, "--data.holdout", 0.2, "--steps", 1)
    ended = run_process(*words)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"model of step 2 in {finished / 'checkpoints'}; step, learning-rate" in ended.stdout


def test_a_moved_run_goes_on_where_it_is(call, finished, folder):
    moved = Path(finished).rename(folder / "moved")
    try:
        status, said, errors = call("train", "--resume", "--out", moved, "--steps", 3)
    finally:
        moved.rename(finished)
    assert (status, errors) == (0, "")
    assert "resuming after step 2" in said
    assert len((finished / "metrics.jsonl").read_text().splitlines()) == 3
