"""`fastweights serve`: a model behind OpenAI's API."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fastweights.cli.generate import load_with_tokenizer, require_converted
from fastweights.cli.options import (
    Device,
    UsageError,
    Weights,
    WeightsDtype,
    model_source,
    reports_errors,
    usable_device,
)
from fastweights.model_paths import BEST, CONFIG, display_name

if TYPE_CHECKING:
    from fastweights.decode.engine import Engine

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
# Tokens of a conversation with a hybrid, whose attention layers reserve memory for all of them.
HYBRID_LENGTH = 4096
LOCAL = ("127.0.0.1", "::1", "localhost")
# The model of a quickstart in the current folder.
QUICKSTART = Path("quickstart-output") / "training"
PACKAGED_NAME = "packaged"
MEGABYTE = 2**20


@reports_errors
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Converted model: a folder, a training run or a hub id. Without it: the model of a quickstart in this "
            "folder, or else the packaged small model.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0: all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in the API; by default its folder's.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Texts that are generated at once.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for a slot. Further ones get 429.")] = 64,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer at most, and by default in chats and responses.")
    ] = 1024,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt at most.")] = 131_072,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Megabytes of a request at most.")] = 4,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the longest conversation. Only for models that have attention layers left; by default "
            f"{HYBRID_LENGTH:,} for them.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds after which an answer ends.")] = 600,
    grace: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds that answers have to finish after Ctrl-C.")
    ] = 30,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where conversations are stored: a folder, or redis://HOST:PORT/NUMBER for several servers. By "
            "default in memory."
        ),
    ] = None,
    store_memory_mb: Annotated[int, typer.Option(min=1, help="Megabytes of states in memory.")] = 1024,
    store_disk_mb: Annotated[int, typer.Option(min=1, help="Megabytes of states in the folder or in Redis.")] = 10_240,
    store_hours: Annotated[float, typer.Option(min=0.01, help="Hours that an unused state is stored.")] = 720,
    store_states: Annotated[int, typer.Option(min=1, help="States that are stored for each API key.")] = 1000,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, one in each line. Each sees only what it stored itself. By default those in the "
            "environment variable FASTWEIGHTS_API_KEYS, with commas between; without any, no key is needed."
        ),
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log prompts and answers.")] = False,
    device: Device = None,
    dtype: WeightsDtype = "auto",
    weights: Weights = None,
) -> None:
    """Serve a converted model with OpenAI's API and a page to chat. Stored conversations continue without being read
    again."""
    _check_extra(store)
    from fastweights.serve.address import address_of, bind
    from fastweights.serve.auth import Keys, read_keys

    keys = read_keys(api_keys)
    source = _source(model)
    bound = bind(host, port)
    with bound:
        if host not in LOCAL and not keys:
            _note(f"warning: anyone who can reach {host} can use this server: give --api-keys")
        with Console(stderr=True).status(f"loading {escape(source or 'the packaged model')}"):
            from fastweights.serve.app import make_app
            from fastweights.serve.server import Server, run
            from fastweights.serve.service import Service, Settings
            from fastweights.serve.store import StoreLimits, open_store
            from fastweights.serve.worker import Worker

            engine = _engine(source, slots, max_length, usable_device(device), dtype, weights)
        limits = StoreLimits(store_memory_mb * MEGABYTE, store_disk_mb * MEGABYTE, store_hours * 3600, store_states)
        opened = open_store(store, engine.model, limits)
        shown = name or (PACKAGED_NAME if source is None else display_name(source))
        settings = Settings(shown, max_tokens, max_prompt_tokens, max_body_mb * MEGABYTE, timeout, log_prompts)
        worker = Worker(engine, queue)
        app = make_app(Service(engine, worker, opened, settings), Keys(keys))
        run(Server(app, worker, grace, lambda: _announce(address_of(bound), shown, bool(keys))), bound)


def _check_extra(store: str | None) -> None:
    needed = (*NEEDED, "redis") if store is not None and "://" in store else NEEDED
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"the server needs {', '.join(missing)}: pip install 'fastweights[serve]'")


def _source(model: str | None) -> str | None:
    """The model to load; None: the packaged one."""
    if model is not None:
        return model_source(model)
    if (QUICKSTART / BEST / CONFIG).is_file():
        _note(f"no model was named: this is that of the quickstart in {QUICKSTART.parent}")
        return model_source(QUICKSTART)
    _note(
        "no model was named: this is the tiny packaged one, converted but not trained again, so it writes nonsense; "
        "fastweights quickstart trains it"
    )
    return None


def _engine(
    source: str | None, slots: int, max_length: int | None, device: str, dtype: str, weights: str | None
) -> Engine:
    from fastweights.decode.engine import Engine
    from fastweights.modeling.cache import FastWeightsCache

    if source is None:
        model, tokenizer = _packaged(device)
    else:
        model, tokenizer = load_with_tokenizer(source, dtype, device)
        require_converted(model, source, "serve")
    attention_layers = FastWeightsCache(model.config).attention_layers
    if attention_layers:
        max_length = max_length or HYBRID_LENGTH
        layers = ", ".join(map(str, attention_layers))
        _note(f"layers {layers} are still attention: a conversation can have {max_length:,} tokens (--max-length)")
    return Engine(model, slots, max_length=max_length, tokenizer=tokenizer, weights=weights)


def _packaged(device: str) -> tuple[Any, Any]:
    from fastweights.conversion import convert
    from fastweights.quickstart import PACKAGED, SETTINGS

    model, tokenizer = load_with_tokenizer(str(PACKAGED), "auto", device)
    return convert(model, SETTINGS).to(device).eval(), tokenizer


def _announce(address: str, name: str, has_keys: bool) -> None:
    typer.echo(f"{name} is served at {address}; open it in a browser, or try:")
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32})
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    typer.echo(f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")


def _note(text: str) -> None:
    typer.echo(text, err=True)
