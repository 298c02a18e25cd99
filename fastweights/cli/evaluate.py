"""`fastweights eval`: measure the quality of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastweights.cli.options import (
    DTYPE_HELP,
    Dtype,
    check_result,
    model_source,
    parse_numbers,
    reports_errors,
    short_name,
    usable_device,
)
from fastweights.cli.output import print_tables
from fastweights.data.readers import read_text
from fastweights.evaluation.checks import WINDOW, check_measures, check_window


@reports_errors
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Models to compare, the base first: folders, training runs, hub ids or GGUF files.",
        ),
    ],
    data: Annotated[list[str], typer.Option(help="Text to measure perplexity on; may be repeated.")] = [],  # noqa: B006
    length: Annotated[
        int | None, typer.Option(help="Tokens in a window; by default 1024, or fewer if a model has fewer positions.")
    ] = None,
    context: Annotated[
        str, typer.Option(help="Tokens of a window that are read but not scored; a list such as 0,480.")
    ] = "0",
    by_position: Annotated[
        bool, typer.Option("--by-position", help="Measure the loss by position in the window.")
    ] = False,
    position_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a window of --by-position; by default --length.")
    ] = None,
    recall: Annotated[bool, typer.Option("--recall", help="Measure recall of pairs and copying, by distance.")] = False,
    without_window: Annotated[
        bool,
        typer.Option(
            "--without-window",
            help="Measure converted models once more with the window left out: how good the state is alone.",
        ),
    ] = False,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks: those of lm-eval, such as lambada,hellaswag, and those that score generated answers "
            "(books_lookup, books_copy, books_answer, books_summary, lambada_generate)."
        ),
    ] = "",
    task_folder: Annotated[
        Path | None,
        typer.Option(help="Folder with the data of the tasks as JSON lines; by default lm-eval downloads it."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Run at most this many items of each task.")] = None,
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and data sets that holds the text.")] = "text",
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 8,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU if there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the result.")] = None,
) -> None:
    """Measure and compare models: perplexity, recall and lm-eval tasks."""
    check_result(output)
    contexts, task_names = parse_numbers("--context", context), [task for task in tasks.split(",") if task]
    check_measures(data, task_names, recall, by_position)
    for tokens in contexts:
        check_window(WINDOW if length is None else length, tokens)
    sources = {name: model_source(name) for name in models}
    texts = {short_name(source, data): read_text(source, text_field) for source in data}
    with Console(stderr=True).status("loading"):
        from transformers.utils import logging

        from fastweights.evaluation.perplexity import window_for
        from fastweights.evaluation.suite import evaluate as measure

        logging.disable_progress_bar()
        usable = usable_device(device)
        loaded = {name: _load_any(source, dtype, usable) for name, source in sources.items()}
    result = measure(
        {short_name(name, models): pair for name, pair in loaded.items()},
        data=texts,
        length=window_for([model for model, _ in loaded.values()]) if length is None else length,
        contexts=contexts,
        tasks=task_names,
        recall=recall,
        by_position=by_position,
        without_window=without_window,
        position_length=position_length,
        limit=limit,
        task_folder=task_folder,
        batch_size=batch_size,
    )
    print_tables(result)
    if output is not None:
        result.write(output)


def _load_any(source: str, dtype: str, device: str) -> tuple[Any, Any]:
    from fastweights.loading import load, load_tokenizer

    return load(source, dtype=dtype).to(device).eval(), load_tokenizer(source)
