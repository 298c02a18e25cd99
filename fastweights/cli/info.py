"""`fastweights info`: describe a model without reading its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fastweights.cli.options import SavedModel, model_source, reports_errors
from fastweights.cli.output import print_description


@reports_errors
def info(
    model: SavedModel,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the settings and the memory use of a model, without reading its weights."""
    source = model_source(model)
    with Console(stderr=True).status(f"reading {escape(model)}"):
        from fastweights.modeling.description import describe_source

        described = describe_source(source)
    if as_json:
        typer.echo(json.dumps(asdict(described), indent=1))
    else:
        print_description(described, model)
