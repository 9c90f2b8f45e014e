"""The text of a compiled program taken apart: its instructions, and how often each one runs.

XLA prints an instruction a line, in the order of the schedule where the program has one:

    %name = type opcode(%operand, ...), attribute=value, metadata={...}, backend_config={...}
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ARRAY = re.compile(r"\b(\w+)\[([\d,<=]*)\]")
_TABLE_ROW = re.compile(r'(\d+) (?:"(?P<text>.*)"|\{(?P<fields>.*)\})$')
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%[\w.-]+)")
_BRANCHES = re.compile(
    r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.-]+)"
)
_NAME = re.compile(r"%([\w.-]+)")


class ArrayType(NamedTuple):
    """Of one array on one device."""

    dtype: str  # XLA's name, as bf16
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Types narrower than a byte are taken as packed."""
        if self.dtype == "pred":
            return self.elements
        bits = re.search(r"\d+", self.dtype)  # none in token[] and opaque[]
        return math.ceil(self.elements * int(bits[0]) / 8) if bits else 0


@dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    type: str
    """As printed: an array, or a tuple in parentheses."""
    opcode: str
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    rest: str
    """What follows the operands."""

    @cached_property
    def attributes(self) -> str:
        """What follows the operands, with every quoted text emptied."""
        return _STRING.sub('""', self.rest)

    @property
    def op_name(self) -> str:
        """JAX's name of the operation, named scopes included; empty where XLA has lost it."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    @property
    def trip_count(self) -> int | None:
        """How often a loop's body runs, if XLA knows."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.rest)
        return int(found[1]) if found else None


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Program:
    """A compiled program."""

    computations: dict[str, Computation]
    """Each by its name, instructions in the order of the text."""
    entry: str
    sources: dict[int, str]
    """Stack frame to `file:line`."""

    def source(self, instruction: Instruction) -> str | None:
        """The line of Python that made an instruction, as `file:line`."""
        if frame := re.search(r"\bstack_frame_id=(\d+)", instruction.attributes):
            return self.sources.get(int(frame[1]))
        found = re.search(r'\bsource_file="([^"]*)" source_line=(\d+)', instruction.rest)
        return f"{found[1]}:{found[2]}" if found else None


@dataclass(frozen=True)
class Visit:
    """An instruction as the program reaches it from its entry."""

    instruction: Instruction
    computation: Computation
    """Where it stands."""
    runs: int | None = 1
    """How often a run of the program comes here; None: in a loop of unknown length."""
    conditional: bool = False
    """Only one branch of a conditional leads here."""
    caller: "Visit | None" = None


def array_types(type_text: str) -> list[ArrayType]:
    """The arrays of a type, however nested."""
    return [
        ArrayType(dtype, tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(type_text)
    ]


def tuple_items(type_text: str) -> list[str]:
    """The types that a tuple holds; an array's own type alone."""
    if not type_text.startswith("("):
        return [type_text]
    items, depth, start = [], 0, 1
    for i, letter in enumerate(type_text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            items.append(type_text[start:i].strip())
            start = i + 1
    return items


def in_scope(op_name: str, scope: str) -> bool:
    """Is the operation inside `jax.named_scope(scope)`, transformed or not?"""
    return re.search(rf"(?:^|[/(]){re.escape(scope)}\)*(?:/|$)", op_name) is not None


@lru_cache(maxsize=1)  # who asks for one thing of a program asks for others
def parse(text: str) -> Program:
    """Takes apart what `jax.stages.Compiled.as_text()` gives.

    Raises:
        ValueError: this is no text of a compiled program, or a line of it cannot be read.
    """
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    entry, lines = None, iter(text.splitlines())
    for line in lines:
        if line in ("FileNames", "FileLocations", "StackFrames"):
            tables[line] = list(iter(lambda: next(lines, ""), ""))
        elif header := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
            computations[header[2]] = _computation(lines)
            entry = header[2] if header[1] else entry
    if entry is None:
        raise ValueError("the text holds no ENTRY computation: it is not a compiled program")
    return Program(computations, entry, _sources(tables))


def _computation(lines: Iterator[str]) -> Computation:
    computation: Computation = {}
    for line in lines:
        if line.startswith("}"):
            return computation
        instruction = _instruction(line)
        computation[instruction.name] = instruction
    raise ValueError("the text ends inside a computation")


def _instruction(line: str) -> Instruction:
    line = re.sub(r"/\*index=\d+\*/", "", line)
    start = re.match(r"\s+(?:ROOT )?%([\w.-]+) = ", line)
    if start is None:
        raise ValueError(f"this line is not an instruction: {line.strip()[:200]}")
    text = line[start.end() :]
    length = _closed(text) if text.startswith("(") else text.index(" ")
    opcode = re.match(r" ([\w-]+)(?=\()", text[length:])
    if opcode is None:
        raise ValueError(f"this instruction has no opcode: {line.strip()[:200]}")
    arguments = text[length + opcode.end() :]
    end = _closed(arguments)
    operands = tuple(_NAME.findall(arguments[:end]))
    return Instruction(start[1], text[:length], opcode[1], operands, arguments[end:])


def _closed(text: str) -> int:
    """Length of the parenthesis that the text begins with."""
    depth = 0
    for match in re.finditer(r'[()]|"(?:[^"\\]|\\.)*"', text):
        depth += (match[0] == "(") - (match[0] == ")")
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses: {text[:200]}")


def _sources(tables: dict[str, list[str]]) -> dict[int, str]:
    def rows(table: str) -> dict[int, re.Match]:
        found = (_TABLE_ROW.match(line) for line in tables.get(table, ()))
        return {int(row[1]): row for row in found if row}

    def field(row: re.Match, name: str) -> int:
        return int(re.search(rf"\b{name}=(\d+)", row["fields"])[1])  # pyright: ignore[reportOptionalSubscript]

    files = {number: row["text"] for number, row in rows("FileNames").items()}
    places = {
        number: f"{files[field(row, 'file_name_id')]}:{field(row, 'line')}"
        for number, row in rows("FileLocations").items()
    }
    return {
        number: places[field(row, "file_location_id")]
        for number, row in rows("StackFrames").items()
    }


def visits(program: Program) -> Iterator[Visit]:
    """Every instruction, once for each way that leads to it from the entry."""
    entry = program.computations[program.entry]
    for instruction in entry.values():
        yield from below(program, Visit(instruction, entry))


def below(program: Program, visit: Visit) -> Iterator[Visit]:
    """The visit, then every instruction that it calls, and that those call."""
    yield visit
    for name, times, branch in _calls(visit.instruction):
        runs = None if visit.runs is None or times is None else visit.runs * times
        computation = program.computations[name]
        for instruction in computation.values():
            conditional = visit.conditional or branch
            yield from below(program, Visit(instruction, computation, runs, conditional, visit))


def _calls(instruction: Instruction) -> Iterator[tuple[str, int | None, bool]]:
    """Name of each computation called, how often, and whether it is a branch.

    What a reduction applies to its elements is left out: nothing there is sent or multiplied.
    """
    opcode, attributes = instruction.opcode.removesuffix("-start"), instruction.attributes
    if opcode == "while":
        trips = instruction.trip_count
        for part, times in (("body", trips), ("condition", None if trips is None else trips + 1)):
            name = re.search(rf"\b{part}=%([\w.-]+)", attributes)
            assert name is not None, attributes
            yield name[1], times, False
    elif opcode == "conditional":
        for names in _BRANCHES.findall(attributes):
            yield from ((name, 1, True) for name in _NAME.findall(names))
    elif opcode in ("call", "fusion", "async", "custom-call"):
        for names in _CALLED.findall(attributes):
            yield from ((name, 1, False) for name in _NAME.findall(names))
