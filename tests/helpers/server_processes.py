"""Servers with a tiny model in processes of their own, which can be killed.

They are forked from a process that has imported everything, so that a start takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import openai

from fastweights.serve.address import address_of, bind
from fastweights.serve.server import run
from helpers.server import client_of, make_engine, make_server

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["helpers.server_processes"])


class ServerProcess:
    """A running server, which is killed at the end of the block.

    Args:
        log: The file that its log is added to.
        options: Those of `make_server`.
    """

    def __init__(self, log: Path, **options: Any) -> None:
        receiver, sender = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_serve, args=(log, options, sender), daemon=True)
        self.process.start()
        sender.close()
        with receiver:
            self.url: str = receiver.recv()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def client(self) -> openai.OpenAI:
        return client_of(self.url)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """As kill -9 does it."""
        self.process.kill()
        self.process.join()

    def wait(self, seconds: float = 30) -> int | None:
        """The exit code. None: it still runs."""
        self.process.join(seconds)
        return self.process.exitcode


def _serve(log: Path, options: dict[str, Any], address: Connection) -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    with bind("127.0.0.1", 0) as bound:
        _, server = make_server(make_engine(endless=True), lambda: address.send(address_of(bound)), **options)
        run(server, bound)


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
