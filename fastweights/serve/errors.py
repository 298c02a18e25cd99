"""Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

logger = logging.getLogger("fastweights.serve")

# The `type` of an error, by status. All other statuses below 500 are errors of the request.
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
_TYPE_NAMES = ("str", "int", "float", "bool")
INTERNAL = "the server failed to answer this request; its log has the reason"


class ErrorDetail(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that gets an error as its reply.

    Args:
        message: What is wrong, what was found, what to do.
        status: The HTTP status.
        param: The field of the request.
        code: A name for programs.
        headers: Further headers of the reply.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        detail = ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code)
        return ErrorReply(error=detail).model_dump()

    def reply(self) -> JSONResponse:
        """The error as the reply to a request."""
        return JSONResponse(self.body(), self.status, self.headers)


def busy(retry_after: float) -> ApiError:
    """The queue is full."""
    seconds = max(1, round(retry_after))
    return ApiError(
        f"the server is busy: try again in {seconds} s", 429, code="queue_full", headers={"Retry-After": str(seconds)}
    )


def shutting_down() -> ApiError:
    """The server takes no new requests."""
    return ApiError("the server is shutting down", 503, code="shutting_down", headers={"Retry-After": "5"})


def not_found(id: str, param: str | None = None) -> ApiError:
    """A stored response that does not exist for this tenant."""
    return ApiError(f"no stored response {id[:80]!r}: it is unknown, deleted or expired", 404, param, "not_found")


def install(app: FastAPI) -> None:
    """Make an application answer every error in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def _known(request: Request, error: ApiError) -> JSONResponse:
        return error.reply()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _of_validation(error.errors()).reply()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = (
                f"there is no path {request.url.path[:80]!r} here: those of the API begin with /v1, see /openapi.json"
            )
        return ApiError(message, error.status_code, headers=error.headers).reply()

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        return ApiError(INTERNAL, 500).reply()


def _of_validation(problems: Sequence[Any]) -> ApiError:
    """The deepest problem that pydantic found: where a field has several types, that of the type that fits best. Values
    of the request are not repeated: they may be long or secret."""
    first = max(problems, key=lambda problem: len(problem["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json")
    where, *path = first["loc"]
    # pydantic also names the types that it tried, such as list[str]; these are no fields.
    fields = [part for part in path if isinstance(part, int) or (part.isidentifier() and part not in _TYPE_NAMES)]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fields).lstrip(".")
    return ApiError(f"{name or where}: {first['msg']}", param=name or None, code="invalid_value")


def in_stream(error: Exception) -> ApiError:
    """An error that comes when the status of the reply was sent already."""
    if isinstance(error, ApiError):
        return error
    logger.error("a stream failed", exc_info=error)
    return ApiError(INTERNAL, 500)
