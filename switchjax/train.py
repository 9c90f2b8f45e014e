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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from switchjax import cluster, ending, processes, setup
from switchjax.batch import Batch
from switchjax.checkpoint import Checkpoints
from switchjax.config import DistributedConfig, RunConfig, to_dict, write_config
from switchjax.data.pipeline import Data
from switchjax.errors import NonFiniteError, UserError
from switchjax.evaluate import EvalStep, evaluate
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.metrics import StepMetrics, router_record
from switchjax.model import switch_layer_names
from switchjax.moe.layer import RouterStats
from switchjax.runlog import RunLog, SilentLog
from switchjax.saved_steps import named_leaves
from switchjax.state import TrainState, abstract_state, count_parameters, init_state
from switchjax.step import eval_step, train_step

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
        mesh = setup.start_devices(config, shape)
        stack.enter_context(jax.set_mesh(mesh))
        layout = Layout.of(shape)
        _say(console, "reading the text ...")
        data = setup.read_data(config, layout, eval_batches=config.eval_batches)
        stack.callback(data.train.close)
        checkpoints = _open_checkpoints(config, console)
        stack.callback(checkpoints.close)
        run = _Run(config, layout, data, checkpoints, console)
        # Others learn of a failure before anything is closed here, which may wait for them.
        with ending.telling_others(), _full_disk_in_one_line(config.out):
            start = _start(run)
            if processes.is_writer():
                write_config(config)
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


def _open_checkpoints(config: RunConfig, console: Console) -> Checkpoints:
    return Checkpoints(
        setup.checkpoint_directory(config.out),
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
        initial = jax.jit(partial(init_state, config, run.layout)).lower().compile()
        processes.meet()
        return _Start(0, 0, initial())
    if step >= config.steps:
        raise UserError(f"the run has {step} steps already: raise --steps above {config.steps}")
    state, saved = checkpoints.restore(step, abstract_state(config, run.layout))
    run.data.train.set_state(saved["stream"])
    _say(run.console, *(f"passed over {line}" for line in checkpoints.skipped))
    _say(run.console, f"resuming after step {step}")
    return _Start(step, saved["tokens"], state)


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
    config, layout, data, checkpoints, console = run
    eval_batches = [layout.place(batch) for batch in data.eval_batches]
    report = _Report(log, start.tokens)
    number, state, evaluation, stop = start.step, start.state, None, None
    with _stop_signal() as received, jax.transfer_guard("disallow"):
        stopped = received if processes.count() == 1 else _together(received, layout, compiled)
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


def _together(
    received: Callable[[], signal.Signals | None], layout: Layout, compiled: _Compiled
) -> Callable[[], signal.Signals | None]:
    """Gives a function that says in all processes the same, once a step: stop, and for what.

    It is what any of them had received a step before: the answer came with that step's metrics,
    so that nobody waits for it.
    """
    waiting: list[jax.Array] = []

    def stopped() -> signal.Signals | None:
        waiting.append(compiled.largest(layout.place_words(received() or 0)))
        number = int(jax.device_get(waiting.pop(0))) if len(waiting) > 1 else 0
        return signal.Signals(number) if number else None

    return stopped


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
