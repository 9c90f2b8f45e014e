"""A step's metrics, on their way from the device to the log."""

import math
import time

import jax

from switchjax.errors import NonFiniteError
from switchjax.metrics import StepMetrics, router_record
from switchjax.moe.layer import RouterStats
from switchjax.runlog import RunLog


class Report:
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
            NonFiniteError: its loss or gradient is infinite or NaN, and the step was not skipped
                for that; or what was skipped would overflow at any scale.
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
        scale = metrics.loss_scale
        record["loss_scale"] = 1.0 if scale is None else float(scale.scale)
        record["skipped_steps"] = 0 if scale is None else int(scale.skipped)
        record["fallback_share"] = self._count_fallback(metrics.router)
        record["cold_share"] = 0.0 if metrics.router is None else float(metrics.router.cold.mean())
        record["tokens_per_second"] = int(metrics.tokens) / (time_now - self._last)
        record["seconds"] = time_now - self._began
        self._last = time_now
        self._log.step(record, None if metrics.router is None else metrics.router.load_E)
        if scale is not None and not math.isfinite(record["grad_norm"]):
            _require_scalable(step, record["loss_scale"])
            return
        for name in names:
            if not math.isfinite(record[name]):
                raise NonFiniteError(f"step {step}: {name} is {record[name]}")

    def _count_fallback(self, router: RouterStats | None) -> float:
        """Share of this process's steps in which a buffer was too small and the slow way taken."""
        self._steps += 1
        self._fell_back += router is not None and bool(router.fell_back.any())
        return self._fell_back / self._steps


def _require_scalable(step: int, scale: float) -> None:
    if scale < 1:
        raise NonFiniteError(
            f"step {step}: gradients overflow float16 at every loss scale down to 1; the last "
            "steps were skipped"
        )
