"""`fastweights quickstart`: convert, train and measure the packaged model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fastweights.cli.options import check_output_folder, reports_errors
from fastweights.cli.output import console


@reports_errors
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the models and the report.")] = Path(
        "quickstart-output"
    ),
) -> None:
    """Convert, train and evaluate a small packaged model, and write a report."""
    check_output_folder(output)
    with Console(stderr=True).status("starting"):
        from transformers.utils import logging

        from fastweights.quickstart import run

    logging.disable_progress_bar()
    run(output, console())
