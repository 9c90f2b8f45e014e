"""The training loop: step, report, evaluate, save, and stop in good order.

The host stays one step ahead of the device: a step's metrics are fetched after the next step has
been sent off, so the device never waits for Python.
"""

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
from rich.console import Console

from switchjax import setup
from switchjax.checkpoint import Checkpoints
from switchjax.config import RunConfig, config_file, write_config
from switchjax.data.pipeline import Data
from switchjax.errors import NonFiniteError, UserError
from switchjax.evaluate import evaluate
from switchjax.layout import Layout
from switchjax.metrics import StepMetrics, router_record
from switchjax.model import switch_layer_names
from switchjax.runlog import RunLog
from switchjax.state import TrainState, abstract_state, count_parameters, init_state
from switchjax.step import eval_step, train_step


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
    shape = setup.check(config)
    out = Path(config.out)
    _claim(out, config)
    mesh = setup.start_devices(config, shape)
    data = setup.read_data(config, eval_batches=config.eval_batches)
    layout = Layout()
    with ExitStack() as stack:
        stack.callback(data.train.close)
        stack.enter_context(jax.set_mesh(mesh))
        checkpoints = Checkpoints(
            setup.checkpoint_directory(out),
            keep=config.keep,
            on_commit=lambda step: log.say(f"step {step} saved"),
        )
        start = _start(config, layout, data, checkpoints)
        log = stack.enter_context(_open_log(config, start.step + 1, console))
        stack.callback(checkpoints.close)
        write_config(config)
        log.say(
            f"mesh {shape.name} ({shape}) on {jax.devices()[0].platform}; "
            f"{count_parameters(start.state.model):,} parameters; "
            f"{data.num_train_examples:,} training examples, {data.num_eval_examples:,} held out"
        )
        log.say(f"unigram entropy of the held-out targets: {data.unigram_entropy:.3f} nats")
        result = _loop(config, layout, data, checkpoints, log, start)
        _say_end(result, data, log)
        return result


def _claim(out: Path, config: RunConfig) -> None:
    """Makes the run's directory, unless another run lives there.

    Raises:
        UserError: it does, or there is nothing to resume, or the directory cannot be written.
    """
    occupied = config_file(out).exists()
    if occupied and not config.resume:
        raise UserError(
            f"{out} holds another run: add --resume to continue it, or choose another --out"
        )
    if config.resume and not occupied:
        raise UserError(f"nothing to resume: {out} holds no run")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to the output directory {out}: {error.strerror}") from None


class _Start(NamedTuple):
    """Where the loop begins: after `step` steps, having read `tokens` real tokens."""

    step: int
    tokens: int
    state: TrainState


def _start(config: RunConfig, layout: Layout, data: Data, checkpoints: Checkpoints) -> _Start:
    """The first step's state, or the newest checkpoint's."""
    if not config.resume:
        return _Start(0, 0, jax.jit(partial(init_state, config, layout))())
    step = checkpoints.latest()
    if step is None:
        raise UserError(
            f"nothing to resume: {checkpoints.directory} holds no complete checkpoint"
            + "".join(f"; {line}" for line in checkpoints.skipped)
        )
    if step >= config.steps:
        raise UserError(f"the run has {step} steps already: raise --steps above {config.steps}")
    state, saved = checkpoints.restore(step, abstract_state(config, layout))
    data.train.set_state(saved["stream"])
    return _Start(step, saved["tokens"], state)


def _open_log(config: RunConfig, first_step: int, console: Console | None) -> RunLog:
    return RunLog(
        Path(config.out),
        total_steps=config.steps,
        first_step=first_step,
        layer_names=switch_layer_names(config.model),
        num_experts=config.model.num_experts,
        console=console,
    )


def _loop(
    config: RunConfig,
    layout: Layout,
    data: Data,
    checkpoints: Checkpoints,
    log: RunLog,
    start: _Start,
) -> Result:
    step = jax.jit(partial(train_step, config, layout), donate_argnums=0)
    compiled_eval_step = jax.jit(eval_step)
    eval_batches = [layout.place(batch) for batch in data.eval_batches]
    report = _Report(log, start.tokens)
    number, state, evaluation, stop = start.step, start.state, None, None
    with _stop_signal() as stopped:
        while number < config.steps and stop is None:
            number += 1
            state, metrics = step(state, layout.place(next(data.train)))
            report.later(number, metrics)
            checkpoints.poll()
            stop, last, evaluation = stopped(), number == config.steps, None
            if last or number % config.eval_every == 0:
                report.now()
                evaluation = evaluate(state.model, eval_batches, compiled_eval_step)
                log.evaluation(number, evaluation)
            if last or number % config.checkpoint_every == 0 or stop is not None:
                report.now()  # raises before a state that is not finite could be saved
                checkpoints.save(
                    number,
                    state,
                    data_state={"stream": data.train.get_state(), "tokens": report.tokens},
                    config=config,
                    eval_loss=None if evaluation is None else evaluation["ce"],
                )
        checkpoints.wait()
        return Result(number, evaluation, None if number == config.steps else stop)


def _say_end(result: Result, data: Data, log: RunLog) -> None:
    if result.signal is not None:
        log.say(
            f"stopped by {result.signal.name} after step {result.step}, which is saved: "
            f"--resume continues"
        )
    elif result.evaluation is not None:
        below = 1 - result.evaluation["ce"] / data.unigram_entropy
        log.say(
            f"held-out cross-entropy {result.evaluation['ce']:.3f} nats, "
            f"{below:.0%} below the unigram entropy"
        )


class _Report:
    """Hands each step's metrics to the log once the device has moved on."""

    def __init__(self, log: RunLog, tokens: int):
        self.tokens = tokens
        self._log = log
        self._waiting: tuple[int, StepMetrics] | None = None
        self._began = self._last = time.perf_counter()

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
        record["tokens_per_second"] = int(metrics.tokens) / (time_now - self._last)
        record["seconds"] = time_now - self._began
        self._last = time_now
        self._log.step(record, None if metrics.router is None else metrics.router.load_E)
        for name in names:
            if not math.isfinite(record[name]):
                raise NonFiniteError(f"step {step}: {name} is {record[name]}")


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
