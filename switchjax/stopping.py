"""When a run stops before its last step: a signal to any of its processes."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from switchjax.layout import Layout


@contextmanager
def stop_signal() -> Iterator[Callable[[], signal.Signals | None]]:
    """Gives a function that says which of SIGTERM and SIGINT has come, if any.

    A second one acts as usual, at once. Outside the main thread, where Python does not allow
    handlers, signals act as usual too.
    """
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def receive(number, frame):
        received.append(signal.Signals(number))
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in previous:
        signal.signal(number, receive)
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def together(
    received: Callable[[], signal.Signals | None],
    layout: Layout,
    largest: Callable[[jax.Array], jax.Array],
) -> Callable[[], signal.Signals | None]:
    """Gives a function that says in all processes the same, once a step: stop, and for what.

    It is what any of them had received a step before: the answer came with that step's metrics,
    so that nobody waits for it.
    """
    waiting: list[jax.Array] = []

    def stopped() -> signal.Signals | None:
        waiting.append(largest(layout.place_words(received() or 0)))
        number = int(jax.device_get(waiting.pop(0))) if len(waiting) > 1 else 0
        return signal.Signals(number) if number else None

    return stopped
