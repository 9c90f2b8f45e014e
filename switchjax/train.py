"""The training loop: step, report, evaluate, save, and stop in good order.

The host stays one step ahead of the device: a step's metrics are fetched after the next step has
been sent off, so the device never waits for Python.
"""

import errno
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from switchjax import setup
from switchjax.batch import Batch
from switchjax.checkpoint import Checkpoints
from switchjax.config import RunConfig, write_config
from switchjax.data.pipeline import Data
from switchjax.errors import NonFiniteError, UserError
from switchjax.evaluate import EvalStep, evaluate
from switchjax.layout import Layout
from switchjax.metrics import StepMetrics, router_record
from switchjax.model import switch_layer_names
from switchjax.moe.layer import RouterStats
from switchjax.runlog import RunLog
from switchjax.saved_steps import checkpoint_directory, named_leaves
from switchjax.state import (
    TrainState,
    abstract_state,
    count_parameters,
    first_state,
    init_state,
)
from switchjax.step import eval_step, train_step
from switchjax.weights import ROUTER_BIAS, Weights, load_array, load_model, open_weights

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Result(NamedTuple):
    """How a run ended."""

    step: int
    """The last finished step; it is saved."""
    evaluation: dict[str, float] | None
    """Of the last step; None if a signal cut the run short."""
    signal: signal.Signals | None
    """What cut the run short."""


def train(config: RunConfig, console: Console | None = None) -> Result:
    """Trains to `config.steps`, or until SIGTERM or Ctrl-C, which save first.

    Raises:
        UserError: something does not fit; before any long work where that can be known.
        NonFiniteError: a loss or gradient is infinite or NaN; the last checkpoint is intact.
    """
    console = console or Console()
    shape = setup.check(config)
    setup.check_directory(Path(config.out), resume=config.resume)
    weights = None if config.resume else setup.open_initial_weights(config, shape)
    mesh = setup.start_devices(config, shape)
    _say(console, "reading the text ...")
    data = setup.read_data(config, eval_batches=config.eval_batches)
    try:
        with ExitStack() as stack:
            stack.callback(data.train.close)
            stack.enter_context(jax.set_mesh(mesh))
            checkpoints = _open_checkpoints(config, console)
            stack.callback(checkpoints.close)
            run = _Run(config, Layout.of(shape), data, weights, checkpoints, console)
            start = _start(run)
            write_config(config, config.out)
            _say(
                console,
                f"mesh {shape.name} ({shape}) on {mesh.devices.flat[0].platform}",
                f"{count_parameters(start.state.model):,} parameters; "
                f"{data.num_train_examples:,} examples for training, "
                f"{data.num_eval_examples:,} for evaluation",
                f"unigram entropy of the held-out targets: {data.unigram_entropy:.3f} nats",
            )
            compiled = _compile(run, start.state)
            log = stack.enter_context(_open_log(config, start.step + 1, console))
            result = _loop(run, start, compiled, log)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        if (first := _earlier(error)) is not None:
            raise first from None
        raise UserError(f"cannot write to {config.out}: {error.strerror}") from error
    _say_end(result, data, console)
    return result


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


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _open_checkpoints(config: RunConfig, console: Console) -> Checkpoints:
    return Checkpoints(
        checkpoint_directory(config.out),
        keep=config.keep,
        on_commit=lambda step: _say(console, f"step {step} saved"),
    )


def _open_log(config: RunConfig, first_step: int, console: Console) -> RunLog:
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
        return jax.jit(partial(init_state, config, run.layout))()
    if weights is None:  # a run to resume that was stopped before its first checkpoint
        weights = open_weights(config.init_from)
    target = abstract_state(config, run.layout)
    state = jax.jit(partial(first_state, config))(load_model(weights, target.model))
    started = "step, learning-rate schedule, optimizer state and data begin anew"
    if weights.router_bias is not None and target.router_bias_XE is not None:
        bias_XE = load_array(weights, ROUTER_BIAS, target.router_bias_XE)
        state = state._replace(router_bias_XE=bias_XE)
    elif weights.router_bias is not None:
        started += ", and without the routers' bias, since optim.bias_rate is 0"
    _say(run.console, f"model of {weights.source}; {started}")
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
    )
    _say(run.console, f"compiled in {time.perf_counter() - began:.1f} s")
    return compiled


def _are_finite(state: TrainState) -> dict[str, jax.Array]:
    """Of each array of numbers with a point, by name: is all of it finite?"""
    arrays = named_leaves(state).items()
    return {n: jnp.isfinite(x).all() for n, x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)}


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
    report = _Report(log, start.tokens)
    number, state, evaluation, stop = start.step, start.state, None, None
    with _stop_signal() as stopped, jax.transfer_guard("disallow"):
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


class _Report:
    """Hands each step's metrics to the log once the device has moved on."""

    def __init__(self, log: RunLog, tokens: int):
        self.tokens = tokens
        self._steps = self._fell_back = 0
        self._log = log
        self._waiting: tuple[int, StepMetrics] | None = None
        self._began = self._last = time.perf_counter()

    def begin(self) -> None:
        """Starts a step's clock, unless the step before, still on the device, will do so."""
        if self._waiting is None:
            self._last = time.perf_counter()

    def later(self, step: int, metrics: StepMetrics) -> None:
        """Reports the step before, and keeps this one."""
        self.now()
        self._waiting = step, metrics

    def now(self) -> None:
        """Reports the step that waits, if one does.

        Raises:
            NonFiniteError: its loss or gradient is infinite or NaN.
        """
        if self._waiting is None:
            return
        (step, metrics), self._waiting = jax.device_get(self._waiting), None
        time_now = time.perf_counter()
        self.tokens += int(metrics.tokens)
        names = ("loss", "ce", "aux", "z", "grad_norm", "learning_rate")
        record = {"step": step, "tokens": self.tokens}
        record |= {name: float(getattr(metrics, name)) for name in names}
        record |= router_record(metrics.router)
        record["fallback_share"] = self._count_fallback(metrics.router)
        record["tokens_per_second"] = int(metrics.tokens) / (time_now - self._last)
        record["seconds"] = time_now - self._began
        self._last = time_now
        self._log.step(record, None if metrics.router is None else metrics.router.load_E)
        for name in names:
            if not math.isfinite(record[name]):
                raise NonFiniteError(f"step {step}: {name} is {record[name]}")

    def _count_fallback(self, router: RouterStats | None) -> float:
        """Share of this process's steps in which a buffer was too small and the slow way taken."""
        self._steps += 1
        self._fell_back += router is not None and bool(router.fell_back.any())
        return self._fell_back / self._steps


@contextmanager
def _stop_signal() -> Iterator[Callable[[], signal.Signals | None]]:
    """Gives a function that says which of SIGTERM and SIGINT has come, if any.

    A second one acts as usual, at once. Outside the main thread, where Python does not allow
    handlers, signals act as usual too.
    """
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def receive(number, frame):
        received.append(signal.Signals(number))
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in previous:
        signal.signal(number, receive)
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
