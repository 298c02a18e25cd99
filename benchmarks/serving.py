"""Shared by the benchmarks of the server: the process, what is known about it, and a client that costs little."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastweights.serve.store import INDEX, STATES

START_SECONDS, STOP_SECONDS, REPLY_SECONDS = 120.0, 60.0, 300.0


@dataclass
class Process:
    """A server on 127.0.0.1 that was started here."""

    port: int
    pid: int

    def get(self, path: str) -> str:
        """The body of a reply."""
        return asyncio.run(ask(self.port, path)).body

    def metric(self, name: str) -> float:
        """A value of /metrics without labels."""
        found = re.search(rf"^{name} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def active(self) -> int:
        """Texts that are generated or wait for a slot."""
        return int(self.metric("fastweights_running") + self.metric("fastweights_waiting"))

    def resident_bytes(self) -> int:
        """Memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Time that the process has had a core."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def handles(self) -> dict[str, int]:
        """Open files and sockets, and threads."""
        process = Path(f"/proc/{self.pid}")
        return {"files": len(list((process / "fd").iterdir())), "threads": len(list((process / "task").iterdir()))}


@contextmanager
def started(arguments: Sequence[str], threads: int, health: str = "/health") -> Iterator[Process]:
    """Run a server's command, which gets `--port`, until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *arguments, "--port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as server:
        process = Process(port, server.pid)
        try:
            _wait_until_ready(process, server, health)
            yield process
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_until_ready(process: Process, server: subprocess.Popen[bytes], health: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with suppress(OSError):
            process.get(health)
            return
        time.sleep(0.2)
    raise SystemExit(f"the server did not start: {server.args}")


@dataclass
class Reply:
    """What a client received.

    Attributes:
        status: 0 if it hung up before the reply began.
        body: As it was sent.
        first_seconds: Until the first event.
        seconds: Until the end.
        complete: Whether the client stayed until the end.
    """

    status: int = 0
    body: str = ""
    first_seconds: float = 0.0
    seconds: float = 0.0
    complete: bool = False
    _events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream."""
        if not self._events:
            lines = [line.removeprefix("data: ") for line in self.body.split("\n") if line.startswith("data: ")]
            self._events = [json.loads(line) for line in lines if line != "[DONE]"]
        return self._events

    @property
    def text(self) -> str:
        """The text of a streamed answer, with each of the three paths."""
        parts = []
        for event in self.events:
            choice = next(iter(event.get("choices") or [{}]))
            parts.append(choice.get("text") or choice.get("delta", {}).get("content") or event.get("delta") or "")
        return "".join(parts)

    @property
    def usage(self) -> dict[str, Any]:
        """The numbers of tokens."""
        found = [event.get("usage") or event.get("response", {}).get("usage") for event in self.events]
        return next(usage for usage in reversed(found) if usage)

    @property
    def new_tokens(self) -> int:
        usage = self.usage
        return usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]

    @property
    def response_id(self) -> str:
        """The id of a response."""
        return self.events[-1]["response"]["id"]


class _Client(asyncio.Protocol):
    """A connection that keeps what arrives until the server closes it. It costs less than asyncio's streams."""

    def __init__(self, request: bytes) -> None:
        self.request, self.received, self.first_at = request, bytearray(), 0.0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.first_at and b"\r\n\r\n" in self.received and not self.received.endswith(b"\r\n\r\n"):
            self.first_at = time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def ask(port: int, path: str, body: dict[str, Any] | None = None, hang_up: float | None = None) -> Reply:
    """Send a request and read the reply.

    Args:
        port: The server's, on 127.0.0.1.
        path: What is asked for.
        body: What is posted, if it is.
        hang_up: Seconds after which the client is gone.
    """
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reply, started_at = Reply(), time.perf_counter()
    transport, client = await asyncio.get_running_loop().create_connection(
        lambda: _Client(head.encode() + data), "127.0.0.1", port
    )
    try:
        async with asyncio.timeout(hang_up or REPLY_SECONDS):
            await asyncio.shield(client.closed)
        reply.complete = True
    except TimeoutError:
        if hang_up is None:
            raise
    finally:
        if not reply.complete and random.random() < 0.5:
            transport.abort()  # a reset, as of a client that crashed
        transport.close()
        await client.closed
    reply.seconds = time.perf_counter() - started_at
    reply.first_seconds = max(0.0, client.first_at - started_at)
    headers, _, content = bytes(client.received).partition(b"\r\n\r\n")
    if headers:
        reply.status = int(headers.split()[1])
        whole = _joined(content) if b"transfer-encoding: chunked" in headers.lower() else content
        reply.body = whole.decode(errors="replace")
    return reply


def _joined(content: bytes) -> bytes:
    """A body without the lengths of its chunks."""
    parts, position = [], 0
    while (end := content.find(b"\r\n", position)) > 0 and (size := int(content[position:end], 16)):
        parts.append(content[end + 2 : end + 2 + size])
        position = end + 4 + size
    return b"".join(parts)


def store_counts(folder: Path) -> dict[str, int]:
    """Entries of a store's index, its files, those of them that no entry names, and temporary ones."""
    with sqlite3.connect(f"file:{folder / INDEX}?mode=ro", uri=True) as index:
        entries = {state for (state,) in index.execute("SELECT state FROM entries")}
    index.close()
    files = [path for path in (folder / STATES).rglob("*") if path.is_file()]
    names = {path.stem for path in files if path.suffix == ".safetensors"}
    return {
        "entries": len(entries),
        "files": len(names),
        "files without entry": len(names - entries),
        "entries without file": len(entries - names),
        "temporary files": len(files) - len(names),
    }
