"""`switchjax plan`: enumerate, rank by formula, compile the best few, say which and why."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from switchjax.config import PlanConfig, RunConfig
from switchjax.errors import UserError
from switchjax.mesh import read_mesh
from switchjax.plan import report
from switchjax.plan.candidates import Candidate, candidates, check
from switchjax.plan.compiling import Failure, compile_all, has_compiler
from switchjax.plan.hardware import Hardware, read_hardware
from switchjax.plan.ranking import Row, best_of_each, estimate, ranked, with_program

_UNITS = {"K": 2**10, "M": 2**20}


def plan(config: RunConfig, options: PlanConfig, console: Console | None = None) -> list[Row]:
    """Ranks layouts of the config, and says what was found.

    Raises:
        UserError: unknown hardware, a layout that cannot exist, a model that fits nowhere.
    """
    # A table has more columns than rich gives to a pipe or file.
    piped = not (sys.stderr if options.json else sys.stdout).isatty()
    console = console or Console(stderr=options.json, width=180 if piped else None)
    config = _with_batch(config, options)
    hardware = _hardware(options)
    asked = _candidates(config, options, hardware)
    rows = best_of_each(ranked(estimate(candidate, hardware) for candidate in asked))
    _require_fit(rows, hardware)
    shown = _compiled(rows[: options.compile], hardware, console)
    shown = ranked([*shown, *rows[options.compile : options.show]])
    if options.json:
        print(json.dumps([report.as_json(row) for row in shown], indent=1))
    console.print(report.table(shown, hardware))
    _say(console, report.why(shown))
    if len(asked) > 1:
        first = rows[0]
        kept = [row.candidate for row in rows[:40]]
        _say(console, report.what_if(partial(_first, kept), hardware, first))
    _finish(shown[0], options, console)
    if options.picture is not None:
        report.draw(shown, Path(options.picture))
    return shown


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _with_batch(config: RunConfig, options: PlanConfig) -> RunConfig:
    """With the batch and row length that the options ask for, if any."""
    data = config.data
    if options.seq is not None:
        data = replace(data, sequence_length=options.seq)
    if options.batch_tokens is not None:
        tokens, length = _number(options.batch_tokens), data.sequence_length
        if tokens % length:
            raise UserError(
                f"plan.batch_tokens {options.batch_tokens} = {tokens} must be a multiple of the "
                f"{length} tokens of a row"
            )
        data = replace(data, batch_size=tokens // length)
    return replace(config, data=data)


def _number(text: str) -> int:
    """Such as 65536, 512K or 1M; K is 1024."""
    digits, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    if not digits.isdecimal() or int(digits) == 0:
        raise UserError(f"plan.batch_tokens must be such as 65536, 512K or 1M, got {text!r}")
    return int(digits) * _UNITS.get(unit, 1)


def _hardware(options: PlanConfig) -> Hardware:
    hardware = read_hardware(options.hardware)
    if options.devices_per_node is None:
        return hardware
    return replace(hardware, devices_per_node=options.devices_per_node)


def _candidates(config: RunConfig, options: PlanConfig, hardware: Hardware) -> list[Candidate]:
    if options.mesh is None:
        devices = options.nodes * hardware.devices_per_node
        return candidates(config, devices, hardware)
    shape = read_mesh(options.mesh, config.dispatcher)
    check(config, shape)
    return [Candidate(config=config, shape=shape)]


def _first(kept: list[Candidate], hardware: Hardware) -> Row:
    return ranked(estimate(candidate, hardware) for candidate in kept)[0]


def _require_fit(rows: list[Row], hardware: Hardware) -> None:
    """Raises UserError if no row fits, with what is missing and the largest part of it."""
    best = rows[0]
    if best.fits:
        return
    parts = vars(best.memory)
    largest = max(parts, key=parts.__getitem__)
    helps = {
        "parameters": "more devices, or fewer or narrower experts",
        "optimizer": "another optimizer (adafactor keeps least), or more devices",
        "gradients": "more devices, or fewer or narrower experts",
        "activations": "--model.remat True, more accumulation or shorter rows",
        "buffers": "more accumulation or shorter rows",
    }
    raise UserError(
        f"fits nowhere: the smallest, {best.candidate.name}, needs "
        f"{best.device_bytes / 1e9:.1f} GB of a device's {hardware.memory / 1e9:.1f} GB; "
        f"most are its {largest} ({parts[largest] / 1e9:.1f} GB): {helps[largest]} would help"
    )


def _compiled(rows: list[Row], hardware: Hardware, console: Console) -> list[Row]:
    """The rows by the compiler, where there is one for this hardware."""
    if not rows:
        return []
    if hardware.kind != "gpu":
        _say(console, f"{hardware.name} is not compiled for: all numbers are by formula")
        return rows
    if not has_compiler():
        _say(
            console,
            "all numbers are by formula: pip install 'switchjax[plan]' to compile the first "
            f"{len(rows)} for the real GPU",
        )
        return rows
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(rows))
        answers = compile_all(
            [row.candidate for row in rows],
            hardware,
            on_done=lambda: progress.advance(task),
        )
    return [
        replace(row, failure=answer.message, fits=False)
        if isinstance(answer, Failure)
        else with_program(row, answer, hardware)
        for row, answer in zip(rows, answers, strict=True)
    ]


def _finish(first: Row, options: PlanConfig, console: Console) -> None:
    """How to run the first, and its mesh file if asked for."""
    mesh = f"{first.candidate.shape}"
    if options.write is not None:
        path = Path(options.write)
        said = f"Written by switchjax {' '.join(sys.argv[1:])}"
        try:
            path.write_text(report.mesh_file(first.candidate.shape, said))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        _say(console, f"{path} written")
        mesh = str(path)
    _say(console, report.how_to_run(first, mesh))
