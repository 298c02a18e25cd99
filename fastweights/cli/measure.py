"""The commands that measure and report. cli.py registers them; as there, what needs torch is imported inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fastweights.cli.options import (
    COST_OUTPUT_HELP,
    DTYPE_HELP,
    LENGTHS_HELP,
    PROFILED_HELP,
    Dtype,
    check_output,
    given_options,
    parse_numbers,
    reports_errors,
    usable_device,
)


@reports_errors
def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Models: folders, hub ids, GGUF files; the base first."),
    ],
    data: Annotated[list[str], typer.Option(help="Text for perplexity; may be given again.")] = [],  # noqa: B006
    length: Annotated[
        int | None, typer.Option(help="Tokens of a window; by default 1024, or what all models have positions for.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens of a window that are seen and not scored, such as 0,480.")] = "0",
    by_position: Annotated[bool, typer.Option("--by-position", help="Loss by position in the window.")] = False,
    position_length: Annotated[
        int | None, typer.Option(min=1, help="Window of --by-position; by default --length.")
    ] = None,
    recall: Annotated[bool, typer.Option("--recall", help="Recall of pairs and copying, by distance.")] = False,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks, such as lambada,hellaswag.")] = "",
    task_folder: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' JSON lines; by default lm-eval downloads them.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items of each task, at most.")] = None,
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and data sets that holds the text.")] = "text",
    batch_size: Annotated[int, typer.Option(help="Windows at once.")] = 8,
    device: Annotated[str | None, typer.Option(help="Device to run on; by default a GPU where there is one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the result.")] = None,
) -> None:
    """Measure models and compare them: perplexity, recall, lm-eval tasks."""
    from transformers.utils import logging

    from fastweights.data.readers import read_text
    from fastweights.evaluation.perplexity import evaluate as measure
    from fastweights.evaluation.perplexity import window_for
    from fastweights.utils.provenance import write_result

    logging.disable_progress_bar()
    check_output(output)
    contexts = parse_numbers("--context", context)
    texts = {_short(source, data): read_text(source, text_field) for source in data}
    usable = usable_device(device)
    with Console(stderr=True).status("loading"):
        loaded = {name: _load_any(name, dtype, usable) for name in models}
    result = measure(
        {_short(name, models): pair for name, pair in loaded.items()},
        data=texts,
        length=window_for([model for model, _ in loaded.values()]) if length is None else length,
        contexts=contexts,
        tasks=[task for task in tasks.split(",") if task],
        recall=recall,
        by_position=by_position,
        position_length=position_length,
        limit=limit,
        task_folder=task_folder,
        batch_size=batch_size,
    )
    _print_tables(result)
    if output is not None:
        write_result(output, result)


def _short(name: str, names: list[str]) -> str:
    """A model's name without its folder, where that tells it apart."""
    return Path(name).name if len({Path(other).name for other in names}) == len(names) else name


def _load_any(model: str, dtype: str, device: str) -> tuple[Any, Any]:
    from fastweights.loading import load, load_tokenizer

    return load(model, dtype=dtype).to(device).eval(), load_tokenizer(model)


def _print_tables(result: dict[str, Any]) -> None:
    from fastweights.report import tables_of

    console = Console()
    for table in tables_of(result):
        shown = Table(
            *(Column(h, justify="left" if i < table.names else "right") for i, h in enumerate(table.header)), box=None
        )
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown, "")


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

    from fastweights.cli.profiled import figure, figure_beside, read_cost
    from fastweights.cli.profiled import profile as measure
    from fastweights.utils.provenance import write_result

    logging.disable_progress_bar()
    check_output(output, is_picture=source is not None)
    if source is not None:
        if others := given_options(context, besides=("source", "output")):
            raise ValueError(f"--from draws a result again: give it without {', '.join(others)}")
        cost = read_cost(source)
        _print_tables(cost.body)
        typer.echo(figure(cost, output or source), err=True)
        return
    result = measure(
        {_short(name, models or []): name for name in models or []},
        lambda text: typer.echo(text, err=True),
        layer=layer,
        lengths=None if lengths is None else parse_numbers("--lengths", lengths),
        batch=batch,
        heads=heads,
        device=usable_device(device),
        dtype=dtype,
        compiled=compile,
    )
    _print_tables(result)
    if output is not None:
        write_result(output, result)
        typer.echo(figure_beside(output), err=True)


@reports_errors
def report(
    results: Annotated[
        list[Path] | None, typer.Argument(metavar="[RESULT]...", help="JSON files of train, eval, profile.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for report.md and report.html.")] = Path(
        "report"
    ),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    card: Annotated[Path | None, typer.Option(help="Also write a model card into this saved model's folder.")] = None,
    base_name: Annotated[str | None, typer.Option(help="Hub id of the base model, for the card.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence, for the card.")] = None,
    fill: Annotated[
        list[Path] | None,
        typer.Option(metavar="PAGE", help="Instead, fill the marked blocks of this Markdown page; may be repeated."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="With --fill: only look; exit 1 if not up to date.")] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Turn results into a page with tables and plots, and into a model card for the hub; or fill pages of your own."""
    from fastweights.report import fill_page, make_report, write_model_card

    if fill:
        if others := given_options(context, besides=("results", "fill", "check")):
            raise ValueError(f"--fill fills pages: give it without {', '.join(others)}")
        stale = [page for page in fill if fill_page(page, results or None, write=not check)]
        for page in stale:
            typer.echo(f"{page}: {'not up to date' if check else 'filled'}")
        raise typer.Exit(int(check and bool(stale)))
    if check:
        raise ValueError("--check goes with --fill: name the page to check, --fill PAGE")
    typer.echo(str(make_report(results or [], output, title=title)))
    if card is not None:
        typer.echo(str(write_model_card(results or [], card, base_name=base_name, license=license)))
