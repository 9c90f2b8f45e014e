"""Several processes of one run: which one this is, and what they tell each other.

Where there is only one, which is the usual case, all answers are at hand. Process 0 is the
*writer*: files of the run's directory and lines on the console are its own. What all must do in
step, collectives above all, no process may leave out.

Words go through the service that JAX runs for its own start, beside the devices: they arrive
before there is a device, from any thread, and while a collective hangs.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# JAX has no public name for its key-value store; orbax takes it from the same place.
from jax._src import distributed
from jax.errors import JaxRuntimeError

from switchjax.errors import UserError

PATIENCE = 1800  # seconds, for a process that reads, compiles or saves longer than the others

_rounds = itertools.count()


def count() -> int:
    """Processes of this run. Starts no device, unlike JAX's function."""
    return distributed.global_state.num_processes


def index() -> int:
    """Number of this process, from 0."""
    return distributed.global_state.process_id


def is_writer() -> bool:
    """Whether this process writes and prints for all."""
    return index() == 0


def agree(values: Mapping[str, Any]) -> None:
    """Compares nested plain values over all processes.

    Raises:
        UserError: in all of them, with the first difference: its name and both values.
    """
    texts = gather(json.dumps(values, default=str))
    if len(set(texts)) == 1:
        return
    other = next(process for process, text in enumerate(texts) if text != texts[0])
    one, two = (dict(_flat(json.loads(texts[process]))) for process in (0, other))
    name = next(n for n in {**one, **two} if one.get(n) != two.get(n))
    raise UserError(
        f"processes 0 and {other} disagree: {name} is {one.get(name)!r} and {two.get(name)!r}"
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def gather(text: str) -> list[str]:
    """What each process hands in, in their order; waits for all."""
    if count() == 1:
        return [text]
    place = new_place("gather")
    store().key_value_set(f"{place}/{index():09}", text)
    _wait(f"{place}/all")
    return [text for _, text in sorted(store().key_value_dir_get(f"{place}/"))]


def from_writer(compute: Callable[[], Any]) -> Any:
    """What `compute` gives in process 0, in all of them; a value for JSON."""
    if count() == 1:
        return compute()
    place = new_place("from_writer")
    if is_writer():
        value = compute()
        store().key_value_set(place, json.dumps(value))
        return value
    return json.loads(store().blocking_key_value_get(place, PATIENCE * 1000))


def meet() -> None:
    """Waits until all processes are here.

    On CPU the first collective of two processes fails if one comes to it 30 seconds after the
    other (a constant of XLA's), so they meet before it. Later ones may wait.
    """
    if count() > 1:
        _wait(new_place("meet"))


def _wait(barrier: str) -> None:
    try:
        store().wait_at_barrier(barrier, PATIENCE * 1000)
    except JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise UserError(f"another process did not come within {PATIENCE} s") from error


def new_place(name: str) -> str:
    """A key for the store, used once: the same in all processes, which do the same in order."""
    return f"switchjax/{name}/{next(_rounds)}"


def store() -> Any:
    """JAX's store of words for all processes; only where there are several."""
    return distributed.global_state.client
