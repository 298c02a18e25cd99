"""`fastweights info`: describe a saved model without reading its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fastweights.cli.options import SavedModel, reports_errors
from fastweights.cli.output import print_description


@reports_errors
def info(
    folder: SavedModel,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the settings and the memory use of a saved model, without reading its weights."""
    from fastweights.modeling.description import describe_source

    described = describe_source(folder)
    if as_json:
        typer.echo(json.dumps(asdict(described), indent=1))
    else:
        print_description(described, str(folder))
