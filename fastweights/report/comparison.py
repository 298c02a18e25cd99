"""Runs that are the cells of a table, as a paper prints it: what each reached, and beside it the paper's value."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastweights.report.page import Plot, Table
from fastweights.report.parts import LONGEST_NAME, file_names, plot, table
from fastweights.report.plots import COLOURS, DASHES, Line
from fastweights.report.results import (
    DIVERGED,
    MISSING,
    Entry,
    count_text,
    finite,
    number,
    objects,
    perplexity_text,
    value_at,
    whole,
)
from fastweights.report.training import bases_of, seed_lines, validation_of, validation_panel

PERPLEXITY = "validation perplexity"
UNDEFINED = "N/A"
MOST_PAIRS = 5
# Of a table's name in a plot's title and file.


@dataclass(frozen=True)
class Cell:
    """The runs of one place in a table, which differ in their seeds; `column` is empty where there is only one."""

    row: str
    column: str
    runs: Sequence[Entry]

    @property
    def label(self) -> str:
        return f"{self.row} ({self.column})" if self.column else self.row

    @property
    def failed(self) -> list[Entry]:
        return [run for run in self.runs if run.diverged or _is_broken(_best(run))]

    @property
    def reached(self) -> list[float]:
        """The best validation perplexity of each run that did not diverge."""
        found = [finite(_best(run)) for run in self.runs if run not in self.failed]
        return [perplexity for perplexity in found if perplexity is not None]

    @property
    def value(self) -> float | None:
        """For the order of cells: a run that diverged is worse than any other."""
        return statistics.mean(self.reached) if self.reached else math.inf if self.failed else None

    @property
    def text(self) -> str:
        before = [perplexity for run in self.failed if (perplexity := finite(_best(run))) is not None]
        if before and not self.reached:
            return f"{DIVERGED} (reached {perplexity_text(min(before))})"
        text = _mean_text(self.reached, len(self.failed))
        return UNDEFINED if text == MISSING and self.paper == UNDEFINED else text

    @property
    def paper(self) -> Any:
        """As the paper prints it: a number, diverged, N/A; None where no run says."""
        found = (value_at(run.body, "cell", "paper") for run in self.runs)
        return next((value for value in found if number(value) is not None or _words(value)), None)

    @property
    def paper_text(self) -> str:
        """A number with the digits that the paper gives, no more."""
        if self.paper is None:
            return MISSING
        return DIVERGED if self.paper_value == math.inf else str(self.paper)

    @property
    def paper_value(self) -> float | None:
        if isinstance(self.paper, str):
            return math.inf if self.paper.casefold() == DIVERGED else None
        return math.inf if _is_broken(self.paper) else finite(self.paper)


@dataclass(frozen=True)
class Comparison:
    """A table of runs; rows and columns are in the order in which the results name them."""

    name: str
    cells: Sequence[Cell]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def runs(self) -> list[Entry]:
        return [run for cell in self.cells for run in cell.runs]


def comparisons(runs: Sequence[Entry]) -> list[Comparison]:
    places: dict[str, dict[tuple[str, str], list[Entry]]] = {}
    for run in runs:
        if name := table_of(run):
            row, column = (_words(value_at(run.body, "cell", part)) for part in ("row", "column"))
            places.setdefault(name, {}).setdefault((row or MISSING, column), []).append(run)
    return [Comparison(name, [Cell(*place, of) for place, of in cells.items()]) for name, cells in places.items()]


def table_of(run: Entry) -> str:
    """The table that a run is for; empty where it is for none."""
    return _words(value_at(run.body, "cell", "table"))


def _words(value: Any) -> str:
    if isinstance(value, str):
        return " ".join(value.split())
    return "" if finite(value) is None else f"{value:g}"


def _best(run: Entry) -> Any:
    return value_at(run.body, "best", "perplexity")


def _is_broken(perplexity: Any) -> bool:
    return number(perplexity) is not None and finite(perplexity) is None


def _mean_text(values: Sequence[float], failed: int) -> str:
    """The mean, the range where there are several, and how many more diverged."""
    if not values:
        return DIVERGED if failed else MISSING
    text = perplexity_text(statistics.mean(values))
    text += f" ({perplexity_text(min(values))} to {perplexity_text(max(values))})" if len(values) > 1 else ""
    return text + (f", {failed} of {len(values) + failed} diverged" if failed else "")


def comparison_tables(compared: Comparison) -> list[Table]:
    make = _pivot if any(compared.columns) else _list
    header, rows = make(compared)
    return table(compared.name, [compared.name, *header], rows, compared.runs, names=1, note=_note(compared))


def _pivot(compared: Comparison) -> tuple[list[str], list[list[str]]]:
    """Columns in pairs, ours and the paper's."""
    cells = {(cell.row, cell.column): cell for cell in compared.cells}
    titles = [(column, f"{column}: paper") if column else (PERPLEXITY, "paper") for column in compared.columns]
    rows = []
    for row in compared.rows:
        of_row = [cells.get((row, column)) for column in compared.columns]
        pairs = [(cell.text, cell.paper_text) if cell else (MISSING, MISSING) for cell in of_row]
        rows.append([row, *itertools.chain.from_iterable(pairs)])
    return list(itertools.chain.from_iterable(titles)), rows


def _list(compared: Comparison) -> tuple[list[str], list[list[str]]]:
    tests = _tests(compared.runs)
    rows = []
    for cell in compared.cells:
        tested = [_test_text(cell.runs, place) for place in tests]
        rows.append([cell.row, str(len(cell.runs)), _token_counts(cell.runs), cell.text, *tested, cell.paper_text])
    return ["seeds", "tokens", PERPLEXITY, *tests.values(), "paper"], rows


def _token_counts(runs: Sequence[Entry]) -> str:
    found = sorted({count for run in runs if (count := finite(run.body.get("tokens"))) is not None})
    return " to ".join(count_text(count) for count in dict.fromkeys([*found[:1], *found[-1:]])) or MISSING


# The data of a test, its window and its context.
Place = tuple[str, float | None, float | None]


def _tests(runs: Sequence[Entry]) -> dict[Place, str]:
    """The title of every test: its data, and what else is needed to tell it from the others."""
    places = list(dict.fromkeys(_place(test) for run in runs for test in objects(run.body, "tests")))
    titles = {}
    for place in places:
        same = [other for other in places if other[0] == place[0]]
        differing = [i for i in (1, 2) if len({other[i] for other in same}) > 1]
        titles[place] = ", ".join([place[0], *(f"{('', 'window', 'context')[i]} {whole(place[i])}" for i in differing)])
    return titles


def _place(test: dict[str, Any]) -> Place:
    return _words(test.get("data")) or "test", finite(test.get("length")), finite(test.get("context"))


def _test_text(runs: Sequence[Entry], place: Place) -> str:
    """A seed that diverged is counted, and not in the mean."""
    measured = [(run, test) for run in runs for test in objects(run.body, "tests") if _place(test) == place]
    broken = [run.diverged is not None or _is_broken(test.get("token")) for run, test in measured]
    found = [finite(test.get("token")) for (_, test), is_broken in zip(measured, broken, strict=True) if not is_broken]
    failed = sum(broken)
    return _mean_text([perplexity for perplexity in found if perplexity is not None], failed)


def _note(compared: Comparison) -> str:
    runs, bases = compared.runs, bases_of(compared.runs)
    unfinished = [run.label for run in runs if run.body.get("finished") is False and not run.diverged]
    several = any(len(cell.runs) > 1 for cell in compared.cells)
    sentences = [
        f"The base model: {', '.join(map(perplexity_text, bases))}." if bases else "",
        "Of several seeds the mean, in brackets the lowest and the highest." if several else "",
        f"Not finished: {', '.join(unfinished)}." if unfinished else "",
        order_text(compared),
    ]
    return "".join(f" {sentence}" for sentence in sentences if sentence)


def order_text(compared: Comparison) -> str:
    """In words: whether the cells are in the paper's order. Empty where fewer than two have a value here and there."""
    known = [(cell, cell.value, cell.paper_value) for cell in compared.cells]
    ranked = [(cell, ours, paper) for cell, ours, paper in known if ours is not None and paper is not None]
    pairs = [_pair(a, b) for a, b in itertools.combinations(ranked, 2)]
    tau = kendall([pair.orders for pair in pairs])
    if tau is None:
        return ""
    swapped = sorted((pair for pair in pairs if math.prod(pair.orders) < 0), key=lambda pair: -pair.apart)
    words = [f"here {pair.better} is better than {pair.worse}" for pair in swapped[:MOST_PAIRS]]
    words += [f"and {len(swapped) - MOST_PAIRS} more"] if len(swapped) > MOST_PAIRS else []
    worst = ", diverged as the worst" if any(math.inf in values for _, *values in ranked) else ""
    named = f" ({'; '.join(words)})" if words else ""
    return (
        f"Order of {len(ranked)} cells against the paper's{worst}: Kendall's tau {round(tau, 2) + 0.0:.2f}, "
        f"{len(swapped) or 'none'} of {len(pairs)} pairs ordered differently{named}."
    )


@dataclass(frozen=True)
class _Pair:
    """Two cells: their order here and in the paper, how far apart the paper has them, and which is better here."""

    orders: tuple[int, int]
    apart: float
    better: str
    worse: str


def _pair(a: tuple[Cell, float, float], b: tuple[Cell, float, float]) -> _Pair:
    here, there = ((x > y) - (x < y) for x, y in zip(a[1:], b[1:], strict=True))
    better, worse = (b, a) if here > 0 else (a, b)
    return _Pair((here, there), abs(a[2] - b[2]), better[0].label, worse[0].label)


def kendall(orders: Sequence[tuple[int, int]]) -> float | None:
    """Kendall's tau-b from the order of every pair on both sides: -1, 1, or 0 for a tie. None where all tie on one."""
    here, there = (sum(pair[side] != 0 for pair in orders) for side in (0, 1))
    return sum(a * b for a, b in orders) / math.sqrt(here * there) if here and there else None


def comparison_plots(compared: Sequence[Comparison]) -> list[list[Plot]]:
    """Of each table the validation perplexity of its runs."""
    files = file_names([of.name for of in compared])
    return [_plot(of, f"comparison_{file}") for of, file in zip(compared, files, strict=True)]


def _plot(compared: Comparison, file: str) -> list[Plot]:
    cells = [cell for cell in compared.cells if any(validation_of(run.body) for run in cell.runs)]
    lines = [line for cell in cells for line in _lines(cell, *_look(compared, cell))]
    title = f"{compared.name[:LONGEST_NAME]}{'…' * (len(compared.name) > LONGEST_NAME)}: {PERPLEXITY}"
    panel = validation_panel("tokens", lines, bases_of(compared.runs), title=title)
    return plot(file, panel, compared.runs, name=f"{compared.name} plot")


def _look(compared: Comparison, cell: Cell) -> tuple[int, int]:
    """Colour and dashes: of the row and the column where there are enough of both, else one after the other."""
    rows, columns = compared.rows, compared.columns
    if len(rows) <= len(COLOURS) and len(columns) <= len(DASHES):
        return rows.index(cell.row), columns.index(cell.column)
    return compared.cells.index(cell), 0


def _lines(cell: Cell, colour: int, dash: int) -> list[Line]:
    if len(cell.runs) > 1:
        return seed_lines(cell.label, [run.body for run in cell.runs], colour, dash)
    label, failed = cell.label + "*" * bool(cell.failed), bool(cell.failed)
    return [Line(label, validation_of(cell.runs[0].body), colour, ends_badly=failed, dash=dash)]
