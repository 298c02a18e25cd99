"""The `fastweights` program: assembles the commands. They import torch inside, so that help is instant."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fastweights import __version__
from fastweights.cli.chat import chat
from fastweights.cli.compare import compare, measure_run
from fastweights.cli.convert import convert
from fastweights.cli.evaluate import evaluate
from fastweights.cli.generate import generate
from fastweights.cli.info import info
from fastweights.cli.options import stage_table
from fastweights.cli.profile import profile
from fastweights.cli.quickstart import quickstart
from fastweights.cli.rank import rank
from fastweights.cli.report import report
from fastweights.cli.serve import serve
from fastweights.cli.train import train

app = typer.Typer(
    help="Turn pretrained Transformers into recurrent models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
app.command()(convert)
app.command()(info)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command(epilog=stage_table())(train)
app.command()(compare)
app.command(hidden=True)(measure_run)
app.command("eval")(evaluate)
app.command()(profile)
app.command()(report)
app.command()(rank)
app.command()(quickstart)


def main() -> None:
    """The `fastweights` program. Its own messages take the place of transformers' warnings."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()


def _show_version(shown: bool) -> None:
    if shown:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass
