"""`fastweights profile`: time and memory of one more token, by length, and the figure of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastweights.cli.options import (
    DTYPE_HELP,
    Dtype,
    check_output,
    given_options,
    parse_numbers,
    reports_errors,
    short_name,
    usable_device,
)
from fastweights.cli.output import print_tables

if TYPE_CHECKING:
    from fastweights.report.results import Result

PROFILED_HELP = "Models to compare, the base first; by default the paper's layer and the packaged model."
LENGTHS_HELP = "Text lengths, in tokens; by default 128 to 65,536, for models on a CPU 256 to 16,384."
COST_OUTPUT_HELP = "JSON file for the result; its figure is drawn beside it, as .png and .svg."


@reports_errors
def profile(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help=PROFILED_HELP)] = None,
    layer: Annotated[bool, typer.Option("--layer", help="Only the layer of the paper's Figure 1.")] = False,
    lengths: Annotated[str | None, typer.Option(help=LENGTHS_HELP)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Texts at once: 1, for the layer 32.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads of the layer: the paper's 1.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile every step with torch.compile.")] = False,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU where there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help=COST_OUTPUT_HELP)] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Draw this result again; measures nothing.")] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Time and memory of one more token after texts of several lengths. A converted model alone is compared with the
    model it was made from, where that is found."""
    from transformers.utils import logging

    from fastweights.utils.provenance import write_result

    logging.disable_progress_bar()
    check_output(output, is_picture=source is not None)
    if source is not None:
        if others := given_options(context, besides=("source", "output")):
            raise ValueError(f"--from draws a result again: give it without {', '.join(others)}")
        cost = _read_cost(source)
        print_tables(cost.body)
        typer.echo(_draw(cost, output or source), err=True)
        return
    if models and (layer or heads):
        flag, first = "--layer" if layer else "--heads", short_name(models[0], models)
        raise ValueError(f"{flag} is for the layer, and {first} is a model: give only one of them")
    result = _measure(
        {short_name(name, models or []): name for name in models or []},
        layer=layer,
        lengths=None if lengths is None else parse_numbers("--lengths", lengths),
        batch=batch,
        heads=heads,
        device=usable_device(device),
        dtype=dtype,
        compiled=compile,
    )
    print_tables(result)
    if output is not None:
        write_result(output, result)
        typer.echo(_draw_written(output), err=True)


def _measure(
    sources: Mapping[str, str],
    *,
    layer: bool,
    lengths: Sequence[int] | None,
    batch: int | None,
    heads: int | None,
    device: str,
    dtype: str,
    compiled: bool,
) -> dict[str, Any]:
    """The cost of the models by name. Without models: of the packaged model and of the paper's layer, or of the layer
    alone."""
    import torch

    from fastweights.profiling import layer_cost, model_cost

    one: dict[str, Any] = {}
    if not sources:
        chosen = lengths or layer_cost.LENGTHS
        _print_plan(f"one layer, batch {batch or 32}, heads {heads or 1}, d = m = 64", chosen, device)
        one = layer_cost.layer_cost(
            chosen,
            batch=batch or 32,
            heads=heads or 1,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            device=device,
            compiled=compiled,
        )
    if layer:
        return one
    models = _load(sources, dtype, device)
    chosen = lengths or (layer_cost.LENGTHS if torch.device(device).type == "cuda" else model_cost.LENGTHS)
    _print_plan(f"{', '.join(models)}, batch {batch or 1}", chosen, device)
    whole = model_cost.decode_cost(models, chosen, batch=batch or 1, stretch_positions=True, compiled=compiled)
    return whole | {"layer": one} if one else whole


def _print_plan(what: str, lengths: Sequence[int], device: str) -> None:
    after = ", ".join(f"{length:,}" for length in lengths)
    typer.echo(f"measuring on {device}: {what}, after {after} tokens", err=True)


def _load(sources: Mapping[str, str], dtype: str, device: str) -> dict[str, Any]:
    """The models by name; a converted model alone with its base. Without any: the packaged model and its conversion."""
    from fastweights.loading import load
    from fastweights.utils.errors import CheckpointError

    if not sources:
        return _load_packaged(dtype, device)
    loaded = {name: load(source, dtype=dtype).to(device).eval() for name, source in sources.items()}
    base_name = getattr(next(iter(loaded.values())).config, "fastweights_base", None) if len(loaded) == 1 else None
    if base_name is None:
        return loaded
    try:
        return {"base": load(base_name, dtype=dtype).to(device).eval()} | loaded
    except CheckpointError:
        typer.echo(f"the base {base_name} is not found: measured without it", err=True)
        return loaded


def _load_packaged(dtype: str, device: str) -> dict[str, Any]:
    import torch

    from fastweights.conversion import convert
    from fastweights.loading import load
    from fastweights.quickstart import PACKAGED, SETTINGS

    if dtype == "auto":  # in float32 a GPU has no fast kernel for attention
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    base, converted = (load(PACKAGED, dtype=dtype).to(device).eval() for _ in range(2))
    return {"packaged": base, "decay": convert(converted, SETTINGS)}


def _read_cost(path: Path) -> Result:
    from fastweights.report import ReportError
    from fastweights.report.results import read_results

    (result,) = read_results([path])
    if result.kind != "cost":
        raise ReportError(f"--from {path} is a result of {result.kind}: give one that fastweights profile wrote")
    return result


def _draw(result: Result, target: Path) -> str:
    """Draw the figure; returns the line that says where it is."""
    from fastweights.report import cost_figure

    return f"figure: {' and '.join(map(str, cost_figure(result, target)))}"


def _draw_written(path: Path) -> str:
    """The figure of a result that was just written. Without it the numbers are safe, too."""
    from fastweights.report import ReportError

    try:
        return _draw(_read_cost(path), path)
    except ReportError as error:
        return f"no figure: {error}, then fastweights profile --from {path}"
