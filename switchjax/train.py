"""The training loop: step, report, evaluate, save, and stop in good order.

The host stays one step ahead of the device: a step's metrics are fetched after the next step has
been sent off, so the device never waits for Python.
"""

import errno
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from switchjax import cluster, ending, offload, processes, setup
from switchjax.batch import Batch
from switchjax.checkpoint import Checkpoints
from switchjax.config import RunConfig, to_dict, write_config
from switchjax.data.pipeline import Data
from switchjax.distributed_config import DistributedConfig
from switchjax.errors import NonFiniteError, UserError
from switchjax.evaluate import EvalStep, evaluate
from switchjax.expert_cache import gathered_bytes, kept_bytes, saved_bytes
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.metrics import StepMetrics
from switchjax.model import switch_layer_names
from switchjax.reporting import Report
from switchjax.runlog import RunLog, SilentLog
from switchjax.saved_steps import checkpoint_directory, named_leaves
from switchjax.state import (
    TrainState,
    abstract_state,
    count_parameters,
    first_state,
    init_state,
)
from switchjax.step import eval_step, train_step
from switchjax.stopping import stop_signal, together
from switchjax.weights import (
    ROUTER_BIAS,
    Weights,
    in_dtypes_of,
    load_array,
    load_model,
    open_weights,
)

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Result(NamedTuple):
    """How a run ended."""

    step: int
    """The last finished step; it is saved."""
    evaluation: dict[str, float] | None
    """Of the last step; None if a signal cut the run short."""
    signal: signal.Signals | None
    """What cut the run short."""


def train(
    config: RunConfig,
    console: Console | None = None,
    distributed: DistributedConfig | None = None,
) -> Result:
    """Trains to `config.steps`, or until SIGTERM or Ctrl-C, which save first.

    Of several processes all train and save together, and the first alone writes and prints.

    Raises:
        UserError: something does not fit; before any long work where that can be known.
        NonFiniteError: a loss or gradient is infinite or NaN; the last checkpoint is intact.
        ElsewhereError: another process of this run has failed, or is gone.
    """
    shape = setup.check(config)
    setup.check_directory(Path(config.out), resume=config.resume)
    cluster.join(distributed, {"run": to_dict(config), "mesh": asdict(shape)})
    console = (console or Console()) if processes.is_writer() else Console(quiet=True)
    with ending.telling_others(), _full_disk_in_one_line(config.out):
        result, data = _train(config, shape, console)
    ending.finish()
    _say_end(result, data, console)
    return result


def _train(config: RunConfig, shape: MeshShape, console: Console) -> tuple[Result, Data]:
    with ExitStack() as stack:
        mesh = setup.start_devices(config, shape)  # reading a checkpoint would fix their number
        weights = None if config.resume else setup.open_initial_weights(config, shape)
        stack.enter_context(jax.set_mesh(mesh))
        layout = Layout.of(shape)
        _say(console, "reading the text ...")
        data = setup.read_data(config, layout, eval_batches=config.eval_batches)
        stack.callback(data.train.close)
        checkpoints = _open_checkpoints(config, console)
        stack.callback(checkpoints.close)
        run = _Run(config, layout, data, weights, checkpoints, console)
        # Others learn of a failure before anything is closed here, which may wait for them.
        with ending.telling_others(), _full_disk_in_one_line(config.out):
            start = _start(run)
            if processes.is_writer():
                write_config(config, config.out)
            _say(
                console,
                f"mesh {shape.name} ({shape}) on {mesh.devices.flat[0].platform}",
                f"{count_parameters(start.state.model):,} parameters; "
                f"{data.num_train_examples:,} examples for training, "
                f"{data.num_eval_examples:,} for evaluation",
                f"unigram entropy of the held-out targets: {data.unigram_entropy:.3f} nats",
                *_of_hot_experts(config, shape),
            )
            compiled = _compile(run, start.state)
            log = stack.enter_context(_open_log(config, start.step + 1, console))
            return _loop(run, start, compiled, log), data


@contextmanager
def _full_disk_in_one_line(out: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        if (first := _earlier(error)) is not None:
            raise first from None
        raise UserError(f"cannot write to {out}: {error.strerror}") from error


def _earlier(error: BaseException) -> UserError | NonFiniteError | None:
    """What was being raised when `error` came: a failed save, say, before a failed picture."""
    before = error.__context__
    while before is not None and not isinstance(before, UserError | NonFiniteError):
        before = before.__context__
    return before


class _Run(NamedTuple):
    """What the parts of a run share."""

    config: RunConfig
    layout: Layout
    data: Data
    weights: Weights | None  # that the model starts from
    checkpoints: Checkpoints
    console: Console


class _Start(NamedTuple):
    """Where the loop begins: after `step` steps, having read `tokens` real tokens."""

    step: int
    tokens: int
    state: TrainState


class _Compiled(NamedTuple):
    """Programs for one shape of batch; another shape is an error, not another compile."""

    train_step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
    eval_step: EvalStep
    are_finite: Callable[[TrainState], dict[str, jax.Array]]
    largest: Callable[[jax.Array], jax.Array]


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _of_hot_experts(config: RunConfig, shape: MeshShape) -> list[str]:
    """What those of the mesh file cost and save."""
    if not (hot := shape.storage.hot_experts):
        return []
    kept, saved = kept_bytes(config.model, shape), saved_bytes(config, shape)
    of_all = saved / (saved + gathered_bytes(config, shape))
    return [
        f"{hot} of {config.model.num_experts} experts of each Switch layer stay gathered: "
        f"{kept / 1e6:,.1f} MB a device, which saves {saved / 1e6:,.1f} MB a step on its wire, "
        f"{of_all:.0%} of what gathering experts takes"
    ]


def _open_checkpoints(config: RunConfig, console: Console) -> Checkpoints:
    return Checkpoints(
        checkpoint_directory(config.out),
        keep=config.keep,
        on_commit=lambda step: _say(console, f"step {step} saved"),
    )


def _open_log(config: RunConfig, first_step: int, console: Console) -> RunLog:
    if not processes.is_writer():
        return SilentLog()
    return RunLog(
        Path(config.out),
        total_steps=config.steps,
        first_step=first_step,
        layer_names=switch_layer_names(config.model),
        num_experts=config.model.num_experts,
        console=console,
    )


def _start(run: _Run) -> _Start:
    """The newest checkpoint's state; the initial one for a run that is new or saved nothing."""
    config, checkpoints = run.config, run.checkpoints
    step = checkpoints.latest() if config.resume else None
    if step is None:
        if config.resume and checkpoints.skipped:
            raise UserError(
                "; ".join(
                    [
                        f"nothing to resume: no complete checkpoint in {checkpoints.directory}",
                        *checkpoints.skipped,
                    ]
                )
            )
        if config.resume:
            _say(run.console, "no step was saved yet: starting from the first")
        return _Start(0, 0, _first_state(run))
    if step >= config.steps:
        raise UserError(f"the run has {step} steps already: raise --steps above {config.steps}")
    state, saved = checkpoints.restore(step, abstract_state(config, run.layout))
    run.data.train.set_state(saved["stream"])
    _say(run.console, *(f"passed over {line}" for line in checkpoints.skipped))
    _say(run.console, f"resuming after step {step}")
    return _Start(step, saved["tokens"], state)


def _first_state(run: _Run) -> TrainState:
    config, weights = run.config, run.weights
    if config.init_from is None:
        initial = jax.jit(partial(init_state, config, run.layout)).lower().compile()
        processes.meet()
        return initial()
    if weights is None:  # a run to resume that was stopped before its first checkpoint
        weights = open_weights(config.init_from)
    target = abstract_state(config, run.layout)
    weights, conversion = in_dtypes_of(target.model, weights)
    model = load_model(weights, target.model)
    initial = jax.jit(partial(first_state, config, run.layout)).lower(model).compile()
    processes.meet()
    state = initial(model)
    started = "step, learning-rate schedule, optimizer state and data begin anew"
    if weights.router_bias is not None and target.router_bias_XE is not None:
        bias_XE = load_array(weights, ROUTER_BIAS, target.router_bias_XE)
        state = state._replace(router_bias_XE=bias_XE)
    elif weights.router_bias is not None:
        started += ", and without the routers' bias, since optim.bias_rate is 0"
    _say(run.console, "; ".join(filter(None, [f"model of {weights.source}", conversion, started])))
    return state


def _compile(run: _Run, state: TrainState) -> _Compiled:
    """The programs of the loop, before it: no step waits for a compiler, and each is told."""
    _say(run.console, "compiling the train step and the evaluation step ...")
    began = time.perf_counter()
    batch = run.layout.place(run.data.eval_batches[0])  # of the same shape as those of training
    step = partial(train_step, run.config, run.layout)
    platform = jax.sharding.get_mesh().devices.flat[0].platform
    options = run.layout.exchange.compiler_options(platform)
    compiled = _Compiled(
        jax.jit(step, donate_argnums=0).lower(state, batch).compile(compiler_options=options),
        jax.jit(eval_step).lower(state.model, state.router_bias_XE, batch).compile(),
        jax.jit(_are_finite).lower(state).compile(),
        jax.jit(jnp.max).lower(run.layout.place_words(0)).compile(),
    )
    _say(run.console, f"compiled in {time.perf_counter() - began:.1f} s")
    processes.meet()
    return compiled


def _are_finite(state: TrainState) -> dict[str, jax.Array]:
    """Of each array of numbers with a point, by name: is all of it finite?"""
    finite, arrays = named_leaves(offload.are_finite(state)), named_leaves(state)
    return {n: finite[n] for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}


def _require_finite(step: int, are_finite: dict[str, jax.Array]) -> None:
    """A step may end in a state that only the next step's loss would show to be lost.

    Raises:
        NonFiniteError: naming the first array with an infinity or NaN.
    """
    for name, is_finite in jax.device_get(are_finite).items():
        if not is_finite:
            raise NonFiniteError(f"step {step}: {name} is not finite")


def _loop(run: _Run, start: _Start, compiled: _Compiled, log: RunLog) -> Result:
    config, layout, data, _, checkpoints, console = run
    eval_batches = [layout.place(batch) for batch in data.eval_batches]
    report = Report(log, start.tokens)
    number, state, evaluation, stop = start.step, start.state, None, None
    with stop_signal() as received, jax.transfer_guard("disallow"):
        stopped = (
            received if processes.count() == 1 else together(received, layout, compiled.largest)
        )
        while number < config.steps and stop is None:
            number += 1
            report.begin()
            state, metrics = compiled.train_step(state, layout.place(next(data.train)))
            report.later(number, metrics)
            checkpoints.poll()
            stop, last, evaluation = stopped(), number == config.steps, None
            if stop is not None:
                console.show_cursor()  # a progress bar hides it; a second signal may leave it so
                log.say(f"{stop.name}: saving step {number}; a second one leaves at once")
            if last or (number % config.eval_every == 0 and stop is None):
                report.now()
                evaluation = evaluate(state, eval_batches, compiled.eval_step)
                log.evaluation(number, evaluation)
            if last or number % config.checkpoint_every == 0 or stop is not None:
                report.now()
                _require_finite(number, compiled.are_finite(state))
                checkpoints.save(
                    number,
                    state,
                    data_state={"stream": data.train.get_state(), "tokens": report.tokens},
                    config=config,
                    eval_loss=None if evaluation is None else evaluation["ce"],
                )
        checkpoints.wait()
        return Result(number, evaluation, None if number == config.steps else stop)


def _say_end(result: Result, data: Data, console: Console) -> None:
    if result.signal is not None:
        _say(console, f"stopped after step {result.step}, which is saved: --resume continues")
    elif result.evaluation is not None:
        ce, entropy = result.evaluation["ce"], data.unigram_entropy
        side = "below" if ce <= entropy else "above"
        _say(
            console,
            f"held-out cross-entropy {ce:.3f} nats, "
            f"{abs(1 - ce / entropy):.0%} {side} the unigram entropy",
        )
