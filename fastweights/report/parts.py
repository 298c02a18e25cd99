"""What the tables and plots of a report have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fastweights.report.page import Plot, Table
from fastweights.report.plots import BarChart, Line, Panel, draw
from fastweights.report.text import MISSING, finite, whole

MOST_FILES = 8
LONGEST_NAME = 24


class FromFile(Protocol):
    """Anything that comes from a result file."""

    @property
    def file(self) -> str: ...


Sources = Iterable[FromFile]
# Where something was measured: a distance, or the ends of a range.
Place = tuple[int, ...]
# Cells by place, by the title of their column.
Columns = dict[str, Mapping[Place, str]]


def source_note(sources: Sources) -> str:
    """Name the files of the sources. Of many it names the first three, because the last table of a report has all."""
    files = list(dict.fromkeys(source.file for source in sources))
    shown = files if len(files) <= MOST_FILES else [*files[:2], f"{files[2]} and {len(files) - 3} more files"]
    return f"From {', '.join(shown)}."


def file_names(names: Sequence[str]) -> list[str]:
    """A file name for each of the names, all different."""
    files: list[str] = []
    for name in names:
        file = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")[:LONGEST_NAME] or "table"
        files.append(file if file not in files else f"{file}_{len(files) + 1}")
    return files


def plot(file: str, panel: Panel | BarChart, sources: Sources, name: str = "") -> list[Plot]:
    """A plot, none where nothing was measured. Its name is that of its file unless one is given."""
    caption = f"{panel.title}. {source_note(sources)}"
    name = name or f"{file.replace('_', ' ')} plot"
    return [] if panel.is_empty else [Plot(f"plots/{file}.svg", partial(draw, panel), caption, name)]


def table(
    name: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    sources: Sources,
    names: int,
    note: str = "",
) -> list[Table]:
    """A table, none without rows; columns in which nothing was measured are left out."""
    shown = [i for i in range(len(header)) if i < names or any(row[i] != MISSING for row in rows)]
    cells = [[row[i] for i in shown] for row in rows]
    return [Table([header[i] for i in shown], cells, names, source_note(sources) + note, name)] if rows else []


def pivot(name: str, header: Sequence[str], columns: Columns, sources: Sources) -> list[Table]:
    """A row for each place measured, a column for each title.

    Args:
        name: Of the table.
        header: Titles of what a place consists of.
        columns: Cells by place, by the column's title.
        sources: Where the cells come from.
    """
    places = sorted({place for cells in columns.values() for place in cells})
    rows = [[*map(whole, place), *(cells.get(place, MISSING) for cells in columns.values())] for place in places]
    return table(name, [*header, *columns], rows, sources, names=0)


def color_of(item: Any, items: Sequence[Any], base: Any) -> int | None:
    """The base model is grey, the others take the palette one after the other."""
    return None if item is base else next(i for i, x in enumerate(y for y in items if y is not base) if x is item)


def is_wide(lines: Sequence[Line], levels: Sequence[tuple[float, str]] = ()) -> bool:
    """Whether values differ so much that a linear axis would hide most of them."""
    values = [y for line in lines for _, y in line.points if finite(y)] + [level for level, _ in levels]
    return bool(values) and min(values) > 0 and max(values) > 4 * min(values)
