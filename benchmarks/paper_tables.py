"""Tables 1 and 2 of the paper beside our runs of the same variants, and whether the variants are in the same order.

The runs are results/paper/*.json. Their cells, from recipes/grids/paper.yaml, name the table, the row, the column and
what the paper has there. benchmarks/figures.py fills docs/paper.md with the tables and plots of `paper_tables`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.report.comparison import (
    PERPLEXITY,
    Comparison,
    VariantRuns,
    comparison_note,
    comparison_plots,
    comparisons,
    variant_rows,
)
from fastweights.report.page import Plot, Table
from fastweights.report.parts import table
from fastweights.report.results import ResultFile, read_results, runs_in
from fastweights.report.text import DIVERGED, MISSING, finite, is_broken

RESULTS = Path(__file__).parent.parent / "results" / "paper"
# Rows and columns are in the order in which the files name them.
FILES = (
    *("add_baseline", "add_no_norm", "add_plain", "add_norm_no_map"),
    *("delta_baseline", "delta_no_norm", "delta_plain"),
    *("gated_baseline", "gated_no_norm", "gated_plain", "decay_no_norm", "decay_plain"),
    *("base", "local_32", "gated_16", "decay_16", "gated_32_seed0", "gated_32_seed1"),
    *("decay_32_seed0", "decay_32_seed1", "gated_64", "decay_64"),
)
UNDEFINED = "N/A"
MOST_PAIRS = 5


def paper_tables(files: Sequence[ResultFile] | None = None) -> dict[str, Table | Plot]:
    """The paper's tables with our values beside, and plots of the runs, by name: "Table 1", "Table 1 plot", ...

    Args:
        files: Training results with cells; by default those of results/paper.
    """
    found = read_results([RESULTS / f"{name}.json" for name in FILES] if files is None else files)
    compared = comparisons(runs_in(found))
    parts: list[Table | Plot] = []
    for of, plots in zip(compared, comparison_plots(compared), strict=True):
        parts += [*_table(of), *plots]
    return {part.name: part for part in parts}


@dataclass(frozen=True)
class Cell:
    """A variant here, and what the paper prints in its place."""

    variant: VariantRuns

    @property
    def value(self) -> float | None:
        """For the order of cells: a run that diverged is worse than any other."""
        reached = self.variant.reached
        return statistics.mean(reached) if reached else math.inf if self.variant.failed else None

    @property
    def text(self) -> str:
        text = self.variant.text
        return UNDEFINED if text == MISSING and self.paper == UNDEFINED else text

    @property
    def paper(self) -> Any:
        """As the paper prints it: a number, diverged, N/A; None where no run says."""
        found = [(run.cell or {}).get("paper") for run in self.variant.runs]
        return next((value for value in found if isinstance(value, str | int | float) and value != ""), None)

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
        return math.inf if is_broken(self.paper) else finite(self.paper)


def _table(compared: Comparison) -> list[Table]:
    cells = [Cell(variant) for variant in compared.variants]
    header, rows = _pivot(compared, cells) if any(compared.columns) else _list(compared, cells)
    order = order_text(cells)
    note = comparison_note(compared) + (f" {order}" if order else "")
    return table(compared.name, [compared.name, *header], rows, compared.entries, names=1, note=note)


def _pivot(compared: Comparison, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Columns in pairs, ours and the paper's."""
    by_place: Mapping[tuple[str, str], Cell] = {(cell.variant.row, cell.variant.column): cell for cell in cells}
    titles = [(column, f"{column}: paper") if column else (PERPLEXITY, "paper") for column in compared.columns]
    rows = []
    for row in compared.rows:
        of_row = [by_place.get((row, column)) for column in compared.columns]
        pairs = [(cell.text, cell.paper_text) if cell else (MISSING, MISSING) for cell in of_row]
        rows.append([row, *itertools.chain.from_iterable(pairs)])
    return list(itertools.chain.from_iterable(titles)), rows


def _list(compared: Comparison, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    header, rows = variant_rows(compared)
    place = header.index(PERPLEXITY) + 1
    return [*header, "paper"], [
        [*row[:place], cell.text, *row[place + 1 :], cell.paper_text] for row, cell in zip(rows, cells, strict=True)
    ]


def order_text(cells: Sequence[Cell]) -> str:
    """In words: whether the cells are in the paper's order. Empty where fewer than two have a value here and there."""
    known = [(cell, cell.value, cell.paper_value) for cell in cells]
    ranked = [(cell, ours, paper) for cell, ours, paper in known if ours is not None and paper is not None]
    pairs = [_pair(a, b) for a, b in itertools.combinations(ranked, 2)]
    tau = kendall([pair.orders for pair in pairs])
    if tau is None:
        return ""
    differing = sorted((pair for pair in pairs if math.prod(pair.orders) < 0), key=lambda pair: -pair.apart)
    words = [f"here {pair.better} is better than {pair.worse}" for pair in differing[:MOST_PAIRS]]
    words += [f"and {len(differing) - MOST_PAIRS} more"] if len(differing) > MOST_PAIRS else []
    worst = ", diverged as the worst" if any(math.inf in values for _, *values in ranked) else ""
    named = f" ({'; '.join(words)})" if words else ""
    return (
        f"Order of {len(ranked)} cells against the paper's{worst}: Kendall's tau {round(tau, 2) + 0.0:.2f}, "
        f"{len(differing) or 'none'} of {len(pairs)} pairs ordered differently{named}."
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
    return _Pair((here, there), abs(a[2] - b[2]), better[0].variant.label, worse[0].variant.label)


def kendall(orders: Sequence[tuple[int, int]]) -> float | None:
    """Kendall's tau-b from the order of every pair on both sides: -1, 1, or 0 for a tie. None where all tie on one."""
    here, there = (sum(pair[side] != 0 for pair in orders) for side in (0, 1))
    return sum(a * b for a, b in orders) / math.sqrt(here * there) if here and there else None
