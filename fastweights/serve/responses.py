"""POST /v1/responses: conversations that the server keeps. A stored response is a state; whoever names its id goes on
from there, and only the new messages are read. Two requests that name the same id are a fork.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Literal, NamedTuple

from fastweights.modeling.state_file import StateError
from fastweights.serve.errors import ApiError, in_stream, not_found
from fastweights.serve.http import ClientGone, event
from fastweights.serve.prompts import Prompt
from fastweights.serve.schemas import (
    IncompleteDetails,
    InputDetails,
    InputMessage,
    Message,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
    StateReply,
)
from fastweights.serve.service import Choice, Piece, Run, Service
from fastweights.serve.snapshot import Snapshot, from_bytes, to_bytes
from fastweights.serve.store import StoreError

logger = logging.getLogger("fastweights.serve")
_ID = re.compile(r"resp_[0-9a-f]{32}")
WITH_LOGPROBS = "message.output_text.logprobs"


class Stored(NamedTuple):
    """A stored response.

    Args:
        response: The response as the client saw it.
        unread: Tokens that belong to the conversation after the snapshot: they are read with the next message.
        snapshot: The place from which it continues.
    """

    response: dict[str, Any]
    unread: list[int]
    snapshot: Snapshot


@contextmanager
def _store_errors() -> Iterator[None]:
    """A store that cannot be read or written is nothing that a client can change."""
    try:
        yield
    except StoreError as error:
        logger.error("the store failed: %s", error)
        message = "the store of conversations failed; the server's log has the reason"
        raise ApiError(message, 503, code="store_failed") from error


def new_id() -> str:
    """An id that nobody can guess."""
    return f"resp_{secrets.token_hex(16)}"


async def find(service: Service, tenant: str, id: str, param: str | None = None) -> Stored:
    """A stored response.

    Raises:
        ApiError: 404, there is none with this id for this tenant.
    """
    with _store_errors():
        found = await service.store.get_response(tenant, id) if _ID.fullmatch(id) else None
    if found is None:
        raise not_found(id, param)
    record, snapshot = found
    return Stored(record["response"], record["unread"], snapshot)


async def retrieve(service: Service, tenant: str, id: str) -> dict[str, Any]:
    """The response with this id, as the client saw it."""
    with _store_errors():
        record = await service.store.get_record(tenant, id) if _ID.fullmatch(id) else None
    if record is None:
        raise not_found(id)
    return record["response"]


async def delete(service: Service, tenant: str, id: str) -> None:
    """Delete a stored response."""
    with _store_errors():
        if not _ID.fullmatch(id) or not await service.store.delete_response(tenant, id):
            raise not_found(id)


async def export_state(service: Service, tenant: str, id: str) -> bytes:
    """The state file of a stored response, after everything that was said in it."""
    stored = await find(service, tenant, id)
    snapshot = await service.read(stored.snapshot, stored.unread, tenant)
    return await asyncio.to_thread(to_bytes, snapshot, service.model)


async def import_state(service: Service, tenant: str, data: bytes) -> StateReply:
    """Store a state file as a response that can be continued.

    Raises:
        ApiError: 400, the file is damaged or of another model.
    """
    try:
        snapshot = await asyncio.to_thread(from_bytes, data, service.model, "the body")
    except StateError as error:
        raise ApiError(str(error), 400, code="invalid_state") from error
    id = new_id()
    response = ResponseObject(
        id=id, created_at=int(time.time()), status="completed", model=service.settings.name, output=[], store=True
    )
    with _store_errors():
        await service.store.put_response(tenant, id, {"response": response.model_dump(), "unread": []}, snapshot)
    return StateReply(id=id, tokens=int(snapshot.state.seen))


class ResponseReply:
    """The reply to one request."""

    def __init__(self, service: Service, request: ResponseRequest, tenant: str) -> None:
        service.check_model(request.model)
        self.service, self.request, self.tenant = service, request, tenant
        self.stores = request.store is not False
        self.logprobs = WITH_LOGPROBS in (request.include or ())
        if request.top_logprobs and not self.logprobs:
            raise ApiError(f"top_logprobs needs include: [{WITH_LOGPROBS!r}]", 400, "top_logprobs", "invalid_value")
        self.response = ResponseObject(
            id=new_id(),
            created_at=int(time.time()),
            status="in_progress",
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=service.settings.name,
            output=[],
            previous_response_id=request.previous_response_id,
            store=self.stores,
            temperature=request.temperature,
            top_p=request.top_p,
        )
        self.message_id = f"msg_{secrets.token_hex(16)}"
        self.run: Run | None = None
        self._sent = 0

    async def start(self) -> None:
        """Begin to answer.

        Raises:
            ApiError: The request cannot be answered.
        """
        request, prompts = self.request, self.service.prompts
        top_logprobs = request.top_logprobs or 0 if self.logprobs else None
        wanted = self.service.wanted(request, 1, request.max_output_tokens, top_logprobs, chat=True)
        messages: list[Message] = (
            [InputMessage(role="user", content=request.input)] if isinstance(request.input, str) else [*request.input]
        )
        instructions = [] if request.instructions is None else [Message(role="system", content=request.instructions)]
        if request.previous_response_id is None:
            prompt = await self.service.tokenize(prompts.chat, [*instructions, *messages], "input")
            self.run = await self.service.start(prompt, wanted, self.tenant, "input")
            return
        stored = await find(self.service, self.tenant, request.previous_response_id, "previous_response_id")
        if request.instructions == stored.response["instructions"]:
            instructions = []  # they are in the state already; clients repeat them with every request
        new = await self.service.tokenize(prompts.next_turn, [*instructions, *messages])
        if instructions and new == await self.service.tokenize(prompts.next_turn, messages):
            message = "the chat template leaves out instructions after the first message: give them with that one"
            raise ApiError(message, 400, "instructions", "unsupported")
        prompt = Prompt(stored.unread + new)
        self.run = await self.service.start(prompt, wanted, self.tenant, "input", stored.snapshot)

    async def complete(self) -> dict[str, Any]:
        """The whole reply. It is stored before it is returned."""
        async with aclosing(self._pieces()) as pieces:
            async for _ in pieces:
                pass
        return await self._finish()

    async def events(self) -> AsyncGenerator[str]:
        """The reply as server-sent events, those that come at the same time as one text. It is stored before the last
        of them."""
        place = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        try:
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self.response.model_dump())
            item = OutputMessage(id=self.message_id, status="in_progress", content=[])
            yield self._event("response.output_item.added", output_index=0, item=item.model_dump())
            yield self._event("response.content_part.added", **place, part=empty)
            async with aclosing(self._pieces()) as pieces:
                async for together in pieces:
                    yield "".join(self._delta(piece, place) for piece in together if piece.text or piece.logprobs)
            response = await self._finish()
            item = response["output"][0]
            part = item["content"][0]
            yield self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            yield self._event("response.content_part.done", **place, part=part)
            yield self._event("response.output_item.done", output_index=0, item=item)
            yield self._event("response.completed", response=response)
        except ClientGone:
            raise
        except Exception as error:
            self.response.status = "failed"
            self.response.error = {"code": "server_error", "message": str(in_stream(error))}
            yield self._event("response.failed", response=self.response.model_dump())

    def close(self) -> None:
        """Stop generating."""
        if self.run is not None:
            self.run.close()

    def _event(self, name: str, **fields: Any) -> str:
        text = event({"type": name, "sequence_number": self._sent, **fields}, name)
        self._sent += 1
        return text

    def _delta(self, piece: Piece, place: dict[str, Any]) -> str:
        logprobs = [logprob.model_dump() for logprob in piece.logprobs]
        return self._event("response.output_text.delta", **place, delta=piece.text, logprobs=logprobs)

    async def _pieces(self) -> AsyncGenerator[list[Piece]]:
        assert self.run is not None  # start() was called
        async with aclosing(self.run.pieces()) as items:
            async for _, pieces in items:
                yield pieces

    async def _finish(self) -> dict[str, Any]:
        """Fill in the response, and store it with its state."""
        assert self.run is not None
        (choice,) = self.run.choices
        complete = choice.finish_reason == "stop"
        status: Literal["completed", "incomplete"] = "completed" if complete else "incomplete"
        self.response.status = status
        self.response.incomplete_details = None if complete else IncompleteDetails()
        text = OutputText(text=choice.shown, logprobs=choice.logprobs)
        self.response.output = [OutputMessage(id=self.message_id, status=status, content=[text])]
        self.response.usage = self._usage(self.run, choice)
        response = self.response.model_dump()
        if self.stores:
            snapshot, unread = self._place(self.run, choice)
            record = {"response": response, "unread": unread}
            with _store_errors():
                await self.service.store.put_response(self.tenant, self.response.id, record, snapshot)
        return response

    def _usage(self, run: Run, choice: Choice) -> ResponseUsage:
        read = run.prompt_tokens - run.cached_tokens
        details = InputDetails(cached_tokens=run.cached_tokens, cache_write_tokens=read if self.stores else 0)
        return ResponseUsage(
            input_tokens=run.prompt_tokens,
            input_tokens_details=details,
            output_tokens=len(choice.tokens),
            total_tokens=run.prompt_tokens + len(choice.tokens),
        )

    def _place(self, run: Run, choice: Choice) -> tuple[Snapshot, list[int]]:
        """Where the conversation continues: a snapshot, and the tokens after it that are not read yet.

        The snapshot after the answer serves if all its tokens belong to the conversation. It does not if a stop text
        cut the answer, or an end-of-text token that the template does not write ended it.
        """
        format, tokens = self.service.prompts.format, choice.tokens
        after = format.after_answer
        ended = choice.finish_reason == "stop" and not choice.cut
        if choice.snapshot is not None and not choice.cut and (not ended or tokens[-1:] == after[:1]):
            return choice.snapshot, after[1:] if ended else after
        assert run.prompt_snapshot is not None  # there are tokens after it
        kept = format.answer(choice.text) if choice.cut else tokens[:-1] if ended else tokens
        return run.prompt_snapshot, kept + after
