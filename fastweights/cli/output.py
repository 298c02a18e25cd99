"""What several commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from fastweights.modeling.description import Description
    from fastweights.results import Result


FULL_WIDTH = 10_000  # columns, more than any table has


def console() -> Console:
    """Standard output. Tables have their full width where it is a pipe or a file: rich would cut them at 80 columns."""
    stdout = Console()
    return stdout if stdout.is_terminal else Console(width=FULL_WIDTH)


def print_description(described: Description, name: str) -> None:
    """Print what a model is and how its memory grows."""
    from fastweights.modeling.description import summarize

    summary = Table(show_header=False, box=None)
    for label, value in summarize(described).items():
        summary.add_row(label, value)
    headers = ("tokens", "this model", "KV cache of the base model")
    memory = Table(*(Column(header, justify="right") for header in headers), box=None)
    for row in described.memory:
        memory.add_row(f"{row.tokens:,}", decimal(row.here), decimal(row.attention))
    stdout = console()
    stdout.print(f"[italic]{escape(name)}[/]", highlight=False, soft_wrap=True)  # a table would wrap its title
    stdout.print(summary, "", memory)


def print_tables(result: Result) -> None:
    """Print the tables that a report would have for a result."""
    from fastweights.report import tables_of

    stdout = console()
    for table in tables_of(result):
        shown = Table(
            *(Column(h, justify="left" if i < table.names else "right") for i, h in enumerate(table.header)), box=None
        )
        for row in table.rows:
            shown.add_row(*map(escape, row))
        stdout.print(shown, "")
