"""A ranking for people: the table, why the first wins, what would change it, how to run it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.table import Table

from switchjax.mesh import MeshShape
from switchjax.plan.candidates import unusual
from switchjax.plan.hardware import Hardware
from switchjax.plan.ranking import MEMORY_FRACTION, Row

GB = 1e9


def table(rows: Sequence[Row], hardware: Hardware, drops: Sequence[float] | None = None) -> Table:
    """Rows in their order.

    Args:
        drops: expected share of choices dropped, for each row.
    """
    devices = rows[0].candidate.shape.num_devices
    out = Table(
        title=f"{devices} x {hardware.name}, {hardware.memory / GB:.0f} GB each",
        caption="step = max(compute, memory) + exposed sending; ms. * = by the compiler"
        + ", less what is on the host by formula" * any(row.memory.on_host for row in rows),
    )
    out.add_column("")
    out.add_column("layout", overflow="fold", min_width=24)
    names = ["GB", "fits", "step", "compute", "memory", "in node", "between", "host", "hidden"]
    names += ["tokens/s", "MFU", "sending"] + ["drops"] * (drops is not None)
    for name in names:
        out.add_column(name, justify="right")
    for number, row in enumerate(rows, 1):
        share = None if drops is None else drops[number - 1]
        out.add_row(f"{number}", row.candidate.name, *_cells(row, share))
    return out


def _cells(row: Row, drops: float | None) -> list[str]:
    if row.failure is not None:
        return ["-", f"failed: {row.failure}"]
    cost = row.cost
    parts = (cost.step, cost.compute, cost.memory, *cost.sending.values())
    cells = [
        f"{row.device_bytes / GB:.1f}{'*' * row.compiled}",
        "yes" if row.fits else "no",
        *(f"{seconds * 1e3:.1f}" for seconds in parts),
        f"{cost.hidden * 1e3:.1f}" if row.compiled else "?",
        f"{row.tokens_per_second:,.0f}",
        f"{row.utilisation:.0%}",
        f"{row.sending_share:.0%}",
    ]
    return cells + ([f"{drops:.1%}"] if drops is not None else [])


def as_json(row: Row) -> dict[str, Any]:
    """All numbers of a row; bytes and seconds."""
    candidate, cost = row.candidate, row.cost
    return {
        "layout": candidate.name,
        "mesh": {axis: getattr(candidate.shape, axis) for axis in ("data", "expert", "model")},
        "exchange": asdict(candidate.shape.exchange),
        "storage": asdict(candidate.shape.storage),
        "remat": candidate.config.model.remat,
        "accumulation": candidate.config.optim.accumulation,
        "compiled": row.compiled,
        "failure": row.failure,
        "fits": row.fits,
        "device_bytes": row.device_bytes,
        "bytes_by_class": asdict(row.memory),
        "seconds": asdict(cost) | {"exposed": cost.exposed, "step": cost.step},
        "sends": [asdict(send) for send in row.sends],
        "tokens_per_second": row.tokens_per_second,
        "model_flops_utilisation": row.utilisation,
        "sending_share": row.sending_share,
    }


def why(rows: Sequence[Row]) -> str:
    """One sentence on why the first row comes before the second."""
    first = rows[0]
    if len(rows) == 1 or not rows[1].fits:
        return f"{first.candidate.name} is the only one that fits."
    second = rows[1]
    parts = {"computes": _working, "sends inside a node": _inside, "sends between nodes": _between}
    saved = {name: part(second) - part(first) for name, part in parts.items()}
    name = max(saved, key=saved.__getitem__)
    gained = second.cost.step - first.cost.step
    if saved[name] <= 0 or gained <= 0:
        return f"{first.candidate.name} and {second.candidate.name} take the same time."
    return (
        f"{first.candidate.name} comes first: it {name} {saved[name] * 1e3:.3g} ms less than "
        f"{second.candidate.name}, of {gained * 1e3:.3g} ms that it is ahead."
    )


def _working(row: Row) -> float:
    return max(row.cost.compute, row.cost.memory)


def _inside(row: Row) -> float:
    return row.cost.sending["inside"]


def _between(row: Row) -> float:
    return row.cost.sending["between"]


def what_if(rank: Callable[[Hardware], Row], hardware: Hardware, first: Row) -> str:
    """Which change of the hardware would put another layout first, by formula.

    Args:
        rank: the first layout on given hardware.
    """

    def times(name: str, factor: float) -> Hardware:
        link = getattr(hardware, name)
        return replace(hardware, **{name: replace(link, bandwidth=link.bandwidth * factor)})

    changes = {
        "twice the network between nodes": times("between", 2),
        "half the network between nodes": times("between", 0.5),
        "four times the network between nodes": times("between", 4),
        "half the links inside a node": times("inside", 0.5),
        "half the memory": replace(hardware, memory=hardware.memory // 2),
    }
    for change, changed in changes.items():
        row = rank(changed)
        if row.fits and row.candidate.name != first.candidate.name:
            return f"With {change}, {row.candidate.name} would come first."
    return f"It stays first with {', with '.join(changes)}."


def mesh_file(shape: MeshShape, said: str) -> str:
    """The text of a mesh file, after a line that says where it comes from."""
    lines = [f"# {said}"]
    lines += [f"{axis} = {getattr(shape, axis)}" for axis in ("data", "expert", "model")]
    lines += [f"{name} = {value!r}".replace("'", '"') for name, value in _unusual(shape).items()]
    return "\n".join(lines) + "\n"


def mesh_words(shape: MeshShape) -> str:
    """The mesh as `--mesh` takes it without a file."""
    return ",".join([f"{shape}", *(f"{name}={value}" for name, value in _unusual(shape).items())])


def _unusual(shape: MeshShape) -> dict[str, object]:
    return unusual(shape.exchange) | unusual(shape.storage)


def how_to_run(row: Row, mesh: str) -> str:
    """The command and the environment for it."""
    flags = [f"--mesh {mesh}", f"--model.remat {row.candidate.config.model.remat}"]
    flags.append(f"--optim.accumulation {row.candidate.config.optim.accumulation}")
    options = row.candidate.shape.exchange.compiler_options("gpu")
    said = [f"XLA_PYTHON_CLIENT_MEM_FRACTION={MEMORY_FRACTION}"]
    if options:
        said.append(f"# and, set by switchjax itself: {options}")
    return f"{' '.join(said)} switchjax train {' '.join(flags)} ..."


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time by part of each layout, as a picture."""
    shown = [row for row in rows if row.failure is None][::-1]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.4 * len(shown)), layout="constrained")
    labels = [row.candidate.name + " *" * row.compiled for row in shown]
    begin = [0.0] * len(shown)
    for name, part in (
        ("compute", lambda row: row.cost.compute),
        ("memory beyond it", lambda row: max(0.0, row.cost.memory - row.cost.compute)),
        ("sending, exposed", lambda row: row.cost.exposed),
    ):
        widths = [part(row) * 1e3 for row in shown]
        axes.barh(labels, widths, left=begin, label=name)
        begin = [b + w for b, w in zip(begin, widths, strict=True)]
    axes.set_xlabel("ms a step (* by the compiler)")
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
