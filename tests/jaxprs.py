"""Programs as JAX traces them, read operation by operation."""

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a program's operations, those of its inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def inner_programs(equation: Any) -> list[Any]:
    """Of a loop, a branch, a call; none of an operation that computes something itself."""
    found = []
    for value in equation.params.values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found
