"""`fastweights profile`: time and memory of one more token, by length, and the figure of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweights.cli.options import (
    DTYPE_HELP,
    Dtype,
    UsageError,
    Weights,
    check_output,
    check_result,
    given_options,
    model_source,
    parse_numbers,
    reports_errors,
    short_name,
    usable_device,
)
from fastweights.cli.output import print_tables
from fastweights.profiling.checks import check_lengths
from fastweights.results import CostResult

PROFILED_HELP = "Models to compare, the base first; by default the paper's layer and the packaged model."
LENGTHS_HELP = "Context lengths, in tokens; by default 128 to 65,536, or 256 to 16,384 for models on a CPU."
COST_OUTPUT_HELP = "JSON file for the result. The figure is written next to it as .png and .svg."


@reports_errors
def profile(
    models: Annotated[list[str] | None, typer.Argument(metavar="[MODEL]...", help=PROFILED_HELP)] = None,
    layer: Annotated[bool, typer.Option("--layer", help="Measure only the layer of the paper's Figure 1.")] = False,
    lengths: Annotated[str | None, typer.Option(help=LENGTHS_HELP)] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a batch; by default 1, or 32 for the layer.")
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads of the layer; by default 1, as in the paper.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile every step with torch.compile.")] = False,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU if there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    weights: Weights = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=COST_OUTPUT_HELP)] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Draw the figure of this result; measures nothing.")
    ] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Measure the time and memory of one token after contexts of several lengths. A single converted model is
    compared with its base model, if that is found."""
    if source is not None:
        check_output(output)
        if others := given_options(context, besides=("source", "output")):
            raise UsageError(f"--from draws a result again: give it without {', '.join(others)}")
        cost = CostResult.read(source)
        print_tables(cost)
        typer.echo(_draw(cost, output or source), err=True)
        return
    check_result(output)
    if models and (layer or heads):
        flag, first = "--layer" if layer else "--heads", short_name(models[0], models)
        raise UsageError(f"{flag} is for the layer, and {first} is a model: give only one of them")
    if layer and weights:
        raise UsageError("--weights is for models, and --layer measures none: give only one of them")
    chosen = None if lengths is None else parse_numbers("--lengths", lengths)
    if chosen is not None:
        check_lengths(chosen)
    sources = {short_name(name, models or []): model_source(name) for name in models or ()}
    from transformers.utils import logging

    from fastweights.profiling.suite import load_with_base
    from fastweights.profiling.suite import profile as measure

    logging.disable_progress_bar()
    usable, notify = usable_device(device), partial(typer.echo, err=True)
    loaded = {}
    if sources:
        loaded = load_with_base(sources, device=usable, dtype=dtype, notify=notify)
    elif not layer:
        loaded = _load_packaged(dtype, usable)
    result = measure(
        loaded,
        layer=not models,
        lengths=chosen,
        batch=batch,
        heads=heads,
        device=usable,
        dtype=dtype,
        compiled=compile,
        weights=weights,
        notify=notify,
    )
    _report_left_out(result, notify)
    print_tables(result)
    if output is not None:
        result.write(output)
        typer.echo(_draw_written(output), err=True)


def _report_left_out(result: CostResult, notify: Callable[[str], None]) -> None:
    """Print the lengths that were not measured, and why; an error if none was."""
    costs = [*result.models, *(result.layer.models if result.layer else ())]
    lines = [f"{cost.name} after {left.length:,} tokens: {left.reason}" for cost in costs for left in cost.left_out]
    if not any(cost.points for cost in costs):
        raise UsageError(f"--lengths: nothing could be measured, give shorter ones; {'; '.join(lines)}")
    for line in lines:
        notify(f"left out: {line}")


def _load_packaged(dtype: str, device: str) -> dict[str, Any]:
    import torch

    from fastweights.conversion import convert
    from fastweights.loading import load
    from fastweights.quickstart import PACKAGED, SETTINGS

    if dtype == "auto":  # in float32 a GPU has no fast kernel for attention
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    base, converted = (load(PACKAGED, dtype=dtype).to(device).eval() for _ in range(2))
    return {"packaged": base, "converted": convert(converted, SETTINGS)}


def _draw(result: CostResult, target: Path) -> str:
    """Draw the figure; returns the line that says where it is."""
    from fastweights.report import cost_figure

    return f"figure: {' and '.join(map(str, cost_figure(result, target)))}"


def _draw_written(path: Path) -> str:
    """Draw the figure of a result that was written to `path`; without the figure the numbers are safe, too."""
    from fastweights.report import ReportError

    try:
        return _draw(CostResult.read(path), path)
    except ReportError as error:
        return f"no figure: {error}, then fastweights profile --from {path}"
