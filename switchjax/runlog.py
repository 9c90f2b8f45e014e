"""What a run leaves for people to read: lines, metrics, events and the picture of expert load.

Decides file names and formats in the output directory, what the console shows and how often.
Knows nothing of JAX or of how the numbers came about: it is given plain floats and counts.
"""

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tensorboardX import SummaryWriter

from switchjax.expert_load import ExpertLoad, draw_expert_load

STEP_METRICS = (
    "step",
    "tokens",
    "loss",
    "ce",
    "aux",
    "z",
    "grad_norm",
    "learning_rate",
    "loss_scale",
    "skipped_steps",
    "drop_fraction",
    "load_max",
    "load_min",
    "dead_experts",
    "fallback_share",
    "cold_share",
    "tokens_per_second",
    "seconds",
)

SECONDS_BETWEEN_LINES = 10
SECONDS_BETWEEN_LOADS = 30  # a killed run loses at most this much of its picture


class RunLog:
    """Reports a run from `first_step` to `total_steps`, counted from 1, into the directory `out`.

    After a resume each file holds each step once: what an earlier run wrote of `first_step` and
    later is cut off. Use as a context manager: the picture is drawn on the way out, however the
    run ends.
    """

    def __init__(
        self,
        out: Path,
        *,
        total_steps: int,
        first_step: int,
        layer_names: tuple[str, ...],
        num_experts: int,
        console: Console | None = None,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._total_steps = total_steps
        self._metrics = _open_lines(out / "metrics.jsonl", first_step)
        self._evaluations = _open_lines(out / "evaluations.jsonl", first_step)
        self._events = SummaryWriter(str(out / "tensorboard"), purge_step=first_step)
        self._load = ExpertLoad(layer_names, num_experts) if layer_names else None
        if self._load is not None:
            self._load.read(out / "expert_load.npz", before=first_step)
        self._load_saved = time.monotonic()
        self._console = console or Console()
        self._pace: tuple[int, float] | None = None  # the first step reported, and when
        self._line_printed = -float("inf")
        self._progress = _progress_bar(self._console) if self._console.is_terminal else None
        if self._progress is not None:
            self._task = self._progress.add_task(
                "", total=total_steps, completed=first_step - 1, shown=""
            )
            self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(self, record: dict[str, float], load: np.ndarray | None) -> None:
        """Reports one optimizer step.

        `record` has the names of `STEP_METRICS`. `load` counts the assignments of real tokens,
        before drops, by Switch layer and expert; None where there is no Switch layer.
        """
        assert record.keys() == set(STEP_METRICS), record.keys() ^ set(STEP_METRICS)
        step = int(record["step"])
        _write_line(self._metrics, record)
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                self._events.add_scalar(f"train/{name}", value, step)
        if self._load is not None:
            assert load is not None
            self._load.add(step, load)
            if time.monotonic() - self._load_saved > SECONDS_BETWEEN_LOADS:
                self._save_load()
        self._show(step, record)

    def evaluation(self, step: int, record: dict[str, float]) -> None:
        """Reports an evaluation of the parameters after `step`."""
        _write_line(self._evaluations, {"step": step, **record})
        for name, value in record.items():
            self._events.add_scalar(f"evaluation/{name}", value, step)
        shown = f"ce {record['ce']:.3f}  accuracy {record['accuracy']:.1%}".replace("%", " %")
        self.say(f"{self._counted(step)}  evaluation: {shown}")

    def say(self, text: str) -> None:
        """Prints a line; it goes above a progress bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Finishes the files and draws the picture. Harmless when repeated."""
        if self._metrics.closed:
            return
        if self._progress is not None:
            self._progress.stop()
        self._metrics.close()
        self._evaluations.close()
        self._events.close()
        if self._load is not None and self._load.filled.any():
            self._save_load()
            draw_expert_load(self._load, self._out / "expert_load.png")

    def _save_load(self) -> None:
        assert self._load is not None
        self._load.write(self._out / "expert_load.npz")
        self._load_saved = time.monotonic()

    def _show(self, step: int, record: dict[str, float]) -> None:
        now = time.monotonic()
        first = self._pace is None
        self._pace = self._pace or (step, now)
        shown = (
            f"loss {record['loss']:.3f}  drop {record['drop_fraction']:.1%}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  eta {self._eta(step, now)}"
        ).replace("%", " %")
        if record["loss_scale"] != 1 or record["skipped_steps"]:
            shown += f"  scale {record['loss_scale']:.10g}  skipped {record['skipped_steps']:.0f}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, shown=shown)
            return
        due = step % max(self._total_steps // 20, 1) == 0 or step == self._total_steps
        if first or due or now - self._line_printed >= SECONDS_BETWEEN_LINES:
            self._line_printed = now
            self.say(f"{self._counted(step)}  {shown}")

    def _counted(self, step: int) -> str:
        width = len(str(self._total_steps))
        return f"step {step:{width}}/{self._total_steps}"

    def _eta(self, step: int, now: float) -> str:
        """Time left at the pace so far; the first step, which compiles, does not count."""
        assert self._pace is not None
        first_step, since = self._pace
        if step == first_step:
            return "-"
        left = round((self._total_steps - step) * (now - since) / (step - first_step))
        minutes, seconds = divmod(left, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class SilentLog(RunLog):
    """Takes the reports of a process that is not the writer, and leaves nothing."""

    def __init__(self) -> None:
        pass

    def step(self, record: dict[str, float], load: np.ndarray | None) -> None:
        assert record.keys() == set(STEP_METRICS), record.keys() ^ set(STEP_METRICS)

    def evaluation(self, step: int, record: dict[str, float]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def _progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[shown]}"),
        console=console,
        expand=True,
    )


def _open_lines(path: Path, first_step: int):
    """Opens a file of JSON lines for appending, without those of `first_step` and later."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) < first_step]
        temporary = path.with_name(f".{path.name}")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        os.replace(temporary, path)
    return path.open("a")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")  # torn when the earlier run was killed, so it is the last


def _write_line(file, record: dict[str, float]) -> None:
    # JSON has no infinity and no NaN.
    finite = {name: x if math.isfinite(x) else None for name, x in record.items()}
    file.write(json.dumps(finite) + "\n")
    file.flush()
