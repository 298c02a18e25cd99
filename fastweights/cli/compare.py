"""`fastweights compare`: train the variants of a grid and compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from fastweights.cli.options import (
    check_output_folder,
    model_source,
    parse_numbers,
    reports_errors,
    usable_device,
)
from fastweights.cli.output import console
from fastweights.data.readers import check_data
from fastweights.experiments.grid import choose, load_grid, result_file, with_changes, with_seeds
from fastweights.results import TrainingResult
from fastweights.training.recipe import parse_changes
from fastweights.utils.errors import Argument, error_context


@reports_errors
def compare(
    grid: Annotated[
        str,
        typer.Argument(
            metavar="GRID",
            help="Name of a shipped grid (design_small, gemma3, paper, paper_ablations, paper_longer, paper_own_maps, "
            "paper_smollm2, smollm2, smollm2_design, smollm2_final, smollm2_long, smollm2_windows, transfer_small, "
            "wikitext103), or a YAML file.",
        ),
    ],
    model: Annotated[str, typer.Option(help="The base of all runs: a hub id, a folder or a GGUF file.")],
    data: Annotated[str, typer.Option(help="Text to train on, in the formats that train accepts.")],
    validation: Annotated[str, typer.Option(help="Text to validate on, in the same formats as --data.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for runs and results.")],
    test: Annotated[
        list[str], typer.Option(help="Text to measure the perplexity of each best model on; may be repeated.")
    ] = [],  # noqa: B006
    recall: Annotated[
        bool, typer.Option("--recall", help="Measure recall of pairs and copying by each best model, by distance.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of runs at a time. Each is a process; they share the device.")
    ] = 1,
    only: Annotated[str, typer.Option(help="Run only these runs of the grid: NAME,NAME.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of every run, in place of the grid's; a list such as 1,2.")] = "",
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Stop after this many minutes: the runs finish their steps and save, the same command resumes, and "
            "the exit code is 4.",
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the models of finished runs.")] = False,
    change: Annotated[
        list[str], typer.Option("--set", help="Change the recipe of every run, like --set of train; may be repeated.")
    ] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most this many tokens of the data.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
) -> None:
    """Train many variants of one model and compare them. The same command resumes an interrupted comparison."""
    chosen = choose(load_grid(grid), only.split(","))
    chosen = with_seeds(chosen, parse_numbers("--seeds", seeds)) if seeds else chosen
    chosen = with_changes(chosen, parse_changes(change))
    check_output_folder(output)
    if not all(result_file(output, variant.name).is_file() for variant in chosen):
        model = model_source(model)
        _check_texts(data, validation, test)
    from transformers.utils import logging

    from fastweights.experiments.job import Setup
    from fastweights.experiments.runner import compare as run
    from fastweights.experiments.runner import name_tests

    logging.disable_progress_bar()
    if device not in (None, "cpu"):
        usable_device(device)
    setup = Setup(output, model, data, validation, name_tests(test), recall, limit, device, keep)
    outcome = run(chosen, setup, at_once=jobs, minutes=minutes)
    _print_comparison(outcome.results, list(setup.tests))
    outcome.check()


@reports_errors
def measure_run(
    training: Annotated[Path, typer.Argument(help="Folder of the training run.")],
    result: Annotated[Path, typer.Argument(help="JSON file for the result.")],
    name: Annotated[str, typer.Argument(help="Name of the run.")],
    tests: Annotated[str, typer.Option(help="Texts by their names, as JSON.")] = "{}",
    recall: Annotated[bool, typer.Option("--recall", help="Measure recall.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Measure the best model of a trained run of a comparison. `compare` starts this."""
    from transformers.utils import logging

    from fastweights.experiments.measure import measure_run as measure

    logging.disable_progress_bar()
    measure(training, result, name, json.loads(tests), recall, device)


def _check_texts(data: str, validation: str, tests: list[str]) -> None:
    check_data(data)
    for argument, sources in (("validation", [validation]), ("test", tests)):
        for source in sources:
            with error_context(Argument(argument), ": "):
                check_data(source)


def _print_comparison(results: list[TrainingResult], tests: list[str]) -> None:
    headers = ("tokens", "validation", *tests, "diverged")
    table = Table("run", *(Column(escape(header), justify="right") for header in headers), box=None)
    for result in results:
        measured = {test.data: test.token for test in result.tests or ()}
        perplexities = [result.best and result.best.perplexity, *(measured.get(test) for test in tests)]
        shown = ["–" if value is None else f"{value:,.2f}" for value in perplexities]
        diverged = "" if result.diverged is None else f"step {result.diverged.step}"
        table.add_row(escape(result.name), f"{result.tokens:,}", *shown, diverged)
    if results:
        console().print(table, *_recall_tables(results))


def _recall_tables(results: list[TrainingResult]) -> list[Table]:
    """A table for each probe of recall that was run: accuracy by distance."""
    from fastweights.report.comparison import recalled
    from fastweights.report.quality import PROBES

    tables = []
    for probe, what in PROBES.items():
        distances = sorted({distance for result in results for distance in recalled(result, probe)})
        table = Table(what, *(Column(f"{distance}", justify="right") for distance in distances), box=None)
        for result in results:
            found = recalled(result, probe)
            table.add_row(escape(result.name), *(f"{found[d]:.0%}" if d in found else "–" for d in distances))
        tables += [table] if distances else []
    return tables
