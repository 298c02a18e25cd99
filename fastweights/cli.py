"""The command line: parses, calls, prints. What needs torch is imported inside the commands: help must be instant."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table

from fastweights import __version__
from fastweights.config import ConfigError, FastWeightsConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fastweights.cache import FastWeightsCache
    from fastweights.describe import Description

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
SavedModel = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved model, converted or not.")]
DTYPE_HELP = "Precision of the weights; by default the checkpoint's own."

app = typer.Typer(
    help="Pretrained Transformers into recurrent models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The `fastweights` program. Its own messages take the place of transformers' warnings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """What a user can put right is one line on stderr and exit code 2; anything else is a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ValueError as error:
            message = _with_flags(str(error)) if isinstance(error, ConfigError) else str(error)
            typer.echo(f"error: {' '.join(message.split())}", err=True)
            raise typer.Exit(2) from error

    return run


def _with_flags(message: str) -> str:
    """The settings that a configuration error speaks of (`name=...`, `name must ...`) as they are typed here."""
    names = "|".join(f.name for f in fields(FastWeightsConfig))
    return re.sub(rf"\b({names})(?==| must\b)", lambda found: "--" + found[1].replace("_", "-"), message)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of FastWeightsConfig; the command gets them as `config`."""
    settings = fields(FastWeightsConfig)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {f.name: arguments.pop(f.name) for f in settings}
        values["layers"] = None if values["layers"] is None else parse_layers(values["layers"])
        command(config=FastWeightsConfig(**values), **arguments)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "config"]
    run.__signature__ = inspect.Signature([*own, *map(_option, settings)])  # type: ignore[attr-defined]
    return run


def _option(setting: Field) -> inspect.Parameter:
    is_list = setting.name == "layers"
    help = FastWeightsConfig.help(setting.name) + (" For example 0,2,5-7." if is_list else "")
    kind: Any = str | None if is_list else FastWeightsConfig.type_of(setting.name)
    annotation = Annotated[kind, typer.Option(help=help)]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=setting.default, annotation=annotation
    )


def parse_layers(text: str) -> tuple[int, ...]:
    """The layer numbers in a list such as 0,2,5-7."""
    layers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        numbers = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else ()
        if not numbers:
            raise ConfigError(f"layers must be numbers and ranges from low to high such as 0,2,5-7, found {text!r}")
        layers.extend(numbers)
    return tuple(layers)


@app.command()
@reports_errors
@takes_settings
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Pretrained model: a hub id, a folder or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the converted model to.")],
    config: FastWeightsConfig,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that is not empty.")] = False,
) -> None:
    """Replace a model's attention by fast weights. The tokenizer, where there is one, is saved with the result."""
    from fastweights import convert as converter
    from fastweights.convert import load, load_tokenizer, new_folder
    from fastweights.describe import describe

    with (
        new_folder(output, overwrite, source=model) as folder,
        Console(stderr=True).status(f"loading {escape(model)}") as status,
    ):
        pretrained, tokenizer = load(model, dtype=dtype), load_tokenizer(model)
        status.update("converting")
        converted = converter(pretrained, config)
        status.update(f"saving to {escape(str(output))}")
        converted.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    _print_description(describe(converted), str(output))


@app.command()
@reports_errors
def info(
    folder: SavedModel,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a saved model is and what it keeps in memory. Reads no weights."""
    from fastweights.describe import describe_folder

    described = describe_folder(folder)
    if as_json:
        typer.echo(json.dumps(asdict(described), indent=1))
    else:
        _print_description(described, str(folder))


def _print_description(described: Description, name: str) -> None:
    from fastweights.describe import facts

    summary = Table(title=escape(name), title_justify="left", show_header=False, box=None)
    for label, value in facts(described).items():
        summary.add_row(label, value)
    headers = ("tokens", "this model", "KV cache of the base model")
    memory = Table(*(Column(header, justify="right") for header in headers), box=None)
    for row in described.memory:
        memory.add_row(f"{row.tokens:,}", decimal(row.here), decimal(row.attention))
    Console().print(summary, "", memory)


@app.command()
@reports_errors
def generate(
    folder: SavedModel,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, unless the text ends before.")] = 100,
    temperature: Annotated[float | None, typer.Option(help="Sample, from logits divided by this.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest that sum to p.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Sample, with this seed.")] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beams to search with.")] = 1,
    load_state: Annotated[Path | None, typer.Option(help="Continue the text whose state was saved here.")] = None,
    save_state: Annotated[Path | None, typer.Option(help="Save the state after the text, to continue it.")] = None,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU where there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
) -> None:
    """Continue a text. Decodes greedily unless a sampling option is given, and prints the new text as it comes."""
    from transformers import TextStreamer, set_seed

    options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, **_sampling(temperature, top_k, top_p, seed)}
    if save_state is not None and (save_state.is_dir() or not save_state.parent.is_dir()):
        raise ValueError(f"--save-state {save_state} cannot be written: give a file name in a folder that exists")
    with Console(stderr=True).status(f"loading {escape(str(folder))}"):
        model, tokenizer = _load_with_tokenizer(folder, dtype, _usable(device))
    state = _start_state(model, folder, load_state, save_state)
    prompt_ids = _prompt_ids(tokenizer, prompt, continues=load_state is not None).to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if num_beams == 1 else None
    if seed is not None:
        set_seed(seed)
    started = time.perf_counter()
    ids, cache = _continue(model, prompt_ids, state, streamer=streamer, **options)
    seconds = time.perf_counter() - started
    new_ids = ids[0, prompt_ids.shape[1] :]
    if streamer is None:
        typer.echo(tokenizer.decode(new_ids, skip_special_tokens=True))
    if save_state is not None and state is not None:
        _state_after(model, state, cache, ids).save(save_state, model)
    typer.echo(f"{len(new_ids)} tokens, {len(new_ids) / seconds:.1f} tokens/s, {_memory_used(cache)}", err=True)


@app.command()
@reports_errors
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the models.")] = Path("quickstart-output"),
) -> None:
    """Convert a small model, generate from it, and measure time and memory for a token at several text lengths."""
    from transformers.utils import logging

    from fastweights.quickstart import run

    logging.disable_progress_bar()
    console = Console()
    run(output, console)
    program = sys.argv[0] if Path(sys.argv[0]).name == "fastweights" else "fastweights"
    console.print(f"next: {program} info {output / 'decay'}", f"or: {program} convert --help", sep="\n")


def _sampling(temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None) -> dict[str, Any]:
    """What was asked for and nothing else: transformers' own default would be the 50 likeliest tokens."""
    if temperature is not None and temperature <= 0:
        raise ValueError(f"--temperature must be above 0, found {temperature}: leave it out to decode greedily")
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = {name: value for name, value in asked.items() if value is not None}
    if not sampling and seed is None:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | sampling


def _usable(device: str | None) -> str:
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _load_with_tokenizer(folder: Path, dtype: str, device: str) -> tuple[Any, Any]:
    from transformers.utils import logging

    from fastweights.convert import load, load_tokenizer

    logging.disable_progress_bar()
    if not folder.is_dir():
        hint = "that is a file, convert it first" if folder.is_file() else "give the folder of a saved model"
        raise ValueError(f"no folder at {folder}: {hint}")
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer: save the model's there with tokenizer.save_pretrained")
    return load(folder, dtype=dtype).to(device).eval(), tokenizer


def _start_state(model: Any, folder: Path, load: Path | None, save: Path | None) -> FastWeightsCache | None:
    """The state before the prompt; None for a model that has none."""
    from fastweights.cache import FastWeightsCache
    from fastweights.models import FastWeightsMixin

    if isinstance(model, FastWeightsMixin):
        return FastWeightsCache(model.config) if load is None else FastWeightsCache.load(load, model)
    if load is not None or save is not None:
        flag = "--save-state" if load is None else "--load-state"
        raise ValueError(f"{flag} needs a converted model, and {folder} is an ordinary one: run fastweights convert")
    return None


def _prompt_ids(tokenizer: Any, prompt: str, continues: bool) -> Tensor:
    """Tokens [1,T] of the prompt; in the middle of a text nothing marks a beginning."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not continues).input_ids
    if ids.shape[1] == 0:
        raise ValueError("--prompt is empty: give at least one character to continue from")
    return ids


def _continue(model: Any, prompt_ids: Tensor, state: FastWeightsCache | None, **options: Any) -> tuple[Tensor, Any]:
    """The prompt's tokens and the new ones, and the cache generate ended with; `state` itself is left alone."""
    import torch

    if state is None:
        return model.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), **options), None
    cache, mask = state.fork(options["num_beams"]), state.mask_for(prompt_ids)
    return model.generate(prompt_ids, attention_mask=mask, past_key_values=cache, **options), cache


def _state_after(model: Any, before: FastWeightsCache, last: FastWeightsCache, ids: Tensor) -> FastWeightsCache:
    """The state that has seen all of `ids`. generate never takes in its last token, and leaves a state for each beam,
    in which case the text is read again from the start."""
    import torch

    state = last if last.batch_size == 1 else before
    unseen = ids[:, int(state.seen - before.seen) :]
    with torch.no_grad():
        model(unseen, past_key_values=state, attention_mask=state.mask_for(unseen))
    return state


def _memory_used(cache: FastWeightsCache | None) -> str:
    if cache is None:
        return "no state (not converted)"
    grown = f" and {cache.attention_nbytes:,} bytes of keys and values" if cache.kept else ""
    return f"state {cache.nbytes:,} bytes{grown}"
