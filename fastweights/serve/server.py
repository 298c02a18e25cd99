"""The process that serves an application: its start and its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from fastweights.serve.worker import Worker

KEEP_ALIVE_SECONDS = 75
# Connections at once. Further ones get 503.
CONNECTIONS = 1024
# uvicorn asks what there is to do ten times a second.
TICKS_PER_SECOND = 10
# After the grace time, replies that end early are still stored and sent.
LAST_WRITES_SECONDS = 10


class Server(uvicorn.Server):
    """A server that finishes what runs before it ends.

    Args:
        app: The application.
        worker: The worker, which is closed with the server.
        grace: Seconds that running answers have to finish when the server is asked to stop. Then they end where they
            are, and are stored.
        on_ready: Called when requests can come.
    """

    def __init__(self, app: FastAPI, worker: Worker, grace: float, on_ready: Callable[[], None]) -> None:
        self.app, self.worker, self._grace, self._on_ready = app, worker, grace, on_ready
        self._idle: dict[Any, Any] = {}  # connections without a running request, and the last one that they had
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(grace + LAST_WRITES_SECONDS),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn all the time. True: the server is to end."""
        if counter % (KEEP_ALIVE_SECONDS * TICKS_PER_SECOND) == 0:
            self.close_idle()
        return await super().on_tick(counter)

    def close_idle(self) -> None:
        """Close connections that have had no request since the last call. uvicorn does so only after a reply: clients
        that never send a whole request could take all connections."""
        requests = {connection: getattr(connection, "cycle", None) for connection in self.server_state.connections}
        idle = {connection: last for connection, last in requests.items() if last is None or last.response_complete}
        for connection, last in idle.items():
            if connection in self._idle and self._idle[connection] is last:
                connection.shutdown()
        self._idle = idle

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. A second Ctrl-C then ends the process at once: what was stored is whole at any moment."""
        super().handle_exit(sig, frame)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what runs, then close all connections."""
        for end in self.app.state.reading:
            end.reschedule(0)  # requests that are not whole yet would be refused later
        closing = asyncio.create_task(asyncio.to_thread(self.worker.close, self._grace))
        await super().shutdown(sockets)
        await closing


def run(server: Server, bound: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM, and log to stderr."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("fastweights.serve").setLevel(logging.INFO)
    if threading.current_thread() is threading.main_thread():
        # From here on, and not only while uvicorn handles signals. It raises them again when it has ended: that is not
        # to end the process, since all is done then.
        signal.signal(signal.SIGTERM, server.handle_exit)
    with suppress(KeyboardInterrupt):
        server.run([bound])
