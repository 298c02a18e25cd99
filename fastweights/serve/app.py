"""The application: which paths there are, who may use them, and what they are documented to reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPBearer

from fastweights import __version__
from fastweights.modeling.description import layer_memory
from fastweights.modeling.families import family_of
from fastweights.serve import errors, responses
from fastweights.serve.auth import Authentication, Keys
from fastweights.serve.completions import ChatReply, CompletionReply
from fastweights.serve.errors import ApiError, ErrorReply
from fastweights.serve.http import BodyLimit, ClientGone, EventStream, unless_gone
from fastweights.serve.other_sites import OtherSites
from fastweights.serve.schemas import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Deleted,
    Health,
    Info,
    ModelCard,
    ModelList,
    ResponseObject,
    ResponseRequest,
    StateReply,
)
from fastweights.serve.service import Service

logger = logging.getLogger("fastweights.serve")
PAGE = Path(__file__).parent / "page"
# The only files of the page, and the paths that they have.
PAGE_FILES = {"/": "index.html", "/page/app.js": "app.js", "/page/style.css": "style.css"}
# The page runs its own script only, whatever a text may contain, and no other site can show it inside its own page.
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Bytes that a state file has besides the state itself and its logits: names, and samples of the weights.
STATE_FILE_BYTES = 4 * 2**20
# Seconds between two searches for states that have expired.
EXPIRY_SECONDS = 300.0
NOT_READ = 499  # what nginx calls a client that has hung up; nobody receives it


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a path is documented to have."""
    descriptions = {
        400: "The request is wrong.",
        401: "The API key is missing or wrong.",
        403: "A web page of another site asks.",
        404: "It does not exist.",
        408: "It took too long.",
        413: "The body is too large.",
        429: "The queue is full: try again after Retry-After seconds.",
        503: "The server is shutting down, or its store failed.",
    }
    return {status: {"model": ErrorReply, "description": descriptions[status]} for status in statuses}


def _generates() -> dict[int | str, dict[str, Any]]:
    stream: dict[str, Any] = {"content": {"text/event-stream": {}}}
    return {200: stream, **_errors(400, 404, 408, 413, 429, 503)}


def make_app(service: Service, keys: Keys) -> FastAPI:
    """Make the application.

    Args:
        service: The model that answers.
        keys: The API keys; without one, everybody is the same tenant.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        expiry = asyncio.create_task(_remove_expired(service))
        try:
            yield
        finally:
            expiry.cancel()
            with suppress(asyncio.CancelledError):
                await expiry
            await service.close()

    app = FastAPI(
        title="fastweights",
        version=__version__,
        description="OpenAI's API for a model whose memory does not grow.",
        lifespan=lifespan,
        docs_url=None,  # they load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app)

    @app.exception_handler(ClientGone)
    async def _gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=NOT_READ)

    key = HTTPBearer(auto_error=False, description="An API key, if the server has any.")
    api = APIRouter(prefix="/v1", dependencies=[Depends(key)] if keys else [], responses=_errors(401, 403))
    _add_models(api, service)
    _add_completions(api, service)
    _add_responses(api, service)
    _add_states(api, service)
    app.include_router(api)
    _add_operations(app, service)
    _add_page(app)
    _document(app)
    state_bytes = _max_state_bytes(service)
    # The last one added comes first: log, who it is, then the body.
    limits = {"/v1/states": state_bytes, "": service.settings.max_body_bytes}
    app.state.reading = set[asyncio.Timeout]()
    app.add_middleware(BodyLimit, limits=limits, reading=app.state.reading)
    app.add_middleware(Authentication, keys=keys)
    if not keys:
        app.add_middleware(OtherSites)
    app.add_middleware(_Log, service=service)
    return app


async def _remove_expired(service: Service) -> None:
    while True:
        await asyncio.sleep(EXPIRY_SECONDS)
        try:
            await service.store.remove_expired()
        except Exception:  # the next one may succeed
            logger.exception("expired states could not be removed")


def _max_state_bytes(service: Service) -> int:
    layers = layer_memory(service.model, family_of(service.model))
    attention = sum(layer.attention_bytes(service.max_length or 0) for layer in layers if not layer.converted)
    state = sum(layer.state_bytes for layer in layers) + attention
    # a state may have been saved in a wider dtype
    return 4 * state + 4 * service.vocabulary + STATE_FILE_BYTES


def _add_models(api: APIRouter, service: Service) -> None:
    card = ModelCard(id=service.settings.name, created=service.created)

    @api.get("/models")
    async def list_models() -> ModelList:
        """The served model."""
        return ModelList(data=[card])

    @api.get("/models/{model:path}", responses=_errors(404))
    async def retrieve_model(model: str) -> ModelCard:
        """The served model."""
        service.check_model(model)
        return card

    @api.get("/info")
    async def info() -> Info:
        """What the page shows: how large states are, and how fast the KV cache of the base model would grow."""
        layers = layer_memory(service.model, family_of(service.model))
        return Info(
            model=service.settings.name,
            state_bytes=sum(layer.state_bytes for layer in layers),
            base_kv_bytes_per_token=sum(layer.token_bytes for layer in layers),
            max_length=service.max_length,
            chat_template=not service.prompts.format.plain,
            slots=service.slots,
        )


async def _answer(http: Request, reply: CompletionReply | ChatReply | responses.ResponseReply) -> Response:
    """The reply to a request, until the client hangs up."""
    await reply.start()
    if reply.request.stream:
        return EventStream(reply.events(), reply.close)
    try:
        return JSONResponse(await unless_gone(http, reply.complete()))
    finally:
        reply.close()


async def _json(http: Request) -> None:
    """Refuse a body that is not called JSON: web pages of other sites can send one without asking the browser."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        found = f"found {kind[:80]}" if kind else "found none"
        raise ApiError(f"send the header Content-Type: application/json, {found}", code="invalid_content_type")


def _add_completions(api: APIRouter, service: Service) -> None:
    @api.post("/completions", dependencies=[Depends(_json)], response_model=Completion, responses=_generates())
    async def create_completion(http: Request, request: CompletionRequest) -> Any:
        """Continue a text. Stored prefixes of it are not read again."""
        return await _answer(http, CompletionReply(service, request, http.scope["tenant"]))

    @api.post("/chat/completions", dependencies=[Depends(_json)], response_model=ChatCompletion, responses=_generates())
    async def create_chat_completion(http: Request, request: ChatRequest) -> Any:
        """Answer a conversation. What is stored of it is not read again."""
        return await _answer(http, ChatReply(service, request, http.scope["tenant"]))


def _add_responses(api: APIRouter, service: Service) -> None:
    @api.post("/responses", dependencies=[Depends(_json)], response_model=ResponseObject, responses=_generates())
    async def create_response(http: Request, request: ResponseRequest) -> Any:
        """Begin a conversation, or continue a stored one. Only new messages are read."""
        return await _answer(http, responses.ResponseReply(service, request, http.scope["tenant"]))

    @api.get("/responses/{response_id}", response_model=ResponseObject, responses=_errors(400, 404, 503))
    async def retrieve_response(
        http: Request, response_id: str, stream: Annotated[bool, Query(description="Not supported.")] = False
    ) -> Any:
        """A stored response."""
        if stream:
            raise ApiError("a stored response cannot be streamed: leave stream out", 400, "stream", "unsupported")
        return JSONResponse(await responses.retrieve(service, http.scope["tenant"], response_id))

    @api.delete("/responses/{response_id}", responses=_errors(400, 404, 503))
    async def delete_response(http: Request, response_id: str) -> Deleted:
        """Delete a stored response."""
        await responses.delete(service, http.scope["tenant"], response_id)
        return Deleted(id=response_id)


def _add_states(api: APIRouter, service: Service) -> None:
    file = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @api.get(
        "/states/{response_id}",
        response_class=Response,
        responses={200: {"content": file, "description": "The state file."}, **_errors(400, 404, 429, 503)},
    )
    async def export_state(http: Request, response_id: str) -> Response:
        """The state of a stored response, as a safetensors file that `fw.FastWeightsCache.load` reads, too."""
        data = await unless_gone(http, responses.export_state(service, http.scope["tenant"], response_id))
        name = {"Content-Disposition": f'attachment; filename="{response_id}.state"'}
        return Response(data, media_type="application/octet-stream", headers=name)

    @api.post(
        "/states",
        responses=_errors(400, 408, 413, 503),
        openapi_extra={"requestBody": {"required": True, "content": file}},
    )
    async def import_state(http: Request) -> StateReply:
        """Store a state file. The id of the reply can be continued with `previous_response_id`."""
        return await responses.import_state(service, http.scope["tenant"], await http.body())


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {"model": Health, "description": "The worker has stopped."}})
    async def health() -> Any:
        """Whether the server can answer."""
        alive = service.worker.healthy
        return JSONResponse(Health(status="ok" if alive else "failed").model_dump(), 200 if alive else 503)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI) -> None:
    for path, name in PAGE_FILES.items():
        app.add_api_route(path, _sender(PAGE / name), include_in_schema=False)


def _sender(file: Path) -> Any:
    async def send() -> FileResponse:
        return FileResponse(file, headers=PAGE_HEADERS)

    return send


def _document(app: FastAPI) -> None:
    """Invalid requests get 400 and not FastAPI's own 422."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


class _Log:
    """ASGI middleware that logs and counts requests: paths, statuses and times, nothing of what was said."""

    def __init__(self, app: Any, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), NOT_READ

        async def noting(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            seconds = time.perf_counter() - started
            path = getattr(scope.get("route"), "path", "other")
            self.service.metrics.requests.labels(path, status).inc()
            self.service.metrics.request_seconds.labels(path).observe(seconds)
            logger.info("%s %s %d %.3f s", scope["method"], path, status, seconds)
