"""The worker: a thread that owns the engine and generates the server's requests, many at a time.

Requests come from event loops, and their events go back to them. All other calls are made by the worker's thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastweights.config import ConfigError
from fastweights.decode.batch import Batch, Border, End, Event, FinishReason, Generation, Token
from fastweights.decode.device_sampler import MODES
from fastweights.decode.engine import Engine, seed_of
from fastweights.decode.sampling import Sampling
from fastweights.serve.snapshot import Snapshot
from fastweights.utils.errors import Argument, FastWeightsError

__all__ = ["Border", "End", "Event", "QueueFull", "Request", "ShuttingDown", "Stats", "Stream", "Token", "Worker"]

logger = logging.getLogger(__name__)

# A client that was refused is told to wait between so many seconds.
RETRY_SECONDS = (1, 60)
# Tokens that come faster than this are handed over together: the event loop and the thread share Python's lock, and
# sending costs the loop about as much for one token as for several. So with many streams they wait longer.
TOGETHER_SECONDS, TOGETHER_SECONDS_PER_STREAM = 0.05, 0.002
# How much of the mean time of a request is replaced by that of the last one.
MEAN_UPDATE = 0.1


class QueueFull(FastWeightsError):
    """Too many requests wait. `retry_after` is the number of seconds after which one may be accepted."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDown(FastWeightsError):
    """The worker accepts no requests: it was closed, or it stopped after an error."""


@dataclass(frozen=True)
class Request:
    """A sequence to generate.

    Attributes:
        tokens: Tokens to read after `start`. They may be empty if `start` is given.
        start: The place from which to continue, which is not changed. None: an empty text.
        max_new_tokens: Number of new tokens unless a stop token comes first. 0: the tokens are only read.
        sampling: How tokens are chosen.
        stop_tokens: Tokens that end the sequence.
        top_logprobs: How many of the likeliest tokens are returned with log-probabilities, beside the log-probability
            of the new one. None: no log-probabilities.
        borders: Counts of `tokens` after which a snapshot is returned.
        tenant: Tenants take turns in the queue.
        deadline: Value of time.monotonic() after which the request ends with the finish reason "deadline".
        final_snapshot: Whether a snapshot after the last new token is returned with the end. Requests that end with
            "deadline" or "shutdown" have it, too, if they have new tokens. Cancelled ones do not.
    """

    tokens: Sequence[int]
    start: Snapshot | None
    max_new_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    top_logprobs: int | None = None
    borders: tuple[int, ...] = ()
    tenant: str = ""
    deadline: float | None = None
    final_snapshot: bool = False


class Stream:
    """The events of a request: an async iterator for the event loop that submitted it. `End` is the last event."""

    def __init__(self, worker: Worker, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.loop, self._worker = request, loop, worker
        self.generation = Generation(
            torch.tensor(request.tokens, dtype=torch.long),
            request.max_new_tokens,
            request.sampling,
            seed_of(request.sampling),
            request.stop_tokens,
            top_logprobs=request.top_logprobs,
            borders=request.borders,
            final_snapshot=request.final_snapshot,
        )
        self.started_at = 0.0
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._is_over = False

    def __aiter__(self) -> Stream:
        return self

    @property
    def has_events(self) -> bool:
        """Whether the next event has arrived."""
        return bool(self._events)

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._is_over = isinstance(event, End)
        return event

    def cancel(self) -> None:
        """End the request with the finish reason "cancelled". Its slot is free before the next step."""
        self._worker.cancel(self)

    def restore_start(self) -> None:
        """Copy the place from which the request continues. Only when it has a slot, since states need memory."""
        start = self.request.start
        if start is not None:
            self.generation.state = start.state.fork()
            self.generation.logits = None if start.logits is None else start.logits[None]

    def put(self, event: Event) -> None:
        """Add an event. Called in the event loop."""
        self._events.append(event)
        self._arrived.set()


class Stats(NamedTuple):
    """What the worker does now, and what it has done so far."""

    running: int
    waiting: int
    slots: int
    steps: int
    read_tokens: int
    generated_tokens: int


class Worker:
    """A thread that owns an engine and generates requests.

    Args:
        engine: The engine. Nothing else can use it until the worker is closed.
        queue_limit: Number of requests that may wait for a slot. Where they are of several tenants, each has its share,
            and a tenant who waits for less than it is accepted, too.

    Raises:
        EngineBusy: The engine is generating.
    """

    def __init__(self, engine: Engine, queue_limit: int) -> None:
        self.engine, self.queue_limit = engine, queue_limit
        with ExitStack() as stack:
            self._batch: Batch = stack.enter_context(engine.batching())
            # Here and not in the thread: while a CUDA graph is captured, no other thread may use the device.
            self._batch.prepare(MODES)
            self._owning = stack.pop_all()
        # Its lock protects what follows it. The thread waits for it while there is nothing to do.
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Stream]] = OrderedDict()  # by tenant, the one whose turn it is first
        self._cancelled: set[Stream] = set()
        self._close_at: float | None = None
        self._error: Exception | None = None
        # Only the thread changes these.
        self._running: dict[Generation, Stream] = {}
        self._held: list[tuple[Stream, Event]] = []  # that are not handed over yet
        self._hand_over_at = 0.0
        self._mean_seconds = 0.0  # that a request has a slot
        self._thread = threading.Thread(target=self._run, name="fastweights-worker", daemon=True)
        self._thread.start()

    # called by others

    def submit(self, request: Request) -> Stream:
        """Queue a request. Called in an event loop, which then gets its events.

        Raises:
            QueueFull: Too many requests wait.
            ShuttingDown: The worker accepts no requests any more.
            ConfigError: The request is wrong, or may become longer than the engine's `max_length`.
            PositionError: It may become longer than the model's position table.
            StateError: Its start cannot be continued.
        """
        self._check(request)
        stream = Stream(self, request, asyncio.get_running_loop())
        with self._changed:
            if self._error is not None:
                raise ShuttingDown(f"the worker stopped after an error: {self._error}")
            if self._close_at is not None:
                raise ShuttingDown("the server is shutting down")
            waiting, slots = self._count_waiting(), len(self._batch.slots)
            is_full = waiting >= self.queue_limit + slots - len(self._running)
            if is_full and len(self._waiting.get(request.tenant, ())) >= self._share(request.tenant):
                seconds = math.ceil(self._mean_seconds / slots)
                raise QueueFull(
                    f"{waiting} requests wait, and the limit is {self.queue_limit}: try again later",
                    retry_after=max(RETRY_SECONDS[0], min(RETRY_SECONDS[1], seconds)),
                )
            self._waiting.setdefault(request.tenant, deque()).append(stream)
            self._changed.notify()
        return stream

    def close(self, grace: float) -> None:
        """Accept no more requests, finish the others, and end those that are not done after `grace` seconds with the
        finish reason "shutdown". Returns when the thread has ended and the engine is free."""
        with self._changed:
            end = time.monotonic() + grace
            self._close_at = end if self._close_at is None else min(end, self._close_at)
            self._changed.notify()
        self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether the worker generates: False after an unexpected error and after it was closed."""
        return self._thread.is_alive() and self._error is None

    @property
    def stats(self) -> Stats:
        """What the worker does now, and what it has done so far."""
        batch = self._batch
        with self._changed:
            waiting = self._count_waiting()
        running, slots = len(self._running), len(batch.slots)
        return Stats(running, waiting, slots, batch.steps, batch.read_tokens, batch.generated_tokens)

    def cancel(self, stream: Stream) -> None:
        """See `Stream.cancel`. Any thread may call it."""
        with self._changed:
            is_waiting = self._remove_waiting(stream)
            if stream.generation in self._running:
                self._cancelled.add(stream)
        if is_waiting:
            self._hand_over([(stream, End("cancelled"))])

    def _check(self, request: Request) -> None:
        tokens, start, limit = request.tokens, request.start, request.max_new_tokens
        last_id = self._batch.sampler.vocab_size - 1
        if not len(tokens) and (start is None or start.logits is None):
            without = "without a " if start is None else "after a state without logits: "
            raise ConfigError(Argument("tokens"), f" must have at least one token {without}", Argument("start"))
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) <= last_id:
            raise ConfigError(Argument("tokens"), f" must be from 0 to {last_id}")
        for name, value in (("max_new_tokens", limit), ("top_logprobs", request.top_logprobs or 0)):
            if value < 0:
                raise ConfigError(Argument(name), f" must be at least 0, found {value}")
        first_border = 1 if start is None or start.logits is None else 0
        if any(not first_border <= border <= len(tokens) for border in request.borders):
            raise ConfigError(
                Argument("borders"), f" must be from {first_border} to {len(tokens)}, found {request.borders}"
            )
        state = None if start is None else start.state
        if state is not None and state.batch_size != 1:
            raise ConfigError(Argument("start"), f" must be the state of one sequence, found {state.batch_size}")
        # The last token is fed to the model only for the snapshot after it.
        fed = limit if request.final_snapshot else max(0, limit - 1)
        self.engine.check_length(state, len(tokens) + fed, Argument("tokens"))

    # the queue; the caller holds the lock

    def _count_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _share(self, tenant: str) -> int:
        """How many requests of a tenant may wait in a full queue: one tenant cannot keep the others out."""
        return math.ceil(self.queue_limit / len({*self._waiting, tenant}))

    def _next_waiting(self) -> Stream:
        """Take the first request of the tenant whose turn it is."""
        tenant, streams = next(iter(self._waiting.items()))
        stream = streams[0]
        self._remove_waiting(stream)
        if streams:
            self._waiting.move_to_end(tenant)
        return stream

    def _remove_waiting(self, stream: Stream) -> bool:
        """Whether the stream was waiting."""
        streams = self._waiting.get(stream.request.tenant, deque())
        if stream not in streams:
            return False
        streams.remove(stream)
        if not streams:
            del self._waiting[stream.request.tenant]
        return True

    # the thread

    def _run(self) -> None:
        try:
            with self._owning:
                while self._wait_for_work():
                    self._end_running()
                    self._start_waiting()
                    self._step()
        except Exception as error:
            logger.exception("the worker stopped after an unexpected error")
            self._stop(error)

    def _wait_for_work(self) -> bool:
        """False: the worker is closed, and nothing is left to do."""
        with self._changed:
            while not (self._running or self._waiting):
                if self._close_at is not None:
                    return False
                self._changed.wait()
        return True

    def _end_running(self) -> None:
        """Free the slots of requests that were cancelled, or whose time is over."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
        now = time.monotonic()
        for generation, stream in list(self._running.items()):
            reason = self._reason_to_end(stream, now)
            if stream in cancelled:
                self._batch.remove(generation)
                self._send([(stream, End("cancelled"))])
            elif reason is not None:
                self._batch.finish(generation, reason)

    def _reason_to_end(self, stream: Stream, now: float) -> FinishReason | None:
        deadline = stream.request.deadline
        if deadline is not None and now >= deadline:
            return "deadline"
        return "shutdown" if self._close_at is not None and now >= self._close_at else None

    def _start_waiting(self) -> None:
        """Move requests from the queue to free slots."""
        now, ends = time.monotonic(), list[tuple[Stream, Event]]()
        with self._changed:
            for stream in [stream for streams in self._waiting.values() for stream in streams]:
                reason = self._reason_to_end(stream, now)
                if reason is not None:
                    self._remove_waiting(stream)
                    ends.append((stream, End(reason)))
            started = [self._next_waiting() for _ in range(min(self._batch.free, self._count_waiting()))]
            self._running |= {stream.generation: stream for stream in started}
        for stream in started:
            stream.started_at = now
            try:
                stream.restore_start()
                self._batch.add(stream.generation)
            except Exception as error:
                ends.append((stream, End("error", error=error)))
        self._send(ends)

    def _step(self) -> None:
        self._send([(self._running[generation], event) for generation, event in self._batch.step()])

    def _send(self, events: Sequence[tuple[Stream, Event]]) -> None:
        """Hand over events, and those before them. Only tokens wait for others, and not the first one of a stream."""
        self._held += events
        now, urgent = time.monotonic(), False
        for stream, event in events:
            urgent = urgent or not isinstance(event, Token) or len(stream.generation.new_tokens) == 1
            if isinstance(event, End) and self._running.pop(stream.generation, None) is not None:
                self._mean_seconds += MEAN_UPDATE * (now - stream.started_at - self._mean_seconds)
        if urgent or now >= self._hand_over_at:
            held, self._held = self._held, []
            self._hand_over_at = now + max(TOGETHER_SECONDS, TOGETHER_SECONDS_PER_STREAM * len(self._running))
            self._hand_over(held)

    def _hand_over(self, events: Sequence[tuple[Stream, Event]]) -> None:
        """Give events to the event loops of their streams, with one call for each loop."""
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple[Stream, Event]]](list)
        for stream, event in events:
            by_loop[stream.loop].append((stream, event))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_receive, items)
            except RuntimeError:  # the loop is closed: nobody will read the rest
                for stream, _ in items:
                    self.cancel(stream)

    def _stop(self, error: Exception) -> None:
        """End everything after an error that is not of one request."""
        with self._changed:
            self._error = error
            streams = [*self._running.values(), *(stream for streams in self._waiting.values() for stream in streams)]
            self._waiting.clear()
        self._send([(stream, End("error", error=error)) for stream in streams])


def _receive(events: Sequence[tuple[Stream, Event]]) -> None:
    """Called in an event loop: store events in their streams."""
    for stream, event in events:
        stream.put(event)
