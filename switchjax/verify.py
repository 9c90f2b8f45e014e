"""A run's own first steps on several meshes, compared: `switchjax verify`.

Decides which meshes can be compared at all, and how the result is shown; what equal means is
`invariance`'s business.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from switchjax import mesh, setup
from switchjax.batch import Batch
from switchjax.config import ModelConfig, RunConfig
from switchjax.data.pipeline import load_data, row_lengths
from switchjax.errors import UserError
from switchjax.invariance import Observed, Row, compare, observe
from switchjax.layout import Layout
from switchjax.mesh import MeshShape
from switchjax.moe.routing import capacity
from switchjax.state import init_state

# Wide layers have hidden units at the very edge of relu, and with few rows one of them shows: after
# a step of full length rounding may switch it. Of the tiny preset's parameters 2e-4 were seen, and
# 8e-4 of its optimizer's state, at 8 rows. A fault shows in losses, loads or gradients too.
MOVED_LIMIT = 2e-3


def verify(config: RunConfig, meshes: Sequence[str], console: Console | None = None) -> bool:
    """Takes the run's first `config.steps` steps on each mesh, and shows how far apart they are.

    Args:
        config: its own mesh and dispatcher are not looked at.
        meshes: names, files or sizes, as in training; the first is the reference.

    Returns:
        Is every number within its limit?

    Raises:
        UserError: something does not fit, or the meshes do not compute the same function.
    """
    console = console or Console()
    shapes = _checked(config, meshes)
    mesh.simulate_devices(None, max(shapes, key=lambda shape: shape.num_devices))
    devices = [mesh.make_submesh(shape) for shape in shapes]
    _say(console, "reading the text ...")
    data = load_data(
        config.data,
        config.model.architecture,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
        eval_batches=1,
    )
    try:
        batches = list(islice(data.train, config.steps))
    finally:
        data.train.close()
    reference, columns = None, []
    for shape, on_devices in zip(shapes, devices, strict=True):
        began = time.perf_counter()
        with jax.set_mesh(on_devices):
            observed = _observe(config, shape, batches)
        seconds = time.perf_counter() - began
        _say(console, f"mesh {shape.name} ({shape}): {_steps(config)} in {seconds:.1f} s")
        if reference is None:
            reference = observed
        else:
            columns.append(compare(observed, reference, moved_limit=MOVED_LIMIT))
    return _show(config, shapes, columns, console)


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _steps(config: RunConfig) -> str:
    return f"{config.steps} step" + "s" * (config.steps > 1)


def _checked(config: RunConfig, meshes: Sequence[str]) -> list[MeshShape]:
    """The meshes, once it is known that the run fits each, and that their numbers can be equal.

    Raises:
        UserError: naming the mesh and the rule.
    """
    if len(set(meshes)) < max(2, len(meshes)):
        named = ", ".join(meshes) or "none"
        raise UserError(f"--mesh A --mesh B: two or more different meshes to compare, got {named}")
    if config.model.dtype != "float32":
        raise UserError(
            f"model.dtype {config.model.dtype} rounds far above the limits: verify compares "
            "float32, so add --model.dtype float32"
        )
    shapes = [setup.check(replace(config, mesh=name, dispatcher=None)) for name in meshes]
    for shape in shapes:
        if shape.exchange.wire != "compute":
            raise UserError(
                f"mesh {shape.name}: wire {shape.exchange.wire} rounds tokens on their way, so "
                "numbers differ by more than the limits: leave it out"
            )
        if shape.storage.reduce_dtype == "bfloat16":
            raise UserError(
                f"mesh {shape.name}: reduce_dtype bfloat16 rounds sums of gradients, so numbers "
                "differ by more than the limits: leave it out"
            )
    _check_drops(config, shapes)
    return shapes


def _check_drops(config: RunConfig, shapes: list[MeshShape]) -> None:
    """Only where capacity drops nothing is a dropless dispatcher the same function."""
    model = config.model
    ragged = [shape.name for shape in shapes if shape.exchange.dispatcher == "ragged"]
    bounded = [shape.name for shape in shapes if shape.exchange.dispatcher != "ragged"]
    if not (ragged and bounded and model.moe_every):
        return
    lengths = row_lengths(config.data, model.architecture)
    if any(_may_drop(model, model.group_size or length) for length in lengths):
        raise UserError(
            f"mesh {ragged[0]} drops nothing, and mesh {bounded[0]} what exceeds "
            f"model.capacity_factor {model.capacity_factor}: compare them where neither drops, "
            f"with --model.capacity-factor {-(-model.num_experts // model.top_k)}"
        )


def _may_drop(model: ModelConfig, group_size: int) -> bool:
    slots = capacity(group_size, model.num_experts, model.top_k, model.capacity_factor)
    return slots < group_size


def _observe(config: RunConfig, shape: MeshShape, batches: list[Batch]) -> Observed:
    """On the mesh in use."""
    layout = Layout.of(shape)
    platform = jax.sharding.get_mesh().devices.flat[0].platform
    options = shape.exchange.compiler_options(platform)
    # Of GPUs and TPUs, which multiply float32 in fewer bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        state = jax.jit(lambda: init_state(config, layout))()
        return observe(config, layout, state, batches, options)


def _show(
    config: RunConfig, shapes: list[MeshShape], columns: list[list[Row]], console: Console
) -> bool:
    """A line a quantity, a column a mesh; then what came out, and the answer."""
    reference, *others = [shape.name for shape in shapes]
    table = Table(title=f"Deviation from {reference} in {_steps(config)}", title_justify="left")
    table.add_column("quantity", no_wrap=True)
    for name in (*others, "largest", "limit"):
        table.add_column(Text(name), justify="right", overflow="fold", min_width=9)
    failed = []
    for rows in zip(*columns, strict=True):
        worst = max(rows, key=lambda row: (not row.holds, row.deviation))
        cells = [_number(row) for row in (*rows, worst)]
        table.add_row(Text(worst.name), *cells, Text(_digits(worst.limit)))
        failed += [
            f"{row.name} on {name}" for name, row in zip(others, rows, strict=True) if not row.holds
        ]
    # Names of meshes fold; numbers must not, however narrow the terminal.
    console.print(table, width=max(console.width, 27 + 12 * (len(others) + 2)), crop=False)
    if failed:
        _say(console, f"{len(failed)} beyond their limits: {', '.join(failed)}")
    else:
        _say(console, f"the numbers are the same on all {len(shapes)} meshes")
    return not failed


def _number(row: Row) -> Text:
    """Marked for those who see no colours, too."""
    digits = _digits(row.deviation)
    return Text(digits) if row.holds else Text(f"{digits} !", style="bold red")


def _digits(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
