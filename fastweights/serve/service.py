"""What the endpoints have in common: prompts are looked up among the stored prefixes, sent to the worker, and their
tokens become pieces of text.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from fastweights.decode.batch import GenerationError
from fastweights.decode.engine import Engine, end_of_text
from fastweights.decode.sampling import Sampling
from fastweights.decode.text_decoder import REPLACEMENT, StopTexts, TextDecoder
from fastweights.modeling.positions import position_limit
from fastweights.serve.errors import INTERNAL, ApiError, busy, shutting_down
from fastweights.serve.http import ClientGone
from fastweights.serve.metrics import Metrics
from fastweights.serve.prompts import NEAR, Prompt, Prompts
from fastweights.serve.schemas import Generation, TokenLogprob, TopLogprob
from fastweights.serve.snapshot import Snapshot
from fastweights.serve.store import Store
from fastweights.serve.worker import Border, End, QueueFull, Request, ShuttingDown, Stream, Token, Worker
from fastweights.utils.errors import FastWeightsError

logger = logging.getLogger("fastweights.serve")
T = TypeVar("T")
# A model may write faster than the server sends: after so many tokens, others get a turn of the event loop.
TOKENS_IN_A_ROW = 16
# A lower temperature is taken as 0.
LEAST_TEMPERATURE = 1e-6
# JSON has no infinity. OpenAI's API writes this for tokens that cannot be chosen.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Settings:
    """What a server allows.

    Args:
        name: The model's name.
        max_tokens: Tokens of an answer at most, and by default in chats and responses.
        max_prompt_tokens: Tokens of a request's prompt.
        max_body_bytes: Bytes of a request.
        timeout: Seconds after which an answer ends.
        log_prompts: Whether prompts and answers are logged.
    """

    name: str
    max_tokens: int = 1024
    max_prompt_tokens: int = 131_072
    max_body_bytes: int = 4 * 2**20
    timeout: float = 600.0
    log_prompts: bool = False


class Wanted(NamedTuple):
    """What a request wants to follow its prompts."""

    samplings: list[Sampling]
    """One for each answer to a prompt."""
    max_new_tokens: int | None
    stops: list[str]
    top_logprobs: int | None
    chat: bool
    """Whether an answer ends as the chat template ends one."""


class Piece(NamedTuple):
    """What a token adds to an answer."""

    text: str
    logprobs: list[TokenLogprob]


class Choice:
    """One answer as it is generated.

    Args:
        tokenizer: The model's tokenizer.
        stops: Texts that end it and are not part of it.
        trimmed: Whether white space before the first word is left out.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], trimmed: bool) -> None:
        self.tokens: list[int] = []
        self.text = ""  # as generated, before the white space is left out
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: Literal["stop", "length"] = "stop"
        self.snapshot: Snapshot | None = None
        self._decoder, self._stops, self._trimmed = TextDecoder(tokenizer), StopTexts(stops), trimmed
        self._length = 0  # of the text with what is held back
        self._waiting: list[tuple[int, TokenLogprob]] = []  # where the text of a token begins

    @property
    def cut(self) -> bool:
        """Whether a stop text was found."""
        return self._stops.found

    @property
    def shown(self) -> str:
        """The text of the answer."""
        return self.text.lstrip() if self._trimmed else self.text

    def add(self, token: int, logprob: TokenLogprob | None) -> Piece:
        """Add a token; return what can be shown."""
        piece = self._decoder.add(token)
        if logprob is not None:
            self._waiting.append((self._length, logprob))
        self._length += len(piece)
        return self._show(self._stops.add(piece))

    def end(self) -> Piece:
        """Return the rest of an answer that no stop text ended."""
        rest = "" if self.cut else self._stops.add(self._decoder.end())
        return self._show(rest if self.cut else rest + self._stops.end(), all_tokens=not self.cut)

    def _show(self, text: str, all_tokens: bool = False) -> Piece:
        begins = self._trimmed and not self.text.strip()
        self.text += text
        shown = [logprob for start, logprob in self._waiting if all_tokens or start < len(self.text)]
        self._waiting = self._waiting[len(shown) :]
        self.logprobs += shown
        return Piece(text.lstrip() if begins else text, shown)


class Service:
    """A model that answers requests.

    Args:
        engine: The engine, with a tokenizer.
        worker: The thread that owns it.
        store: Stored responses and prefixes.
        settings: What is allowed.
    """

    def __init__(self, engine: Engine, worker: Worker, store: Store, settings: Settings) -> None:
        self.model, self.tokenizer, self.slots = engine.model, engine.tokenizer, worker.stats.slots
        self.worker, self.store, self.settings = worker, store, settings
        self.metrics = Metrics(worker)
        self.created = int(time.time())
        self.vocabulary = self.model.config.get_text_config().vocab_size
        self.prompts = Prompts(self.tokenizer, self.vocabulary)
        limits = [limit for limit in (engine.max_length, position_limit(self.model)) if limit is not None]
        self.max_length = min(limits, default=None)
        self._text_ends = frozenset(end_of_text(self.model))
        self._turn_ends = self._text_ends | self.prompts.format.end_tokens
        # Long texts take long to tokenize: the event loop goes on meanwhile. One thread, as tokenizers change settings.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")

    async def tokenize(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function of `prompts` in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *arguments)

    async def close(self) -> None:
        """Close the store. The worker is closed by whoever started it."""
        self._tokenizing.shutdown()
        await self.store.close()

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        if name is not None and name != self.settings.name:
            message = f"no model {name[:80]!r} here: this server has {self.settings.name!r}"
            raise ApiError(message, 404, "model", "model_not_found")

    def wanted(
        self, request: Generation, n: int, max_new_tokens: int | None, top_logprobs: int | None, chat: bool
    ) -> Wanted:
        """What a request wants."""
        end = self.prompts.format.end_text if chat else None
        stops = request.stops + ([] if end is None else [end])
        return Wanted([_sampling(request, i) for i in range(n)], max_new_tokens, stops, top_logprobs, chat)

    async def start(
        self, prompt: Prompt, wanted: Wanted, tenant: str, param: str, after: Snapshot | None = None
    ) -> Run:
        """Begin to answer a prompt.

        Args:
            prompt: The prompt.
            wanted: What is to follow it.
            tenant: Whose request it is.
            param: The request's field that the prompt comes from, for errors.
            after: The place that the prompt continues from. None: it begins a text, and stored prefixes are used.

        Raises:
            ApiError: The prompt is too long, the queue is full, or the server is shutting down.
        """
        before = 0 if after is None else int(after.state.seen)
        limit = self._new_tokens(before + len(prompt.tokens), len(prompt.tokens), wanted.max_new_tokens, param)
        found = None if after is not None else await self.store.longest_prefix(tenant, prompt.tokens)
        cached, start = (0, after) if found is None else found
        if self.settings.log_prompts:
            logger.info("prompt: %r", self.tokenizer.decode(prompt.tokens))
        run = Run(self, prompt, wanted, tenant, start, cached, limit, begins_text=after is None)
        run.submit()
        self.metrics.prompt_tokens.inc(run.prompt_tokens - run.cached_tokens)
        self.metrics.cached_tokens.inc(run.cached_tokens)
        return run

    def _new_tokens(self, length: int, new: int, wanted: int | None, param: str) -> int:
        """The number of tokens that an answer may have after a prompt."""
        if new > self.settings.max_prompt_tokens:
            message = f"{param} has {new:,} tokens, and at most {self.settings.max_prompt_tokens:,} are allowed"
            raise ApiError(message, 400, param, "context_length_exceeded")
        limits = [self.settings.max_tokens] + ([] if wanted is None else [wanted])
        if self.max_length is not None:
            if length > self.max_length:
                message = f"with {param} the text has {length:,} tokens, and this model can have {self.max_length:,}"
                raise ApiError(message, 400, param, "context_length_exceeded")
            limits.append(self.max_length - length)
        return min(limits)

    def stop_tokens(self, chat: bool) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._turn_ends if chat else self._text_ends

    async def read(self, snapshot: Snapshot, tokens: Sequence[int], tenant: str) -> Snapshot:
        """The place after further tokens.

        Raises:
            ApiError: The queue is full, or the server is shutting down.
        """
        if not tokens:
            return snapshot
        run = Run(self, Prompt(list(tokens)), Wanted([Sampling()], 0, [], None, False), tenant, snapshot, 0, 0)
        run.submit()
        async for _ in run.pieces():
            pass
        read = run.choices[0].snapshot
        assert read is not None  # it was asked for
        return read

    @functools.lru_cache(maxsize=65_536)  # noqa: B019  (one service a process)
    def token_text(self, token: int) -> tuple[str, list[int]]:
        """The text and the bytes of one token."""
        text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text, list(token_bytes(self.tokenizer, token, text))

    def token_logprob(self, token: Token) -> TokenLogprob:
        """The log-probabilities of a token and of the likeliest ones in its place."""
        top = [self._top(id, logprob) for id, logprob in token.top or ()]
        chosen = self._top(token.id, LEAST_LOGPROB if token.logprob is None else token.logprob)
        return TokenLogprob(**chosen.model_dump(), top_logprobs=top)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text, content = self.token_text(token)
        return TopLogprob(token=text, logprob=max(logprob, LEAST_LOGPROB), bytes=content)


def token_bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """The bytes of a token with this text. Those of a part of a character are only in its name in the vocabulary."""
    name = tokenizer.convert_ids_to_tokens(token)
    if REPLACEMENT not in text or name is None:
        return text.encode()
    if name.startswith("<0x") and name.endswith(">"):  # as SentencePiece writes a byte
        return bytes([int(name[3:-1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[c] for c in name) if all(c in alphabet for c in name) else text.encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _sampling(request: Generation, choice: int) -> Sampling:
    """How the tokens of a choice are sampled. As in the engine, choice i has seed + i."""
    temperature = 1.0 if request.temperature is None else request.temperature
    if temperature < LEAST_TEMPERATURE:
        return Sampling()
    seed = None if request.seed is None else (request.seed + choice) % 2**63
    top_k = request.top_k if request.top_k is not None and request.top_k > 0 else None
    return Sampling(temperature, top_k=top_k, top_p=1.0 if request.top_p is None else request.top_p, seed=seed)


class Run:
    """The answers to one prompt. The prompt is read once, by the first of them.

    Attributes:
        choices: The answers.
        prompt_tokens: Tokens before the answers.
        cached_tokens: Those of them that were not read.
    """

    def __init__(
        self,
        service: Service,
        prompt: Prompt,
        wanted: Wanted,
        tenant: str,
        start: Snapshot | None,
        cached: int,
        max_new_tokens: int,
        begins_text: bool = False,
    ) -> None:
        self.service, self.prompt, self.wanted, self.tenant = service, prompt, wanted, tenant
        self.max_new_tokens, self._begins_text = max_new_tokens, begins_text
        self.cached_tokens = 0 if start is None else int(start.state.seen)
        self.prompt_tokens = self.cached_tokens + len(prompt.tokens) - cached
        self.started = time.monotonic()
        self.deadline = self.started + service.settings.timeout
        trimmed = wanted.chat and service.prompts.format.plain
        self.choices = [Choice(service.tokenizer, wanted.stops, trimmed) for _ in wanted.samplings]
        self._start, self._cached = start, cached
        self._first: Stream | None = None
        self._prompt_read: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._writing: list[asyncio.Task[None]] = []

    def submit(self) -> None:
        """Ask the worker for the first answer.

        Raises:
            ApiError: The queue is full, or the server is shutting down.
        """
        tokens = self.prompt.tokens[self._cached :]
        # A place just after the one that was found is not worth its memory, but the one before the answer is needed.
        near = self._cached and NEAR
        borders = [b - self._cached for b in self.prompt.borders if b - self._cached >= near and b > self._cached]
        if tokens:
            borders = sorted({*borders, len(tokens)})
        elif self._start is not None:
            self._prompt_read.set_result(self._start)
        try:
            self._first = self.service.worker.submit(self._request(0, tokens, self._start, tuple(borders)))
        except QueueFull as error:
            raise busy(error.retry_after) from error
        except ShuttingDown as error:
            raise shutting_down() from error
        except FastWeightsError as error:
            raise ApiError(str(error)) from error

    @property
    def prompt_snapshot(self) -> Snapshot | None:
        """The place before the answers, as soon as the prompt is read."""
        return self._prompt_read.result() if self._prompt_read.done() and not self._prompt_read.cancelled() else None

    def _request(
        self, choice: int, tokens: Sequence[int], start: Snapshot | None, borders: tuple[int, ...] = ()
    ) -> Request:
        return Request(
            tokens=tokens,
            start=start,
            max_new_tokens=self.max_new_tokens,
            sampling=self.wanted.samplings[choice],
            stop_tokens=self.service.stop_tokens(self.wanted.chat),
            top_logprobs=self.wanted.top_logprobs,
            borders=borders,
            tenant=self.tenant,
            deadline=self.deadline,
            final_snapshot=len(self.choices) == 1,
        )

    async def pieces(self) -> AsyncGenerator[tuple[int, list[Piece]]]:
        """The pieces of all answers as they are generated, each time one or more of the answer with this number."""
        async with aclosing(merged([self._pieces(i) for i in range(len(self.choices))])) as items:
            async for item in items:
                yield item
        if self._writing:
            await asyncio.gather(*self._writing)

    async def _pieces(self, index: int) -> AsyncGenerator[list[Piece]]:
        pieces = list[Piece]()
        choice, ends = self.choices[index], self.service.stop_tokens(self.wanted.chat)
        stream = self._first if index == 0 else await self._submit_next(index)
        assert stream is not None  # submit() was called
        try:
            async for event in stream:
                if isinstance(event, Border):
                    self._reached(self._cached + event.count, event.snapshot)
                elif isinstance(event, End):
                    if pieces:
                        yield pieces
                    pieces = []
                    self._ended(choice, event)
                else:
                    self._count(choice, event.id)
                    if len(choice.tokens) % TOKENS_IN_A_ROW == 0:
                        await asyncio.sleep(0)
                    if event.id not in ends:
                        wants_logprob = self.wanted.top_logprobs is not None
                        piece = choice.add(event.id, self.service.token_logprob(event) if wants_logprob else None)
                        if piece.text or piece.logprobs:
                            pieces.append(piece)
                if pieces and not stream.has_events:
                    yield pieces
                    pieces = []
                if choice.cut:
                    break
        finally:
            stream.cancel()
            if index == 0 and not self._prompt_read.done():
                self._prompt_read.cancel()
        yield [*pieces, choice.end()]
        if self.service.settings.log_prompts:
            logger.info("answer: %r", choice.text)

    async def _submit_next(self, index: int) -> Stream:
        """Ask the worker for a further answer. The request was accepted: now it waits for its place in the queue."""
        snapshot = await asyncio.shield(self._prompt_read)
        while True:
            try:
                return self.service.worker.submit(self._request(index, (), snapshot))
            except QueueFull as error:
                if time.monotonic() > self.deadline:
                    raise busy(error.retry_after) from error
                await asyncio.sleep(min(error.retry_after, 0.1))
            except ShuttingDown as error:
                raise shutting_down() from error

    def _reached(self, count: int, snapshot: Snapshot) -> None:
        if count == len(self.prompt.tokens) and not self._prompt_read.done():
            self._prompt_read.set_result(snapshot)
        if count in self.prompt.borders:
            self._store_prefix(self.prompt.tokens[:count], snapshot)

    def _store_prefix(self, tokens: list[int], snapshot: Snapshot) -> None:
        if self._begins_text:
            self._writing.append(asyncio.create_task(self.service.store.put_prefix(self.tenant, tokens, snapshot)))

    def _count(self, choice: Choice, token: int) -> None:
        if not choice.tokens:
            self.service.metrics.first_token_seconds.observe(time.monotonic() - self.started)
        choice.tokens.append(token)
        self.service.metrics.generated_tokens.inc()

    def _ended(self, choice: Choice, end: End) -> None:
        choice.finish_reason, choice.snapshot = "stop" if end.finish_reason == "stop" else "length", end.snapshot
        if end.finish_reason == "error":
            logger.error("a request failed: %s", end.error)
            if isinstance(end.error, GenerationError) and not self._begins_text:
                # A state of the server's own was good to continue from. One from a file can hold any numbers.
                message = "the numbers of this state overflow in the model: begin a new conversation"
                raise ApiError(message, 400, "previous_response_id", "invalid_state")
            raise ApiError(INTERNAL, 500)
        if end.finish_reason == "cancelled":
            raise ClientGone
        if end.finish_reason in ("deadline", "shutdown") and not choice.tokens:
            if end.finish_reason == "shutdown":
                raise shutting_down()
            raise ApiError(f"no answer in {self.service.settings.timeout:g} s", 408, code="timeout")
        if choice.snapshot is not None:
            self._store_prefix(self.prompt.tokens + choice.tokens, choice.snapshot)

    def close(self) -> None:
        """Stop generating. Does nothing after the end."""
        if self._first is not None:
            self._first.cancel()


async def merged(generators: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of several generators as they come, each with the number of its generator."""
    if len(generators) == 1:
        async with aclosing(generators[0]) as generator:
            async for only in generator:
                yield 0, only
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=len(generators))

    async def pump(index: int, generator: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(generator):
                async for item in generator:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(i, generator)) for i, generator in enumerate(generators)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
