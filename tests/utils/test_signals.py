"""Signals that ask a program to stop."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from fastweights.utils.signals import stop_signals


@pytest.fixture(autouse=True)
def default_sigint() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


def long_call(seconds: float = 0.5) -> None:
    """A call during which Python handles no signals, like a backward pass."""
    rounds, started = 20_000, time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(rounds * seconds / (time.perf_counter() - started)))


def send_soon(*numbers: int) -> None:
    def send() -> None:
        for number in numbers:
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def test_first_signal_stops_and_second_sigint_raises() -> None:
    received: list[int] = []
    with stop_signals(received.append):
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    received.clear()
    with stop_signals(received.append):
        for _ in range(2):  # from whoever ends a group of processes, and from the parent
            signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_acknowledged_during_a_long_call(number: int) -> None:
    happened: list[str] = []
    with stop_signals(lambda _: happened.append("stopped"), lambda _: happened.append("acknowledged")):
        send_soon(number)
        long_call()
        happened.append("returned")
        time.sleep(0.01)
    assert happened[0] == "acknowledged" and set(happened[1:]) == {"stopped", "returned"}


def test_two_sigints_during_one_long_call_raise() -> None:
    with pytest.raises(KeyboardInterrupt), stop_signals(lambda _: None):
        send_soon(signal.SIGINT, signal.SIGINT)
        long_call()
        time.sleep(0.01)


def test_only_the_first_signal_is_acknowledged_and_the_wakeup_file_is_restored() -> None:
    acknowledged: list[int] = []
    before = signal.set_wakeup_fd(-1)
    with stop_signals(lambda _: None, acknowledged.append):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert acknowledged == [signal.SIGTERM]
    assert signal.set_wakeup_fd(before) == -1
