"""Signals that ask a program to stop."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StopNow(KeyboardInterrupt):
    """A signal that arrived where there is nothing to save. Code that handles errors does not take it for one.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


@contextmanager
def stop_signals(stop: Callable[[int], None], acknowledge: Callable[[int], None] = lambda _: None) -> Iterator[None]:
    """Handle SIGTERM and the first SIGINT. A second SIGINT raises KeyboardInterrupt, or what else it did before.

    A second SIGTERM does not: a process manager may signal a group of processes and their parent too. In any thread
    but the main one nothing is handled, because Python does not allow it.

    Args:
        stop: Called with the signal's number in the main thread, as soon as that runs Python code; may raise StopNow.
        acknowledge: Called with the number of the first signal in another thread, at once: a call of C++ code, such as
            a backward pass, may keep the main thread from handling a signal for a long time.
    """
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        if received.count(signal.SIGINT) > 1:  # Python handles several that came during one call as one
            signal.raise_signal(signal.SIGINT)
        stop(number)

    try:
        before: dict[int, Any] = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        yield
        return
    try:
        with _received_at_once(received, acknowledge):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def alarm(seconds: float | None, ring: Callable[[int], None]) -> Iterator[None]:
    """Call `ring(SIGALRM)` in the main thread once so many seconds have passed in the block. None: never.

    `ring` may raise StopNow. Like the signals above, it waits for a call of C++ code to return.
    """
    if seconds is None:
        yield
        return
    before: Any = signal.signal(signal.SIGALRM, lambda number, _frame: ring(number))
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would mean never
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _received_at_once(received: list[int], acknowledge: Callable[[int], None]) -> Iterator[None]:
    """Append every signal to `received` from a thread, which also acknowledges the first one of those handled here."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def read() -> None:
        while numbers := reading.recv(64):
            for number in numbers:
                if number in (signal.SIGINT, signal.SIGTERM):
                    received.append(number)
                    if len(received) == 1:
                        acknowledge(number)

    thread = threading.Thread(target=read, daemon=True)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        thread.start()
        yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()
        thread.join()
        reading.close()
