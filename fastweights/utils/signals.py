"""Signals that ask a program to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` with the signal's number at SIGTERM and at the first SIGINT. A second SIGINT ends the program.

    A second SIGTERM does not: a process manager may signal a group of processes and their parent too. In any thread
    but the main one nothing is handled, because Python does not allow it.
    """

    def handle(number: int, _frame: Any) -> None:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        stop(number)

    try:
        before: dict[int, Any] = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
