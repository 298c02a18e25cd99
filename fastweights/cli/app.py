"""The command line: parses, calls, prints. What needs torch is imported inside the commands: help must be instant."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table

from fastweights import __version__
from fastweights.cli.generate import generate
from fastweights.cli.measure import evaluate, profile, report
from fastweights.cli.options import (
    DTYPE_HELP,
    Dtype,
    SavedModel,
    given_options,
    reports_errors,
    stage_help,
    takes_changes,
    takes_settings,
    usable_device,
)
from fastweights.cli.rank import rank
from fastweights.config import FastWeightsConfig

if TYPE_CHECKING:
    from fastweights.modeling.description import Description

app = typer.Typer(
    help="Pretrained Transformers into recurrent models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The `fastweights` program. Its own messages take the place of transformers' warnings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command()
@reports_errors
@takes_settings
def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Pretrained model: a hub id, a folder or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the converted model to.")],
    config: FastWeightsConfig,
    dtype: Annotated[Dtype, typer.Option(help=DTYPE_HELP)] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output folder that is not empty.")] = False,
) -> None:
    """Replace a model's attention by fast weights. The tokenizer, where there is one, is saved with the result."""
    from transformers.utils import logging

    from fastweights import convert as converter
    from fastweights.loading import load, load_tokenizer, new_model_folder
    from fastweights.modeling.description import describe

    logging.disable_progress_bar()
    with (
        new_model_folder(output, overwrite, source=model) as folder,
        Console(stderr=True).status(f"loading {escape(model)}") as status,
    ):
        pretrained, tokenizer = load(model, dtype=dtype), load_tokenizer(model)
        status.update("converting")
        converted = converter(pretrained, config)
        converted.config.fastweights_base = str(Path(model).resolve()) if Path(model).exists() else model
        status.update(f"saving to {escape(str(output))}")
        converted.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    _print_description(describe(converted), str(output))


@app.command()
@reports_errors
def info(
    folder: SavedModel,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Say what a saved model is and what it keeps in memory. Reads no weights."""
    from fastweights.modeling.description import describe_folder

    described = describe_folder(folder)
    if as_json:
        typer.echo(json.dumps(asdict(described), indent=1))
    else:
        _print_description(described, str(folder))


def _print_description(described: Description, name: str) -> None:
    from fastweights.modeling.description import facts

    summary = Table(title=escape(name), title_justify="left", show_header=False, box=None)
    for label, value in facts(described).items():
        summary.add_row(label, value)
    headers = ("tokens", "this model", "KV cache of the base model")
    memory = Table(*(Column(header, justify="right") for header in headers), box=None)
    for row in described.memory:
        memory.add_row(f"{row.tokens:,}", decimal(row.here), decimal(row.attention))
    Console().print(summary, "", memory)


app.command()(generate)


@app.command()
@reports_errors
@takes_changes
def train(
    changes: dict[str, Any],
    model: Annotated[str | None, typer.Argument(metavar="[DIR]", help="Folder of a saved model.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text to train on: a file (text, JSON lines, parquet; .xz, .gz), a folder, or hf:NAME."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New folder for the run.")] = None,
    recipe: Annotated[
        str, typer.Option(help="Name of a shipped recipe (distill, finetune, finish, paper), or a YAML file.")
    ] = "distill",
    validation: Annotated[str | None, typer.Option(help="Text to validate on, as --data.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="The unconverted model; by default the one that DIR was converted from.")
    ] = None,
    change: Annotated[list[str], typer.Option("--set", help=stage_help())] = [],  # noqa: B006 (typer makes a new one)
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and data sets that holds the text.")] = "text",
    limit: Annotated[int | None, typer.Option(min=1, help="Tokens to read of the data, at most.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or by default a GPU where there is one.")] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the model over the processes of torchrun (FSDP2).")
    ] = False,
    report_to: Annotated[str | None, typer.Option(help="Tracker of accelerate: tensorboard, wandb, ...")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was begun.")] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Train a converted model back to its old quality. Killed at any moment, a run goes on with --resume."""
    from transformers.utils import logging

    from fastweights.training.recipe import change as changed
    from fastweights.training.recipe import load_recipe, parse_changes
    from fastweights.training.trainer import TrainConfig
    from fastweights.training.trainer import resume as resume_training
    from fastweights.training.trainer import train as start_training

    logging.disable_progress_bar()
    if resume is not None:
        others = given_options(context, besides="resume")
        if others:
            raise ValueError(f"--resume goes on with a run as it was begun: give it alone, without {', '.join(others)}")
        result, folder = resume_training(resume), resume
    else:
        if model is None or data is None or output is None:
            missing = [n for n, v in (("DIR", model), ("--data", data), ("--output", output)) if v is None]
            raise ValueError(f"{', '.join(missing)} missing: fastweights train DIR --data TEXT -o FOLDER")
        made = changed(load_recipe(recipe), changes | parse_changes(change))
        task = TrainConfig(
            model=model,
            data=data,
            recipe=made,
            teacher=teacher,
            validation=validation,
            text_field=text_field,
            limit=limit,
            device=device,
            shard=shard,
            report_to=report_to,
        )
        result, folder = start_training(task, output), output
    _print_training(result, folder)


def _print_training(result: dict[str, Any], folder: Path) -> None:
    console = Console()
    if os.environ.get("RANK", "0") != "0":
        return
    best, base = result["best"], result["base"]
    if best is not None:
        ratio = "" if base is None else f", {best['perplexity'] / base['perplexity']:.3f} times the base's"
        console.print(f"validation perplexity {best['perplexity']:,.2f}{ratio}", highlight=False)
    chosen = folder / ("best" if best is not None else "last")
    console.print(
        f"{result['tokens']:,} tokens in {result['seconds']:,.0f} s; model: {chosen}; result: {folder / 'result.json'}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
@reports_errors
def compare(
    grid: Annotated[
        str,
        typer.Argument(
            metavar="GRID", help="Name of a shipped grid (paper, paper_longer, smollm2, smollm2_long), or a YAML file."
        ),
    ],
    model: Annotated[str, typer.Option(help="The base of all runs: a hub id, a folder or a GGUF file.")],
    data: Annotated[str, typer.Option(help="Text to train on, as for train.")],
    validation: Annotated[str, typer.Option(help="Text to validate on, as --data.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for runs and results.")],
    test: Annotated[list[str], typer.Option(help="Text for each best model's perplexity; may be given again.")] = [],  # noqa: B006
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, each a process; they share the device.")] = 1,
    only: Annotated[str, typer.Option(help="Only these runs of the grid: NAME,NAME.")] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the models of finished runs.")] = False,
    change: Annotated[list[str], typer.Option("--set", help="Change every run's recipe, as --set of train.")] = [],  # noqa: B006
    limit: Annotated[int | None, typer.Option(min=1, help="Tokens to read of the data, at most.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, or by default a GPU where there is one.")] = None,
) -> None:
    """Train many variants of one model and compare them. Stopped or killed, it goes on with the same command."""
    from fastweights.experiments.grid import choose, load_grid, with_changes
    from fastweights.training.recipe import parse_changes

    # before torch is imported: what is wrong here is said at once
    chosen = with_changes(choose(load_grid(grid), only.split(",")), parse_changes(change))
    from transformers.utils import logging

    from fastweights.experiments.runner import compare as run
    from fastweights.experiments.runner import make_setup

    logging.disable_progress_bar()
    if device not in (None, "cpu"):
        usable_device(device)
    setup = make_setup(output, model, data, validation, test, limit=limit, device=device, keep=keep)
    outcome = run(chosen, setup, at_once=jobs)
    _print_comparison(outcome.results, list(setup.tests))
    outcome.check()


def _print_comparison(results: list[dict[str, Any]], tests: list[str]) -> None:
    headers = ("tokens", "validation", *tests, "diverged")
    table = Table("run", *(Column(escape(header), justify="right") for header in headers), box=None)
    for result in results:
        measured = {test["data"]: test["token"] for test in result["tests"]}
        best, diverged = result["best"], result["diverged"]
        perplexities = [best and best["perplexity"], *(measured.get(test) for test in tests)]
        shown = ["–" if value is None else f"{value:,.2f}" for value in perplexities]
        ended = "" if diverged is None else f"step {diverged['step']}"
        table.add_row(escape(result["name"]), f"{result['tokens']:,}", *shown, ended)
    if results:
        Console().print(table)


app.command("eval")(evaluate)
app.command()(profile)
app.command()(report)
app.command()(rank)


@app.command()
@reports_errors
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what is made.")] = Path(
        "quickstart-output"
    ),
) -> None:
    """The whole story on a small packaged model: convert it, train it back, measure it, report."""
    from transformers.utils import logging

    from fastweights.quickstart import run

    logging.disable_progress_bar()
    run(output, Console())
