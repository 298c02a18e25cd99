"""`fastweights train`: train a converted model, or resume a run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fastweights.cli.options import (
    UsageError,
    check_output_folder,
    given_by_set,
    given_options,
    model_source,
    reports_errors,
    takes_changes,
)
from fastweights.data.cache_limit import VARIABLE
from fastweights.data.cache_limit import cache_limit as parsed_limit
from fastweights.data.readers import check_data
from fastweights.results import TrainingResult
from fastweights.training.recipe import LARGEST_RATE, for_all_stages, load_recipe, parse_changes
from fastweights.training.recipe import change as changed
from fastweights.training.run_folder import check_new_run, check_resumes
from fastweights.utils.errors import Argument, error_context

PARENT_POLL_SECONDS = 0.5


@reports_errors
@takes_changes
def train(
    changes: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[DIR]", help="Model to train: a folder, a training run, a hub id or a GGUF file."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text or chats to train on: a file (text, JSON lines, parquet; .xz, .gz), a folder, or hf:NAME."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New folder for the run.")] = None,
    recipe: Annotated[
        str, typer.Option(help="Name of a shipped recipe (distill, finetune, finish, paper), or a YAML file.")
    ] = "distill",
    validation: Annotated[str | None, typer.Option(help="Text to validate on, in the same formats as --data.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="The unconverted model; by default the one that DIR was converted from.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=LARGEST_RATE,
            help="Peak learning rate of the new attention in all stages; by default the recipe's. "
            "--set distill.learning_rate=VALUE changes that of one stage.",
        ),
    ] = None,
    body_learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=LARGEST_RATE,
            help="Peak learning rate of the rest of the model in all stages (0 freezes it); by default the recipe's.",
        ),
    ] = None,
    change: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="Change a setting of a stage, such as distill.tokens=1000000; may be repeated. The table below lists "
            "them.",
        ),
    ] = [],  # noqa: B006 (typer makes a new one)
    text_field: Annotated[str, typer.Option(help="Field of JSON lines and data sets that holds the text.")] = "text",
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most this many tokens of the data.")] = None,
    cache_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of the cache of tokens, at most, such as 20GB: the files that were not used for longest are "
            "removed, but none in use. By default $FASTWEIGHTS_CACHE_LIMIT, else there is no limit.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the model over the processes of torchrun (FSDP2).")
    ] = False,
    report_to: Annotated[str | None, typer.Option(help="Tracker of accelerate, such as tensorboard or wandb.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder, with its own settings.")] = None,
    parent: Annotated[int | None, typer.Option(hidden=True, help="Stop when this process has ended.")] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Train a converted model until it is close to its base. --resume continues an interrupted run."""
    if parent is not None:
        _stop_with(parent)
    parsed_limit(cache_limit)
    if cache_limit is not None:
        os.environ[VARIABLE] = cache_limit  # for all that reads text in this process
    if resume is not None:
        others = given_options(context, besides=("resume", "parent", "cache_limit"))
        if others:
            raise UsageError(f"--resume takes the settings of the run: give it alone, without {', '.join(others)}")
        check_resumes(resume)
        with _importing():
            from fastweights.training.trainer import resume as resume_training
        result, folder = resume_training(resume), resume
    else:
        if model is None or data is None or output is None:
            missing = [n for n, v in (("DIR", model), ("--data", data), ("--output", output)) if v is None]
            raise UsageError(f"{', '.join(missing)} missing: fastweights train DIR --data TEXT -o FOLDER")
        loaded, set_changes = load_recipe(recipe), parse_changes(change)
        rates = {"learning_rate": learning_rate, "body_learning_rate": body_learning_rate}
        with given_by_set(set_changes):
            made = changed(loaded, changes | for_all_stages(loaded, rates) | set_changes)
        check_new_run(output)
        check_output_folder(output)
        source = model_source(model)
        teacher = None if teacher is None else model_source(teacher, "teacher")
        _check_texts(data, validation, text_field)
        with _importing():
            from fastweights.training.trainer import TrainConfig
            from fastweights.training.trainer import train as start_training
        config = TrainConfig(
            model=source,
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
        result, folder = start_training(config, output), output
    _print_training(result, folder)


@contextmanager
def _importing() -> Iterator[None]:
    """In its block torch and transformers are imported, after all that can be checked without them."""
    with Console(stderr=True).status("starting"):
        yield
        from transformers.utils import logging

        logging.disable_progress_bar()


def _check_texts(data: str, validation: str | None, text_field: str) -> None:
    check_data(data, text_field)
    if validation is not None:
        with error_context(Argument("validation"), ": "):
            check_data(validation, text_field)


def _stop_with(parent: int) -> None:
    """Ask this process to stop when its parent has ended: a comparison that was killed leaves no runs behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _print_training(result: TrainingResult, folder: Path) -> None:
    console = Console()
    if os.environ.get("RANK", "0") != "0":
        return
    best, base = result.best, result.base
    if best is not None:
        ratio = "" if base is None else f", {best.perplexity / base.perplexity:.3f} times the base's"
        when = f"after {best.tokens:,} tokens" if best.step else "before the first step"
        console.print(f"best validation perplexity {best.perplexity:,.2f} ({when}){ratio}", highlight=False)
    chosen = folder / ("best" if best is not None else "last")
    console.print(
        f"{result.tokens:,} tokens in {result.seconds:,.0f} s; model: {chosen}; result: {folder / 'result.json'}",
        highlight=False,
        soft_wrap=True,
    )
