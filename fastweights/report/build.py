"""The page from the results, written all or nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastweights.report.comparison import comparison_plots, comparison_tables, comparisons, order_text, table_of
from fastweights.report.cost import cost_parts, cost_plots, cost_tables, winnings
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
from fastweights.report.results import (
    MISSING,
    ReportError,
    Result,
    ResultFile,
    count_text,
    models_in,
    read_results,
    runs_in,
)
from fastweights.report.training import comparison, outcomes, training_plots, training_tables
from fastweights.utils.files import write_text

TITLE = "What conversion cost and what it won"
LOST_UNKNOWN = "Not measured here: the result of an evaluation (fastweights eval) would tell."
WON_UNKNOWN = "Not measured here: the result of a cost measurement (fastweights profile) would tell."
# More runs than this cannot be told apart in one plot, nor read one sentence after another: tables of runs show theirs.
MANY_RUNS = 12


def make_report(results: Sequence[ResultFile], folder: str | os.PathLike, *, title: str | None = None) -> Path:
    """Write report.md with its plots/, and report.html, which needs no other file; returns the latter's path."""
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
    results: Mapping[str, Sequence[ResultFile | dict[str, Any]]],
    target: str | os.PathLike,
    *,
    base: float | None = None,
) -> Path:
    """One SVG of validation perplexity against tokens: under each label some runs (result files, or what is in them),
    a thin line for each and a thick one for their mean; `base` is the base model's perplexity."""
    runs = {
        label: [run if isinstance(run, dict) else read_results([run])[0].body for run in of_label]
        for label, of_label in results.items()
    }
    panel = comparison(runs, base)
    if panel.is_empty:
        raise ReportError(f"nothing to compare: no run of {', '.join(runs) or 'an empty list'} has validation points")
    write_page(Path(target), draw(panel))
    return Path(target)


def sections_of(results: Sequence[Result]) -> list[Section]:
    models, runs = models_in(results), runs_in(results)
    costs = [part for result in results if result.kind == "cost" for part in cost_parts(result)]
    compared = comparisons(runs)
    told = runs if len(runs) <= MANY_RUNS else [run for run in runs if not table_of(run)]
    orders = [f"{of.name}: {order}" for of in compared if (order := order_text(of))]
    lost = [*losses(models), *outcomes(told), *orders] or [LOST_UNKNOWN]
    won = winnings(models, costs) or [WON_UNKNOWN]
    cost_suffixes = ["", *(f"_{i}" for i in range(2, len(costs) + 1))]
    made = [
        Section("Summary", [Bullets(lost, "What was lost"), Bullets(won, "What was won")]),
        *(
            Section(of.name, [*comparison_tables(of), *plots])
            for of, plots in zip(compared, comparison_plots(compared), strict=True)
        ),
        Section("Quality", [*model_tables(models), *position_plots(models), *position_tables(models)]),
        Section("Recall", [*recall_plots(models), *recall_tables(models)]),
        Section("Tasks", task_tables(models)),
        Section(
            "Cost of one more token",
            [
                block
                for cost, suffix in zip(costs, cost_suffixes, strict=False)
                for block in (*cost_plots(cost, suffix), *cost_tables(cost, suffix))
            ],
        ),
        Section("Training", [*training_tables(runs), *training_plots(told)]),
        Section("Where the numbers come from", [provenance_table(results)]),
    ]
    return [section for section in made if section.blocks]


def tables_of(body: dict[str, Any]) -> list[Table]:
    """The tables of one evaluation or cost result, for a terminal."""
    result = Result("", body)
    models = models_in([result])
    quality = [*model_tables(models), *position_tables(models), *recall_tables(models), *task_tables(models)]
    return [table for part in cost_parts(result) for table in cost_tables(part)] if result.kind == "cost" else quality


def provenance_table(results: Sequence[Result]) -> Table:
    names = ("date", "commit", "versions", "hardware", "seed")
    rows = [
        [
            result.file,
            result.kind,
            *(_flat(result.body.get(name)) for name in names),
            count_text(result.body.get("tokens")),
        ]
        for result in results
    ]
    return Table(["file", "kind", *names, "tokens"], rows, names=6, name="provenance")


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_flat(item)}" for name, item in value.items())
    return MISSING if value is None else str(value)


def write_page(path: Path, text: str | bytes) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; choose another output folder") from error
