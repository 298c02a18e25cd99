"""POST /v1/completions and /v1/chat/completions: the whole text comes with each request."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from fastweights.serve.errors import ApiError, in_stream
from fastweights.serve.http import ClientGone, event
from fastweights.serve.prompts import Prompt
from fastweights.serve.schemas import (
    MAX_CHOICES,
    CachedTokens,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    TokenLogprob,
    Usage,
)
from fastweights.serve.service import Choice, Piece, Run, Service, Wanted, merged

DONE = event("[DONE]")


class _Reply(ABC):
    """The reply to a request with one or more prompts, each with one or more answers."""

    prefix: str
    object: str
    chunk_object: str
    prompt_field: str

    def __init__(self, service: Service, request: CompletionRequest | ChatRequest, tenant: str) -> None:
        service.check_model(request.model)
        self.service, self.request, self.tenant, self.n = service, request, tenant, request.n or 1
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(16)}", int(time.time())
        self.runs: list[Run] = []

    @property
    @abstractmethod
    def wanted(self) -> Wanted:
        """What the request wants."""

    @abstractmethod
    async def prompts(self) -> list[Prompt]:
        """The prompts of the request."""

    async def start(self) -> None:
        """Begin to answer.

        Raises:
            ApiError: The request cannot be answered.
        """
        prompts, wanted = await self.prompts(), self.wanted
        if len(prompts) * self.n > MAX_CHOICES:
            message = f"{len(prompts)} prompts with n = {self.n} are {len(prompts) * self.n} answers"
            raise ApiError(f"{message}: at most {MAX_CHOICES} are allowed", 400, "n", "invalid_value")
        try:
            for prompt in prompts:
                self.runs.append(await self.service.start(prompt, wanted, self.tenant, self.prompt_field))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop generating."""
        for run in self.runs:
            run.close()

    async def complete(self) -> dict[str, Any]:
        """The whole reply."""
        async with aclosing(self._pieces()) as pieces:
            async for _ in pieces:
                pass
        choices = [self.choice(i, choice) for i, choice in enumerate(self._choices())]
        return {
            **self._head(self.object),
            "choices": [choice.model_dump() for choice in choices],
            "usage": self.usage().model_dump(),
        }

    async def events(self) -> AsyncGenerator[str]:
        """The reply as server-sent events, those that come at the same time as one text."""
        options = self.request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = self._head(self.chunk_object) | ({"usage": None} if with_usage else {})
        offsets = [0] * len(self._choices())
        try:
            for index in range(len(offsets)):
                for first in self.first_chunk(index):
                    yield event(head | {"choices": [first]})
            async with aclosing(self._pieces()) as pieces:
                async for index, together in pieces:
                    chunks = []
                    for piece in together:
                        if piece.text or piece.logprobs:
                            chunks.append(event(head | {"choices": [self.chunk(index, piece, offsets[index])]}))
                        offsets[index] += len(piece.text)
                    yield "".join(chunks)
            for index, choice in enumerate(self._choices()):
                yield event(head | {"choices": [self.last_chunk(index, choice)]})
            if with_usage:
                yield event(head | {"choices": [], "usage": self.usage().model_dump()})
            yield DONE
        except ClientGone:
            raise
        except Exception as error:
            yield event(in_stream(error).body())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.settings.name}

    def _choices(self) -> list[Choice]:
        return [choice for run in self.runs for choice in run.choices]

    async def _pieces(self) -> AsyncGenerator[tuple[int, list[Piece]]]:
        async with aclosing(merged([run.pieces() for run in self.runs])) as items:
            async for prompt, (index, pieces) in items:
                yield prompt * self.n + index, pieces

    def usage(self) -> Usage:
        """The tokens of all prompts and answers."""
        prompt = sum(run.prompt_tokens for run in self.runs)
        completion = sum(len(choice.tokens) for choice in self._choices())
        cached = CachedTokens(cached_tokens=sum(run.cached_tokens for run in self.runs))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=cached,
        )

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> BaseModel:
        """A whole answer."""

    def first_chunk(self, index: int) -> list[dict[str, Any]]:
        """What a stream writes before the text of an answer."""
        return []

    @abstractmethod
    def chunk(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        """A piece of an answer that begins at a character."""

    @abstractmethod
    def last_chunk(self, index: int, choice: Choice) -> dict[str, Any]:
        """The end of an answer."""


class CompletionReply(_Reply):
    """The reply of POST /v1/completions."""

    prefix, object, chunk_object, prompt_field = "cmpl", "text_completion", "text_completion", "prompt"
    request: CompletionRequest

    @property
    def wanted(self) -> Wanted:
        """What the request wants."""
        request = self.request
        return self.service.wanted(request, self.n, request.max_tokens, request.logprobs, chat=False)

    async def prompts(self) -> list[Prompt]:
        """The prompts of the request."""
        return await self.service.tokenize(self.service.prompts.completion, self.request)

    def choice(self, index: int, choice: Choice) -> CompletionChoice:
        """A whole answer."""
        logprobs = self._logprobs(choice.logprobs, 0)
        return CompletionChoice(index=index, text=choice.shown, finish_reason=choice.finish_reason, logprobs=logprobs)

    def chunk(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        """A piece of an answer that begins at a character."""
        logprobs = self._logprobs(piece.logprobs, offset)
        shown = None if logprobs is None else logprobs.model_dump()
        return {"index": index, "text": piece.text, "finish_reason": None, "logprobs": shown}

    def last_chunk(self, index: int, choice: Choice) -> dict[str, Any]:
        """The end of an answer."""
        return {"index": index, "text": "", "finish_reason": choice.finish_reason, "logprobs": None}

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.token)
        return CompletionLogprobs(
            tokens=[token.token for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=[{top.token: top.logprob for top in token.top_logprobs} for token in tokens],
            text_offset=offsets,
        )


class ChatReply(_Reply):
    """The reply of POST /v1/chat/completions."""

    prefix, object, chunk_object, prompt_field = "chatcmpl", "chat.completion", "chat.completion.chunk", "messages"
    request: ChatRequest

    def __init__(self, service: Service, request: ChatRequest, tenant: str) -> None:
        super().__init__(service, request, tenant)
        if request.top_logprobs and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", 400, "top_logprobs", "invalid_value")

    @property
    def wanted(self) -> Wanted:
        """What the request wants."""
        request = self.request
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        top_logprobs = request.top_logprobs or 0 if request.logprobs else None
        return self.service.wanted(request, self.n, limit, top_logprobs, chat=True)

    async def prompts(self) -> list[Prompt]:
        """The prompts of the request."""
        return [await self.service.tokenize(self.service.prompts.chat, self.request.messages)]

    def choice(self, index: int, choice: Choice) -> ChatChoice:
        """A whole answer."""
        logprobs = self._logprobs(choice.logprobs)
        message = ChatMessage(content=choice.shown)
        return ChatChoice(index=index, message=message, finish_reason=choice.finish_reason, logprobs=logprobs)

    def first_chunk(self, index: int) -> list[dict[str, Any]]:
        """What a stream writes before the text of an answer."""
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def chunk(self, index: int, piece: Piece, offset: int) -> dict[str, Any]:
        """A piece of an answer that begins at a character."""
        return self._chunk(index, {"content": piece.text}, piece.logprobs)

    def last_chunk(self, index: int, choice: Choice) -> dict[str, Any]:
        """The end of an answer."""
        return self._chunk(index, {}) | {"finish_reason": choice.finish_reason}

    def _chunk(self, index: int, delta: dict[str, str], tokens: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        shown = None if logprobs is None else logprobs.model_dump()
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": shown}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return ChatLogprobs(content=list(tokens)) if self.request.logprobs else None
