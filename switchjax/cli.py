"""The command line, `switchjax COMMAND`. The only argument parsing.

Types and help come from the config dataclasses, through tyro. JAX is imported only once a command
runs, so that `--help` and mistakes are answered at once.
"""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

from switchjax.arguments import HELP, flagged, parse, value_of
from switchjax.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    read_config,
)
from switchjax.distributed_config import DistributedConfig
from switchjax.errors import NonFiniteError, UserError, unknown
from switchjax.generate_config import GenerateConfig
from switchjax.interop.options import FromHuggingFace, ToHuggingFace, UpcycleConfig
from switchjax.plan.options import PlanConfig
from switchjax.presets import PRESETS

_USAGE = """\
usage: switchjax COMMAND [OPTIONS]

  train             train a model
  eval RUN          evaluate a run's checkpoint on its held-out text
  plan              choose the layout for hardware that need not be here
  generate RUN      continue prompts with a trained model
  verify            compare the first steps of a run on several meshes
  upcycle DENSE OUT make a dense model's weights those of a Switch Transformer
  tokenizer train   make a SentencePiece tokenizer from text
  convert hf-to-switchjax DIR OUT   take over the weights of a Hugging Face model
  convert switchjax-to-hf DIR OUT   give a model's weights to Hugging Face's transformers

switchjax COMMAND --help lists the options of a command.
"""


@dataclass(frozen=True, kw_only=True)
class _TrainFlags:
    """Train a model. Without options: a tiny Switch Transformer on Python's own documentation."""

    preset: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")] = "tiny"
    """Where all other options start from."""
    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True, kw_only=True)
class _ExperimentFlags:
    """Train a model as this experiment does, or with other numbers."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True, kw_only=True)
class _EvalFlags:
    """Evaluation of a run's checkpoint on the run's held-out text."""

    config: Annotated[EvalConfig, tyro.conf.arg(name="")]
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True, kw_only=True)
class _VerifyFlags:
    """Compares losses, routing, gradients and parameters of a run's first steps on several meshes,
    and exits with status 1 if they differ by more than float32 rounding. `switchjax verify RUN`
    starts from the model, data, optimizer and seed of a run's directory; its checkpoints are not
    read."""

    preset: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")] = "tiny"
    """Where all other options start from."""
    mesh: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A mesh, as of train; two or more, and the first is the reference of the others."""
    steps: int = 3
    """Optimizer steps; more of them amplify rounding."""
    seed: int = 0
    """Of parameters, data order and noise."""
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig


@dataclass(frozen=True, kw_only=True)
class _PlanFlags:
    """Rank the layouts of a config on hardware that need not be here, and compile the best."""

    preset: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")] = "tiny"
    """Where the options of model, data and optim start from."""
    plan: Annotated[PlanConfig, tyro.conf.arg(name="")]
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig


def main(config: RunConfig | None = None) -> NoReturn:
    """Runs the command line of this process and exits.

    Args:
        config: of an experiment: the arguments are then those of `train`, and start from it.
    """
    _prepare_process()
    words = sys.argv[1:]
    try:
        sys.exit(_command(words) if config is None else _train(words, config))
    except (UserError, NonFiniteError) as error:
        print(f"switchjax: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _prepare_process() -> None:
    """Ctrl-C and errors as a command line should have them; not for a library to decide."""
    # Outside the training loop Ctrl-C ends at once, also in XLA, where Python would not hear it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A failed save is one line of ours. Each array that orbax was writing then adds a traceback.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # says of a NaN that it is one
    if not _has_nvidia_driver():
        # JAX's plugin may be there to compile for absent GPUs, and would complain of no cuDNN.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    hook = sys.unraisablehook
    sys.unraisablehook = lambda raised: (
        None if str(raised.exc_value) == "Event loop is closed" else hook(raised)
    )


def _has_nvidia_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _command(words: Sequence[str]) -> int:
    commands = {
        ("train",): _train,
        ("eval",): _eval,
        ("generate",): _generate,
        ("verify",): _verify,
        ("upcycle",): _upcycle,
        ("plan",): _plan,
        ("tokenizer", "train"): _tokenizer,
        ("convert", "hf-to-switchjax"): _from_hugging_face,
        ("convert", "switchjax-to-hf"): _to_hugging_face,
    }
    for name, command in commands.items():
        if tuple(words[: len(name)]) == name:
            return command(words[len(name) :])
    if not words or HELP & set(words):
        print(_USAGE, end="")
        return 0 if words else 2
    typed = " ".join(words[: 2 if words[0] in ("tokenizer", "convert") else 1])
    raise unknown("command", typed, [" ".join(name) for name in commands])


def _plan(words: Sequence[str]) -> int:
    preset = _preset(words) or "tiny"
    start = PRESETS[preset]
    flags = _PlanFlags(
        preset=preset,
        plan=PlanConfig(),
        model=start.model,
        data=start.data,
        optim=start.optim,
    )
    flags = parse(_PlanFlags, words, "switchjax plan", flags)

    from switchjax.plan.planning import plan

    config = replace(start, model=flags.model, data=flags.data, optim=flags.optim)
    plan(config, flags.plan, command=" ".join(["switchjax plan", *words]))
    return 0


def _train(words: Sequence[str], experiment: RunConfig | None = None) -> int:
    preset = _preset(words) if experiment is None else None
    start = experiment or PRESETS[preset or "tiny"]
    if "--resume" in words:
        if preset is not None:
            raise UserError("--resume keeps the run's own config: leave out --preset")
        out = value_of("--out", words) or start.out
        # The run may have been moved, and to a machine with other devices.
        start = replace(read_config(out), out=out, devices=None)
    elif (source := value_of("--init-from", words)) is not None:
        start = _from_weights(start, source)
    if experiment is not None:
        flags = _ExperimentFlags(config=start)
        flags = parse(_ExperimentFlags, words, Path(sys.argv[0]).name, flags)
    else:
        flags = _TrainFlags(preset=preset or "tiny", config=start)
        flags = parse(_TrainFlags, words, "switchjax train", flags)

    from switchjax.ending import leaving
    from switchjax.train import train

    with leaving():
        result = train(flags.config, distributed=flags.distributed)
    return 0 if result.signal is None else 128 + result.signal


def _from_weights(start: RunConfig, source: str) -> RunConfig:
    """The config with the model and tokenizer of a run or weights directory."""
    from switchjax.weights import config_of

    theirs = config_of(source)
    tokenizer = theirs.data.tokenizer
    return replace(start, model=theirs.model, data=replace(start.data, tokenizer=tokenizer))


def _eval(words: Sequence[str]) -> int:
    words = flagged(words, "--run")
    flags = parse(_EvalFlags, words, "switchjax eval", _EvalFlags(config=EvalConfig()))

    from switchjax.ending import leaving
    from switchjax.evaluate import evaluate_run
    from switchjax.processes import is_writer

    with leaving():
        record = evaluate_run(flags.config, flags.distributed)
    if is_writer():
        for name, value in record.items():
            print(f"{name.replace('_', ' '):16} {value:.6g}")
    return 0


def _generate(words: Sequence[str]) -> int:
    words = flagged(words, "--checkpoint")
    # A prompt is one word, and the next one has an option of its own.
    markers = (tyro.conf.UseAppendAction,)
    config = parse(GenerateConfig, words, "switchjax generate", markers=markers)

    from switchjax.generate import generate

    for continuation in generate(config):
        print(continuation)
    return 0


def _verify(words: Sequence[str]) -> int:
    preset = _preset(words)
    if words and not words[0].startswith("-"):
        if preset is not None:
            raise UserError("verify RUN has the run's own config: leave out --preset")
        start, words = read_config(words[0]), words[1:]
    else:
        start = PRESETS[preset or "tiny"]
    default = _VerifyFlags(seed=start.seed, model=start.model, data=start.data, optim=start.optim)
    flags = parse(_VerifyFlags, words, "switchjax verify", default)
    config = RunConfig(
        model=flags.model, data=flags.data, optim=flags.optim, seed=flags.seed, steps=flags.steps
    )

    from switchjax.verify import verify

    return 0 if verify(config, flags.mesh) else 1


def _preset(words: Sequence[str]) -> str | None:
    """The one that `words` name.

    Raises:
        UserError: there is no such preset.
    """
    preset = value_of("--preset", words)
    if preset is not None and preset not in PRESETS:
        raise unknown("preset", preset, list(PRESETS))
    return preset


def _upcycle(words: Sequence[str]) -> int:
    words = flagged(words, "--dense", "--out")
    config = parse(UpcycleConfig, words, "switchjax upcycle")

    from switchjax.interop.upcycle import upcycle

    model = upcycle(config)
    print(
        f"{config.out}: {model.num_layers // model.moe_every} Switch layers a stack, "
        f"{model.num_experts} experts each, and no optimizer state; "
        f"train with --init-from {config.out}"
    )
    return 0


def _tokenizer(words: Sequence[str]) -> int:
    config = parse(TokenizerConfig, words, "switchjax tokenizer train")

    from switchjax.data.corpus import documents_of
    from switchjax.data.tokenizer import load_tokenizer, train_tokenizer

    documents = documents_of(config.files, config.json_field)
    train_tokenizer(documents, config.vocab_size, Path(config.out))
    size = load_tokenizer(config.out).vocab_size
    print(
        f"{config.out}: {size} ids, sentinels included; train with "
        f"--data.tokenizer {config.out} --model.vocab-size {-(-size // 128) * 128}"
    )
    return 0


def _from_hugging_face(words: Sequence[str]) -> int:
    program = "switchjax convert hf-to-switchjax"
    options = parse(FromHuggingFace, flagged(words, "--directory", "--out"), program)

    from switchjax.interop.convert import from_hugging_face

    from_hugging_face(options)
    return 0


def _to_hugging_face(words: Sequence[str]) -> int:
    program = "switchjax convert switchjax-to-hf"
    options = parse(ToHuggingFace, flagged(words, "--directory", "--out"), program)

    from switchjax.interop.convert import to_hugging_face

    to_hugging_face(options)
    return 0
