"""A server with a tiny model on a free port, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai

import fastweights as fw
from fastweights.serve.address import address_of, bind
from fastweights.serve.app import make_app
from fastweights.serve.auth import Keys
from fastweights.serve.server import Server
from fastweights.serve.service import Service, Settings
from fastweights.serve.store import StoreLimits, open_store
from fastweights.serve.worker import Worker
from helpers.chat import CHATML, chat_tokenizer
from helpers.engine import converted

MODEL = "tiny"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Running:
    """A running server."""

    def __init__(self, service: Service, server: Server, app: Any, url: str) -> None:
        self.service, self.server, self.app, self.url = service, server, app, url

    def active(self) -> int:
        """The number of texts that are generated or wait."""
        stats = self.service.worker.stats
        return stats.running + stats.waiting

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self.active())

    def client(self, key: str = "none") -> openai.OpenAI:
        return client_of(self.url, key)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def make_engine(slots: int = 4, template: str | None = CHATML, endless: bool = False, **settings: Any) -> fw.Engine:
    """An engine with a tiny model, whose greedy answers end only at their limit if they are to be endless."""
    model, tokenizer = converted(**settings), chat_tokenizer(template)
    if endless:
        model.lm_head.weight.data[tokenizer.all_special_ids] = 0  # never the likeliest token
    return fw.Engine(model, slots, tokenizer=tokenizer)


def make_server(
    engine: fw.Engine,
    on_ready: Callable[[], None],
    keys: tuple[str, ...] = (),
    queue: int = 64,
    store: str | None = None,
    limits: StoreLimits | None = None,
    grace: float = 10.0,
    **settings: Any,
) -> tuple[Service, Server]:
    """A server that is not started yet."""
    worker = Worker(engine, queue)
    opened = open_store(store, engine.model, limits or StoreLimits())
    service = Service(engine, worker, opened, Settings(MODEL, **{"max_tokens": 64} | settings))
    return service, Server(make_app(service, Keys(list(keys))), worker, grace, on_ready)


@contextmanager
def serving(engine: fw.Engine | None = None, **options: Any) -> Iterator[Running]:
    """A server until the end of the block."""
    ready = threading.Event()
    service, server = make_server(engine or make_engine(), ready.set, **options)
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            assert ready.wait(30)
            yield Running(service, server, server.config.app, address_of(bound))
        finally:
            server.should_exit = True
            thread.join()
