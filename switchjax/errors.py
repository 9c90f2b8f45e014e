"""What the command line answers with one line and no traceback."""

import difflib
from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in a config, file or flag: one line that names the values and the rule.

    The command line leaves with exit status 2.
    """


class NonFiniteError(FloatingPointError):
    """Training produced an infinity or NaN; names step and metric. Exit status 1."""


class ElsewhereError(RuntimeError):
    """Another process of the run has failed, or is gone; names it and says what it said."""

    def __init__(self, line: str, *, status: int) -> None:
        super().__init__(line)
        self.status = status  # the exit status of all of them


def unknown(what: str, name: str, known: Sequence[str]) -> UserError:
    """Of a name that is none of those known, with the nearest one."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UserError(f"no {what} {name!r}; {hint}there are {', '.join(known)}")
