"""What the tables and plots of a report have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fastweights.report.page import Plot, Table
from fastweights.report.plots import Line, Panel, draw
from fastweights.report.results import MISSING, Entry, Result, finite, objects, whole

Sources = Iterable[Entry | Result]
MOST_FILES = 8
LONGEST_NAME = 24


def source(sources: Sources) -> str:
    """Of many files the first three: the last table of a report has all."""
    files = list(dict.fromkeys(source.file for source in sources))
    shown = files if len(files) <= MOST_FILES else [*files[:2], f"{files[2]} and {len(files) - 3} more files"]
    return f"From {', '.join(shown)}."


def file_names(names: Sequence[str]) -> list[str]:
    """For each of the names one of a file, that no other has."""
    files: list[str] = []
    for name in names:
        file = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")[:LONGEST_NAME] or "table"
        files.append(file if file not in files else f"{file}_{len(files) + 1}")
    return files


def plot(file: str, panel: Panel, sources: Sources, name: str = "") -> list[Plot]:
    """None where nothing was measured. Its name is that of its file unless it is given one."""
    caption = f"{panel.title}. {source(sources)}"
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
    """None without rows; columns in which nothing was measured are left out."""
    kept = [i for i in range(len(header)) if i < names or any(row[i] != MISSING for row in rows)]
    shown = [[row[i] for i in kept] for row in rows]
    return [Table([header[i] for i in kept], shown, names, source(sources) + note, name)] if rows else []


def pivot(
    name: str,
    models: Sequence[Entry],
    path: Sequence[str],
    key: Sequence[str],
    value: str,
    text: Callable[[Any], str],
    *,
    header: Sequence[str],
    shared: Sequence[str] = (),
) -> list[Table]:
    """A row for each place measured, a column for each model; `shared` values are the same for all models."""
    measured = [by_key(model, path, key) for model in models]
    rows = []
    for place in sorted({place for found in measured for place in found}):
        some = next(found[place] for found in measured if place in found)
        cells = [text(found.get(place, {}).get(value)) for found in measured]
        rows.append([*map(whole, place), *cells, *(text(some.get(field)) for field in shared)])
    return table(name, [*header, *(model.label for model in models), *shared], rows, models, names=0)


def by_key(entry: Entry, path: Sequence[str], key: Sequence[str]) -> dict[tuple[float, ...], dict[str, Any]]:
    """The objects at a path by the numbers that say where each was measured."""
    found = {}
    for row in objects(entry.body, *path):
        place = tuple(number for name in key if (number := finite(row.get(name))) is not None)
        if len(place) == len(key):
            found[place] = row
    return found


def rows_of(entries: Sequence[Entry], name: str) -> list[tuple[Entry, dict[str, Any]]]:
    return [(entry, row) for entry in entries for row in objects(entry.body, name)]


def points(rows: Sequence[dict[str, Any]], x: str, y: str) -> list[tuple[Any, Any]]:
    return [(row.get(x), row.get(y)) for row in rows]


def colour_of(item: Any, items: Sequence[Any], base: Any) -> int | None:
    """The base model is grey, the others take the palette in turn."""
    return None if item is base else [other for other in items if other is not base].index(item)


def is_wide(lines: Sequence[Line], levels: Sequence[tuple[float, str]] = ()) -> bool:
    """Whether values differ so much that a linear axis would hide most of them."""
    values = [y for line in lines for _, y in line.points if finite(y)] + [level for level, _ in levels]
    return bool(values) and min(values) > 0 and max(values) > 4 * min(values)
