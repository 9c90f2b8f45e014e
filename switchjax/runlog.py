"""What a run leaves for people to read: lines, metrics, events and the picture of expert load.

Decides file names and formats in the output directory, what the console shows and how often.
Knows nothing of JAX or of how the numbers came about: it is given plain floats and counts.
"""

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tensorboardX import SummaryWriter

STEP_METRICS = (
    "step",
    "tokens",
    "loss",
    "ce",
    "aux",
    "z",
    "grad_norm",
    "learning_rate",
    "drop_fraction",
    "load_max",
    "load_min",
    "dead_experts",
    "tokens_per_second",
    "seconds",
)

MAX_COLUMNS = 512  # of the expert load picture, whatever the length of the run
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
            if name != "step":
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
        self.say(f"{self._counted(step)}  evaluation: {_listed(record)}")

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


class ExpertLoad:
    """Share of the tokens that each expert was sent, over the steps, in bounded memory.

    A bin is the mean over `width` consecutive steps. Once a run is longer than the bins, pairs
    of them are merged and the width doubles.
    """

    def __init__(self, layer_names: tuple[str, ...], num_experts: int) -> None:
        self.layer_names = layer_names
        self.width = 1
        self._counts = np.zeros(MAX_COLUMNS, np.int64)
        self._sums = np.zeros((MAX_COLUMNS, len(layer_names), num_experts), np.float32)

    def add(self, step: int, load: np.ndarray) -> None:
        """Takes in the counts [layers, experts] of `step`."""
        assert load.shape == self._sums.shape[1:], (load.shape, self._sums.shape)
        total = load.sum(axis=1, keepdims=True)
        column = self._column(step)
        self._sums[column] += load / np.maximum(total, 1)
        self._counts[column] += 1

    @property
    def filled(self) -> np.ndarray:
        """Which bins hold a step."""
        return self._counts > 0

    @property
    def steps(self) -> np.ndarray:
        """The first step of every bin."""
        return np.arange(MAX_COLUMNS) * self.width + 1

    @property
    def share(self) -> np.ndarray:
        """Mean share [bins, layers, experts]; NaN where a bin holds no step."""
        counts = np.where(self.filled, self._counts, np.nan)
        return self._sums / counts[:, None, None].astype(np.float32)

    def write(self, path: Path) -> None:
        """Saves the bins that hold a step, replacing the file at once."""
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            np.savez(
                file,
                steps=self.steps[self.filled],
                load=self.share[self.filled],
                counts=self._counts[self.filled],
                steps_per_bin=self.width,
                layer_names=np.array(self.layer_names),
            )
        os.replace(temporary, path)

    def read(self, path: Path, *, before: int) -> None:
        """Takes over what an earlier run saved of the steps before `before`, if it did."""
        if before == 1 or not path.exists():
            return
        with np.load(path) as saved:
            self.width = int(saved["steps_per_bin"])
            earlier = saved["steps"] < before
            columns = (saved["steps"][earlier] - 1) // self.width
            # The bin that `before` falls into keeps its mean, over the earlier steps only.
            counts = np.minimum(saved["counts"][earlier], before - saved["steps"][earlier])
            self._counts[columns] = counts
            self._sums[columns] = saved["load"][earlier] * counts[:, None, None]

    def _column(self, step: int) -> int:
        while (step - 1) // self.width >= MAX_COLUMNS:
            self.width *= 2
            for array in (self._counts, self._sums):
                half = MAX_COLUMNS // 2
                array[:half] = array[0::2] + array[1::2]
                array[half:] = 0
        return (step - 1) // self.width


def draw_expert_load(load: ExpertLoad, path: Path) -> None:
    """Draws one heat map a Switch layer: where the tokens went, against a fair share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_layers, num_experts = load.share.shape[1:]
    used = slice(load.filled.argmax(), MAX_COLUMNS - load.filled[::-1].argmax())
    relative = load.share[used] * num_experts
    steps = load.steps[used]
    # Beyond 4 times the fair share a layer is lost; the scale need not tell how far.
    highest = np.nanmax(relative)
    top = int(min(max(2, np.ceil(highest)), 4))

    columns = 1 if num_layers <= 6 else 2
    rows = -(-num_layers // columns)
    panel = min(max(0.12 * num_experts, 1.1), 2.2 if rows <= 3 else 1.4)
    figure = Figure(figsize=(9, 1.1 + rows * (panel + 0.35)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for panel_axes in axes.T.flat[num_layers:]:
        panel_axes.set_axis_off()
    for layer, panel_axes in enumerate(axes.T.flat[:num_layers]):
        picture = panel_axes.imshow(
            relative[:, layer].T,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap="RdBu_r",
            norm=TwoSlopeNorm(vmin=0, vcenter=1, vmax=top),
            extent=(steps[0] - 0.5, steps[-1] + load.width - 0.5, -0.5, num_experts - 0.5),
        )
        panel_axes.set_facecolor("0.85")
        panel_axes.set_title(load.layer_names[layer], loc="left", fontsize=10)
        panel_axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        panel_axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        panel_axes.tick_params(labelsize=8)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("expert", fontsize=10)
    figure.suptitle("Expert load: share of the tokens, relative to a fair share", fontsize=11)
    bar = figure.colorbar(
        picture, ax=axes, extend="max" if highest > top else "neither", fraction=0.04, aspect=30
    )
    above = range(2, top + 1)
    bar.set_ticks([0, 0.5, 1, *above], labels=["0", "½", "1  fair", *(f"{n} ×" for n in above)])
    bar.ax.tick_params(labelsize=8)
    figure.savefig(path)


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
    file.write(json.dumps(record) + "\n")
    file.flush()


def _listed(record: dict[str, float]) -> str:
    return "  ".join(
        f"drop {value:.1%}".replace("%", " %")
        if name == "drop_fraction"
        else f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in record.items()
    )
