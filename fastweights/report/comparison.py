"""Runs of a grid side by side: a table with the seeds of a variant averaged, and their validation curves.

A grid names the table, the row and, if it has columns, the column of a run (`cell:`). Runs that agree in them are one
variant, and differ in their seeds. Whatever else a cell says is not interpreted here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastweights.report.page import Plot, Table
from fastweights.report.parts import LONGEST_NAME, file_names, plot, table
from fastweights.report.plots import COLORS, DASHES, Line
from fastweights.report.quality import PROBES
from fastweights.report.results import RunEntry
from fastweights.report.text import (
    DIVERGED,
    MISSING,
    count_text,
    finite,
    is_broken,
    percent_text,
    perplexity_text,
    whole,
)
from fastweights.report.training import Curve, bases_of, perplexity_of, seed_lines, validation_of, validation_panel
from fastweights.results import PerplexityRow, TrainingResult

PERPLEXITY = "validation perplexity"


@dataclass(frozen=True)
class VariantRuns:
    """The runs of one variant, which differ in their seeds; `column` is empty where the table has no columns."""

    row: str
    column: str
    entries: Sequence[RunEntry]

    @property
    def label(self) -> str:
        """Row and column in one name."""
        return f"{self.row} ({self.column})" if self.column else self.row

    @property
    def runs(self) -> list[TrainingResult]:
        """The results of the runs."""
        return [entry.run for entry in self.entries]

    @property
    def failed(self) -> list[TrainingResult]:
        """The runs that diverged, or whose best perplexity is not finite."""
        return [run for run in self.runs if run.diverged or is_broken(perplexity_of(run.best))]

    @property
    def reached(self) -> list[float]:
        """The best validation perplexity of each run that did not diverge."""
        sound = [run for run in self.runs if not (run.diverged or is_broken(perplexity_of(run.best)))]
        return [perplexity for run in sound if (perplexity := perplexity_of(run.best)) is not None]

    @property
    def text(self) -> str:
        """The mean of the seeds, or how they failed."""
        before = [best for run in self.failed if (best := finite(perplexity_of(run.best))) is not None]
        if before and not self.reached:
            return f"{DIVERGED} (reached {perplexity_text(min(before))})"
        return mean_text(self.reached, len(self.failed))


@dataclass(frozen=True)
class Comparison:
    """The variants of one table; rows and columns are in the order in which the results name them."""

    name: str
    variants: Sequence[VariantRuns]

    @property
    def rows(self) -> list[str]:
        """The names of the rows."""
        return list(dict.fromkeys(variant.row for variant in self.variants))

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(dict.fromkeys(variant.column for variant in self.variants))

    @property
    def entries(self) -> list[RunEntry]:
        """The runs of all variants."""
        return [entry for variant in self.variants for entry in variant.entries]


def comparisons(entries: Sequence[RunEntry]) -> list[Comparison]:
    """The tables that the runs name."""
    places: dict[str, dict[tuple[str, str], list[RunEntry]]] = {}
    for entry in entries:
        if name := table_of(entry):
            row, column = (_words((entry.run.cell or {}).get(part)) for part in ("row", "column"))
            places.setdefault(name, {}).setdefault((row or MISSING, column), []).append(entry)
    return [
        Comparison(name, [VariantRuns(*place, of) for place, of in found.items()]) for name, found in places.items()
    ]


def table_of(entry: RunEntry) -> str:
    """The table that a run is for; empty where it is for none."""
    return _words((entry.run.cell or {}).get("table"))


def _words(value: Any) -> str:
    """A name on one line; a grid may name a row by a number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return " ".join(value.split()) if isinstance(value, str) else f"{value:g}" if finite(value) is not None else ""


def mean_text(values: Sequence[float], failed: int) -> str:
    """The mean, the range where there are several values, and how many more diverged."""
    if not values:
        return DIVERGED if failed else MISSING
    text = perplexity_text(statistics.mean(values))
    text += f" ({perplexity_text(min(values))} to {perplexity_text(max(values))})" if len(values) > 1 else ""
    return text + (f", {failed} of {len(values) + failed} diverged" if failed else "")


def comparison_tables(compared: Comparison) -> list[Table]:
    """A table with a row for each variant, and one for each probe of recall that was run."""
    header, rows = variant_rows(compared)
    note = comparison_note(compared)
    tables = table(compared.name, [compared.name, *header], rows, compared.entries, names=1, note=note)
    for probe, what in PROBES.items():
        name, distances = f"{compared.name}: {what}", _distances(compared.entries, probe)
        rows = [
            [variant.label, *(_accuracy_text(variant.runs, probe, distance) for distance in distances)]
            for variant in compared.variants
        ]
        probed = table(name, [name, *map(whole, distances)], rows, compared.entries, names=1)
        tables += probed if distances else []
    return tables


def recalled(run: TrainingResult, probe: str) -> dict[int, float]:
    """The accuracy of a run's model in a probe of recall, by distance; empty where it was not measured."""
    return {row.distance: row.accuracy for row in getattr(run.recall, probe, ())}


def _distances(entries: Sequence[RunEntry], probe: str) -> list[int]:
    return sorted({distance for entry in entries for distance in recalled(entry.run, probe)})


def _accuracy_text(runs: Sequence[TrainingResult], probe: str, distance: int) -> str:
    """The mean of the seeds that did not diverge."""
    found = [recalled(run, probe).get(distance) for run in runs if run.diverged is None]
    measured = [accuracy for accuracy in found if accuracy is not None]
    return percent_text(statistics.mean(measured), 0) if measured else MISSING


def variant_rows(compared: Comparison) -> tuple[list[str], list[list[str]]]:
    """The titles but for the first, and a row for each variant."""
    tests = _tests(compared.entries)
    rows = [
        [
            variant.label,
            str(len(variant.entries)),
            _token_counts(variant.runs),
            variant.text,
            *(_test_text(variant.runs, place) for place in tests),
        ]
        for variant in compared.variants
    ]
    return ["seeds", "tokens", PERPLEXITY, *tests.values()], rows


def _token_counts(runs: Sequence[TrainingResult]) -> str:
    found = sorted({run.tokens for run in runs})
    return " to ".join(count_text(count) for count in dict.fromkeys([*found[:1], *found[-1:]]))


# The data of a test, its window and its context.
Place = tuple[str, int, int]


def _tests(entries: Sequence[RunEntry]) -> dict[Place, str]:
    """The title of every test: its data, and what else is needed to tell it from the others."""
    places = list(dict.fromkeys(_place(test) for entry in entries for test in entry.run.tests or ()))
    titles = {}
    for place in places:
        same = [other for other in places if other[0] == place[0]]
        window = f", window {whole(place[1])}" if len({other[1] for other in same}) > 1 else ""
        context = f", context {whole(place[2])}" if len({other[2] for other in same}) > 1 else ""
        titles[place] = f"{place[0]}{window}{context}"
    return titles


def _place(test: PerplexityRow) -> Place:
    return " ".join(test.data.split()), test.length, test.context


def _test_text(runs: Sequence[TrainingResult], place: Place) -> str:
    """A seed that diverged is counted, and not in the mean."""
    measured = [(run, test.token) for run in runs for test in run.tests or () if _place(test) == place]
    sound = [token for run, token in measured if run.diverged is None and not is_broken(token)]
    return mean_text(sound, len(measured) - len(sound))


def comparison_note(compared: Comparison) -> str:
    """What a reader must know of the runs, as sentences to put below a table."""
    entries = compared.entries
    bases = bases_of([entry.run for entry in entries])
    unfinished = [entry.label for entry in entries if not entry.run.finished and not entry.run.diverged]
    several = any(len(variant.entries) > 1 for variant in compared.variants)
    sentences = [
        f"The base model: {', '.join(map(perplexity_text, bases))}." if bases else "",
        "Of several seeds the mean, in brackets the lowest and the highest." if several else "",
        f"Not finished: {', '.join(unfinished)}." if unfinished else "",
    ]
    return "".join(f" {sentence}" for sentence in sentences if sentence)


def comparison_plots(compared: Sequence[Comparison]) -> list[list[Plot]]:
    """The validation perplexity of the runs of each table."""
    files = file_names([of.name for of in compared])
    return [_plot(of, f"comparison_{file}") for of, file in zip(compared, files, strict=True)]


def _plot(compared: Comparison, file: str) -> list[Plot]:
    drawn = [variant for variant in compared.variants if any(run.validation for run in variant.runs)]
    lines = [line for variant in drawn for line in _lines(variant, *_look(compared, variant))]
    title = f"{compared.name[:LONGEST_NAME]}{'…' * (len(compared.name) > LONGEST_NAME)}: {PERPLEXITY}"
    panel = validation_panel("tokens", lines, bases_of([entry.run for entry in compared.entries]), title=title)
    return plot(file, panel, compared.entries, name=f"{compared.name} plot")


def _look(compared: Comparison, variant: VariantRuns) -> tuple[int, int]:
    """Color and dashes: of the row and the column where there are enough of both, else one after the other."""
    rows, columns = compared.rows, compared.columns
    if len(rows) <= len(COLORS) and len(columns) <= len(DASHES):
        return rows.index(variant.row), columns.index(variant.column)
    return next(i for i, other in enumerate(compared.variants) if other is variant), 0


def _lines(variant: VariantRuns, color: int, dash: int) -> list[Line]:
    if len(variant.runs) > 1:
        return seed_lines(variant.label, [Curve.of(run) for run in variant.runs], color, dash)
    failed = bool(variant.failed)
    return [Line(variant.label + "*" * failed, validation_of(variant.runs[0]), color, ends_badly=failed, dash=dash)]
