"""Words of a command line as a config, through tyro; a mistake is one line."""

import contextlib
import difflib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin

import tyro

from switchjax.errors import UserError

HELP = {"-h", "--help"}


def flagged(words: Sequence[str], *flags: str) -> list[str]:
    """The words with a flag before each of the first ones: `eval runs/tiny` reads better."""
    named = 0
    while named < min(len(flags), len(words)) and not words[named].startswith("-"):
        named += 1
    pairs = zip(flags, words[:named], strict=False)
    return [*(word for pair in pairs for word in pair), *words[named:]]


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """The last value that `words` give a flag: it decides what the others start from."""
    values = [b for a, b in zip(words, words[1:], strict=False) if a == flag]
    values += [word.split("=", 1)[1] for word in words if word.startswith(f"{flag}=")]
    return values[-1] if values else None


def parse(
    kind: type,
    words: Sequence[str],
    program: str,
    default: Any = None,
    *,
    markers: tuple[Any, ...] = (),
) -> Any:
    """Arguments as a config; tyro's boxed answer to a mistake becomes one line.

    Args:
        program: its name, for help.
        default: where all options start from.
        markers: tyro's, for all options.

    Raises:
        UserError: an unknown option, with the nearest one; a value that its type or check refuses.
    """
    said = io.StringIO()
    columns = os.environ.get("COLUMNS")
    try:
        if not HELP & set(words):
            os.environ["COLUMNS"] = "500"  # tyro wraps its answer to the terminal
        with contextlib.redirect_stderr(said):
            options = {} if default is None else {"default": default}
            return tyro.cli(kind, prog=program, args=list(words), config=markers, **options)
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(_reworded(_one_line(said.getvalue()), kind)) from None
    finally:
        if columns is None:
            os.environ.pop("COLUMNS", None)
        else:
            os.environ["COLUMNS"] = columns


def _one_line(boxed: str) -> str:
    """The text of a box of tyro's, without its frame and its pointer to --help."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", boxed)
    lines = [line.strip("│ ") for line in plain.splitlines() if not re.match(r"[╭╰]", line)]
    lines = [line for line in lines if line.strip("─") and not line.startswith("For full help")]
    return re.sub(r"\s+", " ", " ".join(lines))


def _reworded(answer: str, kind: type) -> str:
    """Tyro's answer to a mistake as one would say it; as it is where the mistake is a rare one."""
    if found := re.match(r"Unrecognized options: ([^\s,=]+)", answer):
        word = found[1]
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        near = difflib.get_close_matches(word, list(_options(kind)), n=1)
        return f"unknown option {word}; " + (f"did you mean {near[0]}?" if near else "see --help")
    if found := re.match(
        r"Error parsing (--\S+): .*?'(.*?)'.* Argument helptext: \S+ (\S+)", answer
    ):
        option, value, expected = found.groups()
        return f"{option}: expected {expected}, got {value!r}"
    if found := re.match(r"invalid choice '(.*)' for argument '(.*)'\. .* \((.*)\)", answer):
        value, option, choices = found.groups()
        return f"{option}: expected one of {choices.replace(chr(39), '')}, got {value!r}"
    if found := re.match(r"Missing value for argument '(.*?)'", answer):
        return f"{found[1]} needs a value"
    if found := re.match(r"Missing from [^:]*: (--\S+)", answer):
        return f"{found[1]} is missing"
    return re.sub(r"^Error parsing [\w.]+: ", "", answer)  # the configs' own words


def _options(kind: type, prefix: str = "--") -> Iterator[str]:
    for option in fields(kind):
        nested = get_args(option.type)[0] if get_origin(option.type) is Annotated else None
        if isinstance(nested, type) and is_dataclass(nested):
            yield from _options(nested)  # under no name of its own
        elif isinstance(option.type, type) and is_dataclass(option.type):
            yield from _options(option.type, f"{prefix}{option.name}.")
        else:
            yield prefix + option.name.replace("_", "-")
