"""Servers that share a store and are killed at random moments while clients talk to them.

Every turn whose reply was complete must be there afterwards, and continue as if no server had been killed: all turns
are repeated on a server that nobody kills, and answers are compared. Replies are greedy.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fastweights.serve.snapshot import from_bytes
from fastweights.serve.store import StoreLimits, open_store
from helpers.server import make_engine, serving
from helpers.server_processes import ServerProcess
from helpers.store_crashes import check_files

SERVERS, CLIENTS = 2, 4
LIMITS = StoreLimits(states_per_tenant=10**6)  # nothing is removed
SECONDS_BETWEEN = 0.5  # two kills, at most
ALL_AT_ONCE = 0.3  # of the kills are of all servers
STARTED_UNDER_LOAD = 0.2  # of the new servers start while clients go on: more take too long to check
CONTINUED_FROM = 20  # of the last turns
PROBE = "Go on."
# What a server logs when it has read a state that is not whole, or failed.
BAD_LINES = re.compile(r"damaged|Traceback|the store failed|cannot be used")


@dataclass(eq=False)
class Turn:
    """A message and what is known of its answer.

    Args:
        text: The message.
        limit: The number of tokens of the answer.
        parent: The turn before it.
        streamed: Whether the answer is streamed.
    """

    text: str
    limit: int
    parent: Turn | None
    streamed: bool
    id: str | None = None
    received: str = ""
    answer: str | None = None  # None: the reply was not complete
    continuation: str | None = None  # None: it could not be continued


class Kills:
    """The servers, the clients, and what they have seen.

    Args:
        folder: An empty folder for the store and the log.
        seed: What decides the moments.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.store, self.log, self._draw = folder / "store", folder / "log", random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.turns: list[Turn] = []
        self.interrupted: list[Turn] = []
        self._servers: list[ServerProcess] = []
        self._asking: Counter[str] = Counter()
        self._checked = 0
        self._paused = self._over = False

    def run(self, kills: int) -> dict[str, int]:
        """Kill servers so many times. Returns counts of what happened."""
        asyncio.run(self._run(kills))
        self._check_files()
        self._compare()
        self.counts["bad lines in the log"] = len(BAD_LINES.findall(self.log.read_text()))
        return dict(self.counts)

    async def _run(self, kills: int) -> None:
        with ExitStack() as stack:
            async with httpx.AsyncClient(timeout=60) as self._client:
                await self._start(stack, SERVERS)
                talking = [asyncio.create_task(self._talk()) for _ in range(CLIENTS)]
                try:
                    for _ in range(kills):
                        await asyncio.sleep(self._draw.uniform(0, SECONDS_BETWEEN))
                        await self._kill(stack)
                finally:
                    self._over = True
                    await asyncio.gather(*talking)
                self._checked = 0  # once more, after all kills
                await self._continue_all()
                await self._look_for_interrupted()

    async def _start(self, stack: ExitStack, count: int) -> None:
        for _ in range(count):
            options = dict(store=str(self.store), limits=LIMITS)
            self._servers.append(stack.enter_context(await asyncio.to_thread(ServerProcess, self.log, **options)))

    async def _kill(self, stack: ExitStack) -> None:
        """Kill one server or all, start others, and continue on one of these what was complete."""
        count = SERVERS if self._draw.random() < ALL_AT_ONCE else 1
        killed = self._draw.sample(self._servers, count)
        self._servers = [server for server in self._servers if server not in killed]
        for server in killed:
            self.counts["requests running when their server was killed"] += self._asking[server.url]
            server.kill()
        self.counts["kills"] += 1
        self.counts["kills of all servers at once"] += count == SERVERS
        self._paused = self._draw.random() > STARTED_UNDER_LOAD
        await self._start(stack, count)
        self._paused = True
        await self._continue_all()
        self._paused = False

    async def _talk(self) -> None:
        """A client: it begins and continues conversations, each turn on any server."""
        while not self._over:
            if self._paused or not self._servers:
                await asyncio.sleep(0.01)
                continue
            parent = self._draw.choice([None, *self.turns[-CONTINUED_FROM:]])
            number = self.counts["turns"] = self.counts["turns"] + 1
            turn = Turn(f"This is {number}.", self._draw.randint(1, 24), parent, self._draw.random() < 0.5)
            try:
                async with self._asks(self._draw.choice(self._servers).url) as url:
                    await self._ask(url, turn)
            except httpx.TransportError:
                pass  # its server was killed
            (self.interrupted if turn.answer is None else self.turns).append(turn)

    @asynccontextmanager
    async def _asks(self, url: str) -> Any:
        self._asking[url] += 1
        try:
            yield url
        finally:
            self._asking[url] -= 1

    async def _ask(self, url: str, turn: Turn) -> None:
        request = body(turn.text, turn.limit, None if turn.parent is None else turn.parent.id)
        if not turn.streamed:
            reply = await self._client.post(f"{url}/v1/responses", json=request)
            if self._is_good(reply):
                turn.id, turn.answer = reply.json()["id"], text_of(reply.json())
            return
        async with self._client.stream("POST", f"{url}/v1/responses", json=request | {"stream": True}) as reply:
            if not self._is_good(reply):
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    self._receive(turn, json.loads(line.removeprefix("data: ")))

    def _receive(self, turn: Turn, event: dict[str, Any]) -> None:
        turn.id = event["response"]["id"] if "response" in event else turn.id
        if event["type"] == "response.output_text.delta":
            turn.received += event["delta"]
        elif event["type"] == "response.completed":
            turn.answer = text_of(event["response"])
        elif event["type"] == "response.failed":
            self.counts["errors"] += 1

    def _is_good(self, reply: httpx.Response) -> bool:
        self.counts["errors"] += reply.status_code != 200
        return reply.status_code == 200

    async def _continue_all(self) -> None:
        """Continue every complete turn that is new since the last call, on the server that was started last."""
        new, self._checked = self.turns[self._checked :], len(self.turns)
        for turn in new:
            turn.continuation = await self._continue(turn)

    async def _continue(self, turn: Turn) -> str | None:
        request = body(PROBE, 6, turn.id, store=False)
        reply = await self._client.post(f"{self._servers[-1].url}/v1/responses", json=request)
        return text_of(reply.json()) if reply.status_code == 200 else None

    async def _look_for_interrupted(self) -> None:
        """A turn whose reply was cut off may be stored whole, or not at all."""
        for turn in self.interrupted:
            if turn.id is None:
                self.counts["cut off before the id was known"] += 1
                continue
            reply = await self._client.get(f"{self._servers[-1].url}/v1/responses/{turn.id}")
            if reply.status_code == 404:
                self.counts["cut off and not stored"] += 1
                continue
            turn.answer = text_of(reply.json())
            turn.continuation = await self._continue(turn)
            self.counts["cut off and stored whole"] += 1
            self.counts["different"] += not turn.answer.startswith(turn.received)
            self.turns.append(turn)

    def _check_files(self) -> None:
        """All that is stored is whole, and nothing else is there."""
        model = make_engine(endless=True).model
        store = open_store(str(self.store), model, LIMITS)
        check_files(str(self.store), store)
        for path in self.store.rglob("*.safetensors"):
            from_bytes(path.read_bytes(), model, path.name)
            self.counts["state files, all whole"] += 1
        asyncio.run(store.close())

    def _compare(self) -> None:
        """Repeat all complete turns on a server that nobody kills."""
        ids: dict[Turn | None, str | None] = {None: None}
        with (
            serving(make_engine(endless=True), limits=LIMITS) as running,
            httpx.Client(base_url=running.url, timeout=60) as client,
        ):

            def ask(request: dict[str, Any]) -> dict[str, Any]:
                return client.post("/v1/responses", json=request).raise_for_status().json()

            for turn in self.turns:
                reply = ask(body(turn.text, turn.limit, ids[turn.parent]))
                ids[turn] = reply["id"]
                continuation = text_of(ask(body(PROBE, 6, reply["id"], store=False)))
                self.counts["complete"] += 1
                self.counts["lost"] += turn.continuation is None
                same = turn.answer == text_of(reply) and turn.continuation in (continuation, None)
                self.counts["different"] += not same


def body(text: str, limit: int, previous: str | None, store: bool = True) -> dict[str, Any]:
    request = dict(input=text, max_output_tokens=limit, temperature=0, store=store)
    return request if previous is None else request | {"previous_response_id": previous}


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])
