"""The end of a server: what runs is finished or stored, and nothing is left."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.server import make_engine, make_server, wait_until
from helpers.server_processes import ServerProcess

from fastweights.serve.address import bind
from fastweights.serve.server import run

ENDLESS = {"model": "tiny", "temperature": 0, "stream": True, "max_output_tokens": 10**6}
SLOTS = 4
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def server(folder: Path, grace: float) -> Iterator[ServerProcess]:
    options = dict(store=str(folder / "store"), grace=grace, max_tokens=10**6, queue=8)
    with ServerProcess(folder / "log", **options) as started:
        yield started


def started_streams(client: openai.OpenAI, count: int, **options: Any) -> list[Any]:
    """Streams that have begun to write."""
    streams = [client.responses.create(**ENDLESS | options, input=f"Hello {i}") for i in range(count)]
    for stream in streams:
        next(event for event in stream if event.type == "response.output_text.delta")
    return streams


@pytest.mark.parametrize("number", SIGNALS)
def test_answers_that_end_in_time_are_finished(tmp_path: Path, number: int) -> None:
    with server(tmp_path, grace=60) as running, running.client() as client:
        streams = started_streams(client, 2, max_output_tokens=300)
        running.send_signal(number)
        last = [list(stream)[-1].response for stream in streams]
        assert [response.usage.output_tokens for response in last] == [300, 300]
        assert running.wait() == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_other_answers_are_stored_where_they_are_and_can_be_continued(tmp_path: Path, number: int) -> None:
    with server(tmp_path, grace=0.3) as running, running.client() as client:
        streams = started_streams(client, SLOTS)
        streams.append(client.responses.create(**ENDLESS, input="Hello"))  # it waits for a slot
        running.send_signal(number)
        *events, waited = [list(stream) for stream in streams]
        assert running.wait() == 0
        assert not accepts(running)
    last = [event[-1] for event in events]
    assert [event.type for event in last] == ["response.completed"] * SLOTS
    assert {event.response.status for event in last} == {"incomplete"}
    assert waited[-1].type == "response.failed"
    with server(tmp_path, grace=0) as running, running.client() as client:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(waited[-1].response.id)
        for event in last:
            assert client.responses.retrieve(event.response.id).output_text == event.response.output_text
            options = ENDLESS | {"stream": False, "max_output_tokens": 2}
            more = client.responses.create(**options, input="Go on", previous_response_id=event.response.id)
            assert more.usage.input_tokens_details.cached_tokens > event.response.usage.output_tokens


def test_client_that_has_sent_half_a_request_does_not_delay_the_end(tmp_path: Path) -> None:
    with server(tmp_path, grace=5) as running:
        port = int(running.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as half:
            half.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert accepts(running)  # and so it has read this
            running.send_signal(signal.SIGTERM)
            assert half.recv(100).startswith(b"HTTP/1.1 408")
        assert running.wait() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    with server(tmp_path, grace=600) as running, running.client() as client:
        done = client.responses.create(**ENDLESS | {"stream": False, "max_output_tokens": 3}, input="Hello")
        (stream,) = started_streams(client, 1)
        running.send_signal(signal.SIGINT)
        wait_until(lambda: not accepts(running))
        started = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert running.wait() == -signal.SIGINT
        assert time.monotonic() - started < 5
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    with server(tmp_path, grace=0) as running, running.client() as client:
        assert client.responses.retrieve(done.id).output_text == done.output_text


def test_signal_just_before_the_start_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = make_server(make_engine(), lambda: None)
    start, handler = made.run, signal.getsignal(signal.SIGTERM)

    def signal_and_start(sockets: list[socket.socket]) -> None:
        signal.raise_signal(signal.SIGTERM)
        start(sockets)

    monkeypatch.setattr(made, "run", signal_and_start)
    too_late = threading.Timer(20, lambda: setattr(made, "should_exit", True))
    too_late.start()
    try:
        with bind("127.0.0.1", 0) as bound:
            run(made, bound)
        assert too_late.is_alive()
    finally:
        too_late.cancel()
        signal.signal(signal.SIGTERM, handler)


def accepts(running: ServerProcess) -> bool:
    """Whether the server accepts connections."""
    try:
        with running.client() as client:
            return bool(client.models.list())
    except openai.APIConnectionError:
        return False
