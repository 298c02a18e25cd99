"""The page from the results, written all or nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastweights.report.comparison import comparison_plots, comparison_tables, comparisons, table_of
from fastweights.report.cost import cache_tables, cost_plots, cost_tables, winnings
from fastweights.report.page import Bullets, Page, Section, Table, to_html, to_markdown
from fastweights.report.plots import draw
from fastweights.report.quality import (
    losses,
    model_tables,
    position_plots,
    position_tables,
    recall_plots,
    recall_tables,
    task_tables,
)
from fastweights.report.ranking import ranking_plots, ranking_tables
from fastweights.report.results import (
    LoadedResult,
    ReportError,
    ResultFile,
    costs_in,
    models_in,
    rankings_in,
    read_results,
    runs_in,
)
from fastweights.report.text import MISSING, count_text
from fastweights.report.training import Curve, curves_panel, outcomes, training_plots, training_tables
from fastweights.results import CostResult, Result, TrainingResult
from fastweights.utils.files import write_text

TITLE = "What conversion cost and what it won"
LOST_UNKNOWN = "Not measured: add the result of an evaluation (fastweights eval)."
WON_UNKNOWN = "Not measured: add the result of a cost measurement (fastweights profile)."
# More runs than this are shown by their tables alone: a plot would be unreadable.
MANY_RUNS = 12


def make_report(results: Sequence[ResultFile], folder: str | os.PathLike, *, title: str | None = None) -> Path:
    """Write report.md with its plots/, and report.html, which needs no other file.

    Args:
        results: Result files of any kind; what was not measured is left out of the report.
        folder: Where to write.
        title: Of the page.

    Returns:
        The path of report.html.

    Raises:
        ResultError: If a result file cannot be read.
        ReportError: If there is no result, or the folder cannot be written.
    """
    found = read_results(results)
    if not found:
        raise ReportError("a report is made from result files, and none was given: name at least one .json")
    page = Page(title or TITLE, sections_of(found))
    files = {plot.file: plot.svg for plot in page.plots}
    files |= {"report.md": to_markdown(page), "report.html": to_html(page)}
    for name, text in files.items():
        write_page(Path(folder) / name, text)
    return Path(folder) / "report.html"


def compare_curves(
    results: Mapping[str, Sequence[ResultFile | TrainingResult]],
    target: str | os.PathLike,
    *,
    base: float | None = None,
) -> Path:
    """Draw validation perplexity against tokens, a thin line for each run and a thick one for the mean of a label.

    Args:
        results: Training runs, or their files, by label.
        target: The SVG file to write.
        base: Perplexity of the base model.

    Raises:
        ReportError: If no run has validation points, or the file cannot be written.
    """
    runs = {
        label: [Curve.of(run if isinstance(run, TrainingResult) else TrainingResult.read(run)) for run in of_label]
        for label, of_label in results.items()
    }
    panel = curves_panel(runs, base)
    if panel.is_empty:
        raise ReportError(f"nothing to compare: no run of {', '.join(runs) or 'an empty list'} has validation points")
    write_page(Path(target), draw(panel))
    return Path(target)


def sections_of(results: Sequence[LoadedResult]) -> list[Section]:
    """The sections of a report, without those for which nothing was measured."""
    models, runs, costs, rankings = models_in(results), runs_in(results), costs_in(results), rankings_in(results)
    compared = comparisons(runs)
    shown = runs if len(runs) <= MANY_RUNS else [run for run in runs if not table_of(run)]
    lost = [*losses(models), *outcomes(shown)] or [LOST_UNKNOWN]
    won = winnings(models, costs) or [WON_UNKNOWN]
    cost_suffixes = ["", *(f"_{i}" for i in range(2, len(costs) + 1))]
    sections = [
        Section("Summary", [Bullets(lost, "What was lost"), Bullets(won, "What was won")]),
        *(
            Section(of.name, [*comparison_tables(of), *plots])
            for of, plots in zip(compared, comparison_plots(compared), strict=True)
        ),
        Section("Quality", [*model_tables(models), *position_plots(models), *position_tables(models)]),
        Section("Recall", [*recall_plots(models), *recall_tables(models)]),
        Section("Tasks", task_tables(models)),
        Section("Memory of one sequence", cache_tables(models)),
        Section(
            "Cost of one more token",
            [
                block
                for cost, suffix in zip(costs, cost_suffixes, strict=False)
                for block in (*cost_plots(cost, suffix), *cost_tables(cost, suffix))
            ],
        ),
        Section("Ranking of layers", [*ranking_plots(rankings), *ranking_tables(rankings)]),
        Section("Training", [*training_tables(runs), *training_plots(shown)]),
        Section("Where the numbers come from", [provenance_table(results)]),
    ]
    return [section for section in sections if section.blocks]


def tables_of(result: Result) -> list[Table]:
    """The tables of one evaluation or cost result, for a terminal."""
    loaded = [LoadedResult("", result)]
    if isinstance(result, CostResult):
        return [table for entry in costs_in(loaded) for table in cost_tables(entry)]
    models = models_in(loaded)
    quality = [*model_tables(models), *position_tables(models), *recall_tables(models), *task_tables(models)]
    return [*quality, *cache_tables(models)]


def provenance_table(results: Sequence[LoadedResult]) -> Table:
    """A row for each result file: when, by which code and on which machine it was measured."""
    names = ("date", "commit", "versions", "hardware", "seed")
    rows = [
        [
            loaded.file,
            loaded.result.kind,
            *(_flat(getattr(loaded.result, name)) for name in names),
            count_text(loaded.result.tokens),
        ]
        for loaded in results
    ]
    return Table(["file", "kind", *names, "tokens"], rows, names=6, name="provenance")


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(item)}" for name, item in value.items())
    return MISSING if value is None else str(value)


def write_page(path: Path, text: str | bytes) -> None:
    """Write a file of a report. A failure is a ReportError."""
    try:
        write_text(path, text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; choose another output folder") from error
