"""`fastweights report`: pages, model cards and filled blocks from results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastweights.cli.options import UsageError, check_output_folder, given_options, model_source, reports_errors


@reports_errors
def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RESULT]...", help="JSON files written by train, eval, profile or rank."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for report.md and report.html.")] = Path(
        "report"
    ),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    card: Annotated[Path | None, typer.Option(help="Also write a model card into this saved model's folder.")] = None,
    base_name: Annotated[str | None, typer.Option(help="Hub id of the base model, for the card.")] = None,
    license: Annotated[str | None, typer.Option(help="License of the model, for the card.")] = None,
    fill: Annotated[
        list[Path] | None,
        typer.Option(metavar="PAGE", help="Fill the marked blocks of this Markdown page instead; may be repeated."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --fill: write nothing; exit with 1 if a page is not up to date.")
    ] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Write a report with tables and plots, or a model card, from result files; or fill marked blocks of Markdown."""
    from fastweights.report import fill_page, make_report, write_model_card

    if fill:
        if others := given_options(context, besides=("results", "fill", "check")):
            raise UsageError(f"--fill fills pages: give it without {', '.join(others)}")
        stale = [page for page in fill if fill_page(page, results or None, write=not check)]
        for page in stale:
            typer.echo(f"{page}: {'not up to date' if check else 'filled'}")
        raise typer.Exit(int(check and bool(stale)))
    if check:
        raise UsageError("--check goes with --fill: name the page to check, --fill PAGE")
    check_output_folder(output)
    if card is not None:
        if not card.is_dir():
            raise UsageError(f"--card {card}: there is no such folder; give that of a saved, converted model")
        card = Path(model_source(card, "card"))
    typer.echo(str(make_report(results or [], output, title=title)))
    if card is not None:
        typer.echo(str(write_model_card(results or [], card, base_name=base_name, license=license)))
