"""`switchjax plan`: enumerate, rank by formula, compile the best few, say which and why."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from switchjax.config import RunConfig
from switchjax.errors import UserError
from switchjax.mesh import read_mesh
from switchjax.plan import explain, report
from switchjax.plan.candidates import Candidate, candidates
from switchjax.plan.compiling import Answer, Failure, Program, compile_all, has_compiler
from switchjax.plan.drops import expected_drops, measured_loads
from switchjax.plan.hardware import Hardware, read_hardware, whole_nodes
from switchjax.plan.options import PlanConfig
from switchjax.plan.ranking import Row, by_formula, estimate, ranked, with_program
from switchjax.plan.sizes import Sizes
from switchjax.setup import check_sizes

_UNITS = {"K": 2**10, "M": 2**20}


def plan(
    config: RunConfig,
    options: PlanConfig,
    *,
    command: str = "switchjax plan",
    console: Console | None = None,
) -> list[Row]:
    """Ranks layouts of the config, and says what was found.

    Args:
        command: what was typed, for the written mesh file.

    Raises:
        UserError: unknown hardware, a layout that cannot exist, a model that fits nowhere.
    """
    # A table has more columns than rich gives to a pipe or file.
    piped = not (sys.stderr if options.json else sys.stdout).isatty()
    console = console or Console(stderr=options.json, width=180 if piped else None)
    config = _with_batch(config, options)
    hardware = _hardware(options)
    asked = _candidates(config, options, hardware)
    loads = None if options.loads is None else measured_loads(options.loads)
    rows = by_formula(asked, hardware)
    if options.mesh is None:
        _require_fit(rows, hardware)
    answers = _answers(rows[: options.compile], hardware, console)
    first = [with_answer(row, answer, hardware) for row, answer in answers]
    shown = ranked([*first, *rows[options.compile : options.show]])
    drops = None
    if loads is not None:
        drops = [expected_drops(loads, Sizes(r.candidate.config, r.candidate.shape)) for r in shown]
    if options.json:
        print(json.dumps([report.as_json(row) for row in shown], indent=1))
    console.print(report.table(shown, hardware, drops))
    if options.mesh is not None:
        _explain(shown[0], answers, hardware, console, in_full=options.explain)
    else:
        _say(console, report.why(shown))
        kept = [row.candidate for row in rows[:40]]
        _say(console, report.what_if(partial(_first, kept), hardware, rows[0]))
    _finish(shown[0], options, command, console)
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
        devices = (options.nodes or 1) * hardware.devices_per_node
        return candidates(config, devices, hardware)
    shape = read_mesh(options.mesh, config.dispatcher)
    nodes, _ = whole_nodes(hardware, shape)
    if options.nodes not in (None, nodes):
        raise UserError(
            f"plan.nodes {options.nodes} of {hardware.devices_per_node} devices do not make the "
            f"{shape.num_devices} devices of mesh {shape.name}"
        )
    check_sizes(config, shape)
    return [Candidate(config=config, shape=shape)]


def _first(kept: list[Candidate], hardware: Hardware) -> Row:
    return ranked(estimate(candidate, hardware) for candidate in kept)[0]


def _require_fit(rows: list[Row], hardware: Hardware) -> None:
    """Raises UserError if no row fits, with what is missing and the largest part of it."""
    best = rows[0]
    if best.fits:
        return
    said = explain.out_of_memory(best, None, hardware)
    raise UserError(f"no layout fits; the smallest, {said}")


def _answers(
    rows: list[Row], hardware: Hardware, console: Console
) -> list[tuple[Row, Answer | None]]:
    """Each row with what the compiler says; None where there is no compiler for the hardware."""
    none: list[tuple[Row, Answer | None]] = [(row, None) for row in rows]
    if not rows:
        return none
    if hardware.kind != "gpu":
        _say(console, f"{hardware.name} is not compiled for: all numbers are by formula")
        return none
    if not has_compiler():
        _say(
            console,
            "all numbers are by formula: pip install 'switchjax[plan]' to compile the first "
            f"{len(rows)} for the real GPU",
        )
        return none
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(rows))
        answers = compile_all(
            [row.candidate for row in rows],
            hardware,
            on_done=lambda: progress.advance(task),
        )
    return list(zip(rows, answers, strict=True))


def with_answer(row: Row, answer: Answer | None, hardware: Hardware) -> Row:
    """The row as the compiler has it; one that it failed on stays, and says so."""
    if answer is None:
        return row
    if isinstance(answer, Failure):
        return replace(row, failure=answer.message, fits=False)
    return with_program(row, answer, hardware)


def _explain(
    row: Row,
    answers: list[tuple[Row, Answer | None]],
    hardware: Hardware,
    console: Console,
    *,
    in_full: bool,
) -> None:
    """Of the one layout asked for."""
    answer = answers[0][1] if answers else None
    program = answer if isinstance(answer, Program) else None
    if in_full:
        console.print(explain.memory_table(row, program, hardware))
        console.print(explain.rung_table(row.candidate, hardware))
        if program is not None:
            console.print(explain.collective_table(row.candidate, program, hardware))
            for size, kind, origin in program.largest:
                _say(console, f"{size / 1e6:10,.0f} MB  {kind:40} {origin}")
    if not row.fits and row.failure is None:
        raise UserError(explain.out_of_memory(row, program, hardware))


def _finish(first: Row, options: PlanConfig, command: str, console: Console) -> None:
    """How to run the first, and its mesh file if asked for."""
    mesh = report.mesh_words(first.candidate.shape)
    if options.write is not None:
        path = Path(options.write)
        try:
            path.write_text(report.mesh_file(first.candidate.shape, f"Written by {command}"))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        _say(console, f"{path} written")
        mesh = str(path)
    _say(console, report.how_to_run(first, mesh))
