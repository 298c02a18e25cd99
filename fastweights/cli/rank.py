"""`fastweights rank`: which layers to leave as attention."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fastweights.cli.options import (
    UsageError,
    check_output_folder,
    check_result,
    model_source,
    reports_errors,
    usable_device,
)
from fastweights.cli.output import console
from fastweights.data.readers import check_data
from fastweights.model_paths import display_name
from fastweights.results import Data, RankedModel, RankingResult
from fastweights.utils.errors import Argument, error_context

if TYPE_CHECKING:
    from fastweights.training.losses import Batch

LENGTH = 512


@reports_errors
def rank(
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="Converted model, trained or not: a folder, a training run or a hub id."),
    ],
    data: Annotated[str, typer.Option(help="Text to measure on, in the formats that train accepts.")],
    teacher: Annotated[
        str | None, typer.Option(help="The unconverted model; by default the one that DIR was converted from.")
    ] = None,
    keep: Annotated[int, typer.Option(min=0, help="Choose this many layers greedily.")] = 0,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the output projections first; for a model that was not trained.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=2, help="Measure on at most this many tokens.")] = 65_536,
    length: Annotated[
        int | None,
        typer.Option(
            min=2, help=f"Tokens in a sequence; by default {LENGTH}, or fewer if the model has fewer positions."
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and data sets that holds the text.")] = "text",
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU if there is one.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the result.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="New folder for the hybrid: DIR, with the layers chosen by --keep restored as attention."),
    ] = None,
) -> None:
    """Rank layers to leave as attention: restore one at a time and measure the KL divergence from the base model."""
    started = time.perf_counter()
    check_result(output)
    _check_save(save, keep)
    row = min(LENGTH, tokens) if length is None else length
    if tokens < row:
        raise UsageError(f"--tokens {tokens} are fewer than one row: give at least --length {length}")
    source = model_source(folder)
    base_source = None if teacher is None else model_source(teacher, "teacher")
    with error_context(Argument("data"), " "):
        check_data(data, text_field)
    with Console(stderr=True).status(f"loading {escape(folder)}"):
        import torch
        from transformers.utils import logging

        from fastweights.evaluation.layer_ranking import batches_of, hybrid_from, load_pair, rank_layers
        from fastweights.evaluation.perplexity import window_for
        from fastweights.loading import load_tokenizer
        from fastweights.modeling.layer import converted_layers
        from fastweights.modeling.positions import check_length

        logging.disable_progress_bar()
        usable = usable_device(device)
        pair = load_pair(source, base_source, dtype=torch.float32, announce=partial(typer.echo, err=True))
        student, base = (model.to(usable) for model in pair)
        tokenizer = load_tokenizer(source)
    layers = len(converted_layers(student))
    if keep > layers or (save is not None and keep == layers):
        most, why = (layers, "") if save is None else (layers - 1, ", so that --save has a layer left to convert")
        raise UsageError(f"--keep {keep}: {folder} has {layers} converted layers, choose at most {most}{why}")
    for model in (student, base) if length is not None else ():
        check_length(model, row, Argument("length"))
    rows = _rows(source, data, tokenizer, student, tokens, window_for((student, base), row), text_field)
    ranking = rank_layers(student, base, batches_of(rows), keep=keep, fit=fit)
    base_name = display_name(teacher or student.config.fastweights_base)
    result = RankingResult(
        seed=0,
        tokens=rows["input_ids"].numel(),
        model=RankedModel(name=display_name(folder), base=base_name, settings=student.config.fastweights),
        data=Data(name=Path(data).name),
        settings={"keep": keep, "fit": fit, "length": rows["input_ids"].shape[1], "device": usable},
        kl=ranking.kl,
        layers=ranking.layers,
        chosen=ranking.chosen,
        kl_after=ranking.kl_after,
        seconds=round(time.perf_counter() - started, 2),
    )
    _print(result)
    if output is not None:
        result.write(output)
    if save is not None:
        hybrid_from(source, ranking.chosen, save, base_source)
        typer.echo(str(save))


def _check_save(save: Path | None, keep: int) -> None:
    """Refuse a folder that cannot be written, before minutes of measuring."""
    if save is None:
        return
    if not keep:
        raise UsageError(f"--save {save}: give --keep, how many layers of the hybrid are attention")
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise UsageError(f"--save {save} exists and is not an empty folder: name a new one")
    check_output_folder(save, "--save")


def _rows(source: str, data: str, tokenizer: Any, student: Any, tokens: int, length: int, text_field: str) -> Batch:
    from fastweights.data.batches import validation_rows
    from fastweights.data.token_files import check_vocabulary, prepare
    from fastweights.loading import require_tokenizer

    require_tokenizer(tokenizer, source)
    with error_context(Argument("data"), " "):
        prepared = prepare(data, tokenizer, text_field=text_field, limit=tokens)
        rows = validation_rows(prepared, length)
    check_vocabulary(prepared, tokenizer, student.config)
    return rows


def _print(result: RankingResult) -> None:
    stdout = console()
    stdout.print(f"KL(base || model) of next tokens, nothing restored: {result.kl:.4f}", highlight=False)
    table = Table(*(Column(header, justify="right") for header in ("layer", "KL with it restored", "gain")), box=None)
    for row in result.layers:
        table.add_row(str(row.layer), f"{row.kl:.4f}", f"{row.gain:+.4f}")
    stdout.print(table)
    if result.chosen:
        chosen = Table(*(Column(header, justify="right") for header in ("keep", "KL with those so far")), box=None)
        for layer, kl in zip(result.chosen, result.kl_after, strict=True):
            chosen.add_row(str(layer), f"{kl:.4f}")
        stdout.print("", chosen)
