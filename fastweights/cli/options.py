"""Shared by the commands: options made from settings, parsing of lists, and errors as one line with flags."""

from __future__ import annotations

import functools
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.models import ArgumentInfo

from fastweights.config import LAYER_LISTS, ConfigError, FastWeightsConfig
from fastweights.model_paths import display_name
from fastweights.training.recipe import Recipe, RecipeError, Stage
from fastweights.utils.errors import Argument, Call, FastWeightsError, Stopped, error_context

Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
DTYPE_HELP = "Precision of the weights; by default the checkpoint's own."
SavedModel = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Model, converted or not: a folder, a training run, a hub id or a GGUF file."),
]
LARGEST_LAYER = 100_000

# Options of the commands that generate text.
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate, unless an end-of-text token comes first.")]
Temperature = Annotated[float | None, typer.Option(help="Sample, with logits divided by this.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Sample from the likeliest tokens that sum to p.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Penalty for tokens that were seen before; 1 for none.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Sample with this seed.")]
LoadState = Annotated[Path | None, typer.Option(help="Continue from the state saved in this file.")]
Device = Annotated[str | None, typer.Option(help="Device to run on; by default a GPU if there is one.")]
Weights = Annotated[
    Literal["int8", "bfloat16"] | None,
    typer.Option(help="On a CPU, generate faster with weights rounded to this; by default they have --dtype."),
]
WeightsDtype = Annotated[Dtype, typer.Option(help=DTYPE_HELP)]


class UsageError(FastWeightsError):
    """A command that cannot run as it was typed. The message names the flags."""


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Show an error that a user can correct as one line on stderr, with exit code 2.

    These are the library's own errors and those of the operating system about a file. Any other error, also a
    ValueError, is a bug or comes from another library, and its traceback is shown.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except FastWeightsError as error:
            _fail(error_text(error, command), 2, error)
        except OSError as error:
            if error.filename is None:
                raise
            _fail(f"{error.filename}: {error.strerror}", 2, error)
        except Stopped as error:
            _fail(error_text(error, command), error.exit_code, error)

    return run


def error_text(error: FastWeightsError | Stopped, command: Callable[..., None]) -> str:
    """The message of an error, with the flags of a command."""
    return " ".join(error.message(functools.partial(flag_of, command=command)).split())


# Arguments of the library whose flag has another name than theirs.
_FLAGS: dict[str, str] = {"changes": "--set"}


def flag_of(argument: str, command: Callable[..., None] | None = None) -> str:
    """What a user types for an argument of the library: the flag or the positional argument of that name, where the
    command has one."""
    if isinstance(argument, Call):
        return argument.command
    own = {} if command is None else _typed_names(command)
    return own.get(argument) or _FLAGS.get(argument, f"--{argument.replace('_', '-')}")


def _typed_names(command: Callable[..., None]) -> dict[str, str]:
    names = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(option, ArgumentInfo):
                names[name] = str(option.metavar).strip("[].")
            else:  # within Annotated, typer keeps the first name as the default
                given = [flag for flag in (option.default, *(option.param_decls or ())) if isinstance(flag, str)]
                names[name] = given[0] if given else f"--{name.replace('_', '-')}"
    return names


def _fail(message: str, exit_code: int, error: Exception) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code) from error


@contextmanager
def given_by_set(changes: Iterable[str]) -> Iterator[None]:
    """Errors about these settings name --set, by which they were given, and not the settings' own flags.

    An error without an argument is about a name that only --set can give: a stage's setting or an unknown one.
    """
    names = set(changes)
    try:
        yield
    except RecipeError as error:
        if not any(isinstance(part, Argument) for part in error.parts):
            raise RecipeError("--set: ", *error.parts) from error
        parts = (f"--set {part}" if isinstance(part, Argument) and part in names else part for part in error.parts)
        raise RecipeError(*parts) from error


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of FastWeightsConfig; the command gets those given as `settings`."""
    options = fields(FastWeightsConfig)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {f.name: arguments.pop(f.name) for f in options}
        for name in LAYER_LISTS:
            values[name] = None if values[name] is None else parse_layers(values[name], name)
        command(settings={name: value for name, value in values.items() if value is not None}, **arguments)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
    run.__signature__ = inspect.Signature([*own, *map(_option, options)])  # type: ignore[attr-defined]
    return run


def _option(setting: Field) -> inspect.Parameter:
    is_list = setting.name in LAYER_LISTS
    help = FastWeightsConfig.help(setting.name) + (" For example 0,2,5-7." if is_list else "")
    kind: Any = str | None if is_list else FastWeightsConfig.type_of(setting.name)
    annotation = Annotated[kind | None, typer.Option(help=help)]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _with_default(setting: Field) -> str:
    default = "" if setting.default is None else f" Default, unless the recipe sets it: {setting.default}."
    return Recipe.help(setting.name) + default


def stage_table(width: int = 78) -> str:
    """The settings of a stage with their defaults, for the end of a command's help."""
    rows = [("name", "default", "meaning")]
    rows += [(f.name, "–" if f.default is None else f"{f.default}", f.metadata["help"]) for f in fields(Stage)]
    name_width, default_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = ["Settings of a stage, for --set LOSS.NAME=VALUE:"]
    for name, default, meaning in rows:
        start = f"{name:{name_width}}  {default:{default_width}}  "
        lines += wrap(meaning, width, initial_indent=start, subsequent_indent=" " * len(start))
    return "\b\n" + "\n".join(lines)  # \b: the program's help does not wrap these lines again


def takes_changes(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of a Recipe but its stages; the command gets those given as
    `changes`."""
    settings = [f for f in fields(Recipe) if f.name != "stages"]
    types = get_type_hints(Recipe)

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        values = {f.name: arguments.pop(f.name) for f in settings}
        command(changes={name: value for name, value in values.items() if value is not None}, **arguments)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "changes"]
    added = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[types[f.name] | None, typer.Option(help=_with_default(f))],
        )
        for f in settings
    ]
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    return run


def given_options(context: typer.Context, besides: str | tuple[str, ...]) -> list[str]:
    """The flags and positional arguments that were given, as they are typed."""
    allowed = (besides,) if isinstance(besides, str) else besides
    typed: list[Any] = [p for p in context.command.params if p.name not in allowed and _was_typed(context, str(p.name))]
    return [p.opts[0] if p.opts[0].startswith("-") else p.metavar.strip("[].") for p in typed]


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def model_source(source: str | Path, argument: str | None = None) -> str:
    """The model that a user named, checked before torch is imported. A training run stands for its best checkpoint,
    which is printed.

    Args:
        source: a folder, a training run, a hub id or a GGUF file.
        argument: the argument that it was given by, if errors must name it.

    Raises:
        CheckpointError: there is no such model, or its files cannot be read.
    """
    from fastweights.model_paths import find_model
    from fastweights.modeling.source_files import check_source

    with error_context(*(() if argument is None else (Argument(argument), ": "))):
        found = find_model(source)
        if found != str(source):
            typer.echo(f"{source} is a training run: its model is {found}", err=True)
        check_source(found)
    return found


def check_result(path: Path | None) -> None:
    """Refuse a file for a result that cannot be written, before hours of measuring."""
    if path is not None and path.suffix in (".png", ".svg"):
        raise UsageError(
            f"--output {path} is a picture: give a JSON file for the result, such as {path.with_suffix('.json')}"
        )
    check_output(path)


def check_output(path: Path | None, flag: str = "--output") -> None:
    """Refuse a file that cannot be written. None is no file."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {path} cannot be written: give a file name in a folder that exists")
    _check_writable(path, path.parent, flag)


def check_output_folder(path: Path, flag: str = "--output") -> None:
    """Refuse a folder that cannot be written, or cannot be created with its parents."""
    above = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not above.is_dir():
        raise UsageError(f"{flag} {path} cannot be written: {above} is a file; choose another output folder")
    _check_writable(path, above, flag)


def _check_writable(path: Path, folder: Path, flag: str) -> None:
    """Create a file in `folder` and remove it: permissions alone do not show a full or read-only disk."""
    try:
        tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}.").close()
    except OSError as error:
        reason = f"no file can be written in {folder} ({error.strerror}); choose another folder"
        raise UsageError(f"{flag} {path} cannot be written: {reason}") from error


def parse_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{flag} takes whole numbers such as 0,480, found {text!r}") from error


def parse_layers(text: str, name: str = "layers") -> tuple[int, ...]:
    """The layer numbers in a list such as 0,2,5-7, the value of the setting `name`."""
    layers: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        numbers = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)
        if not numbers or numbers[-1] > LARGEST_LAYER:
            expected = " must be numbers and ranges from low to high such as 0,2,5-7"
            raise ConfigError(Argument(name), f"{expected}, found {text!r}")
        layers.extend(numbers)
    return tuple(layers)


def short_name(name: str, names: list[str]) -> str:
    """The name of a model or file in tables, or what was typed if several have that name."""
    return display_name(name) if len({display_name(other) for other in names}) == len(names) else name


def usable_device(device: str | None) -> str:
    """The device, by default a GPU where there is one.

    Raises:
        UsageError: it cannot be used here.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from error
    return device
