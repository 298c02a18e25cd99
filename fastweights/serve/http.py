"""Below the application: bodies of bounded size and time, clients that hang up, server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from fastweights.serve.errors import ApiError

T = TypeVar("T")
# Seconds that a client may take to send a body, or to receive what is buffered for it.
BODY_SECONDS, SEND_SECONDS = 30.0, 60.0


class ClientGone(Exception):
    """The client has hung up: nobody reads a reply."""


class BodyLimit:
    """ASGI middleware that reads a request's body before the application does, up to a size and for a time.

    Args:
        app: The application.
        limits: The bytes that a body may have, by the beginning of the path; "" for all others.
        reading: Filled with the times at which reading ends. Whoever shuts the server down brings them forward.
        seconds: The time that a client may take to send it.
    """

    def __init__(
        self, app: Any, limits: dict[str, int], reading: set[asyncio.Timeout], seconds: float = BODY_SECONDS
    ) -> None:
        self.app, self.limits, self.reading, self.seconds = app, limits, reading, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = next(size for path, size in self.limits.items() if scope["path"].startswith(path))
        try:
            async with asyncio.timeout(self.seconds) as end:
                self.reading.add(end)
                try:
                    body = await _read(scope, receive, limit)
                finally:
                    self.reading.discard(end)
        except ClientGone:
            return
        except TimeoutError:
            error = ApiError("the body did not arrive in time", 408, code="slow_body")
            await _close_with(error, scope, receive, send)
            return
        except ApiError as error:
            await _close_with(error, scope, receive, send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)


async def _read(scope: Any, receive: Any, limit: int) -> bytes:
    too_large = ApiError(f"the body is larger than {limit:,} bytes", 413, code="body_too_large")
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise too_large
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            raise too_large
    return b"".join(parts)


async def _close_with(error: ApiError, scope: Any, receive: Any, send: Any) -> None:
    """Reply while the body is still arriving. The rest of it must not be taken for the next request."""
    error.headers["Connection"] = "close"
    await error.reply()(scope, receive, send)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client hangs up.

    Raises:
        ClientGone: The client has hung up.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    """A server-sent event."""
    # One is written for each token: pydantic's encoder takes a fraction of the time of Python's own.
    text = data if isinstance(data, str) else to_json(data).decode()
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


class EventStream(Response):
    """A reply of server-sent events. The generator is closed when the client hangs up or stops reading.

    Args:
        events: The events, one or more as a text. An empty one is not sent.
        close: Called at the end, also if the events were never begun.
        seconds: How long a client may take to receive what is buffered for it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], close: Callable[[], None], seconds: float = SEND_SECONDS) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events, self.close, self.seconds = events, close, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await unless_gone(Request(scope, receive), self._send(send))
        except (ClientGone, TimeoutError, OSError):
            pass
        finally:
            await self.events.aclose()
            self.close()

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self.events:
            if not text:
                continue
            message = {"type": "http.response.body", "body": text.encode(), "more_body": True}
            # The server waits in send while its buffer for this client is full.
            async with asyncio.timeout(self.seconds):
                await send(message)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
