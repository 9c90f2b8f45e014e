"""How evenly the experts were used over a run: kept in bounded memory, saved, drawn.

Knows nothing of JAX: it is given counts.
"""

import os
from pathlib import Path

import numpy as np

MAX_COLUMNS = 512  # of the picture, whatever the length of the run


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
