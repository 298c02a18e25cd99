"""Evaluations: perplexity, perplexity by position, recall, tasks, each against the base model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fastweights.report.page import Plot, Table
from fastweights.report.parts import Columns, color_of, file_names, is_wide, pivot, plot, table
from fastweights.report.plots import Line, Panel, Point
from fastweights.report.results import ModelEntry, base_entry
from fastweights.report.text import (
    MISSING,
    bytes_text,
    count_text,
    finite,
    is_broken,
    percent_text,
    perplexity_text,
    ratio,
    times_text,
    whole,
)
from fastweights.results import PerplexityRow, PositionBucket, RecallRow

PROBES = {"pairs": "pairs recalled", "copy": "tokens copied"}
SHARES = ("acc", "exact_match", "em", "f1", "rouge_l")


def losses(models: Sequence[ModelEntry]) -> list[str]:
    """In words: what each model has lost against its base."""
    pairs = [(model, base) for model in models if (base := base_entry(model, models))]
    return [line for model, base in pairs for line in (*_perplexity_words(model, base), *_recall_words(model, base))]


def _perplexity_words(model: ModelEntry, base: ModelEntry) -> Iterator[str]:
    longest_context = {row.data: row for row in sorted(_perplexities(model), key=lambda row: row.context)}
    for data, row in longest_context.items():
        there = _token_perplexity(base, row)
        times = ratio(row.token, there)
        if is_broken(row.token):
            yield f"{model.label} has no finite perplexity on {data}: it diverged."
        elif times is not None:
            compared = f"{times_text(times)} that of {base.label} ({perplexity_text(there)})"
            yield f"{model.label} has a perplexity of {perplexity_text(row.token)} on {data}, {compared}."


def _recall_words(model: ModelEntry, base: ModelEntry) -> Iterator[str]:
    for probe, what in PROBES.items():
        here, there = ({row.distance: row for row in _recall(entry, probe)} for entry in (model, base))
        shared = sorted(here.keys() & there.keys())
        if not shared:
            continue
        ends = list(dict.fromkeys((shared[0], shared[-1])))
        distances = " and ".join(map(whole, ends))
        own, others = (" and ".join(percent_text(rows[end].accuracy, 0) for end in ends) for rows in (here, there))
        chance = percent_text(here[shared[-1]].chance)
        by_chance = "" if chance == MISSING else f"; chance {chance}"
        yield f"{model.label}, {what} over {distances} tokens: {own} ({base.label}: {others}{by_chance})."


def _perplexities(entry: ModelEntry) -> Sequence[PerplexityRow]:
    return entry.model.perplexity or ()


def _recall(entry: ModelEntry, probe: str) -> Sequence[RecallRow]:
    return () if entry.model.recall is None else getattr(entry.model.recall, probe)


def model_tables(models: Sequence[ModelEntry]) -> list[Table]:
    """The models: rule, parameters, size of the state."""
    about = [
        [
            entry.label,
            entry.model.rule,
            whole(entry.model.parameters),
            bytes_text(entry.model.state_bytes or None),
        ]
        for entry in models
    ]
    rows = [(entry, row) for entry in models for row in _perplexities(entry)]
    header = ["model", "data", "window", "context", "perplexity", "× base", "by word", "bits per byte", "tokens"]
    cells = [_perplexity_cells(entry, base_entry(entry, models), row) for entry, row in rows]
    return [
        *table("models", ["model", "rule", "parameters", "state"], about, models, names=2),
        *table("perplexity", header, cells, [entry for entry, _ in rows], names=2),
    ]


def _perplexity_cells(entry: ModelEntry, base: ModelEntry | None, row: PerplexityRow) -> list[str]:
    times = None if base is None else ratio(row.token, _token_perplexity(base, row))
    bits = finite(row.bits_per_byte)
    return [
        entry.label,
        row.data,
        whole(row.length),
        whole(row.context),
        perplexity_text(row.token),
        times_text(times),
        perplexity_text(row.word),
        MISSING if bits is None else f"{bits:.3f}",
        count_text(row.tokens),
    ]


def _token_perplexity(entry: ModelEntry, like: PerplexityRow) -> float | None:
    """The perplexity of a model on the same data, read in the same windows."""
    place = like.data, like.length, like.context
    rows = _perplexities(entry)
    return next((row.token for row in rows if (row.data, row.length, row.context) == place), None)


# The rows of each model that was measured on a text.
ByModel = list[tuple[ModelEntry, list[PositionBucket]]]


def position_plots(models: Sequence[ModelEntry]) -> list[Plot]:
    """One for each text."""
    plots: list[Plot] = []
    by_text = _by_position(models)
    for file, (text, measured) in zip(file_names(list(by_text)), by_text.items(), strict=True):
        lines = [_line(entry, models, _middles(rows)) for entry, rows in measured]
        title, axis = f"Perplexity by position{text and f', {text}'}", "position in the text (tokens)"
        panel = Panel(title, axis, "perplexity", lines, log_x=True, log_y=is_wide(lines))
        name, entries = f"position {text}".strip(), [entry for entry, _ in measured]
        plots += plot(f"position_{file}" if text else "position", panel, entries, name=f"{name} plot")
    return plots


def _middles(rows: Sequence[PositionBucket]) -> list[Point]:
    return [((row.start + row.end) / 2, row.perplexity) for row in rows]


def position_tables(models: Sequence[ModelEntry]) -> list[Table]:
    """One for each text, named after it where there are several."""
    tables: list[Table] = []
    for text, measured in _by_position(models).items():
        name, header = f"position {text}".strip(), [f"{text}: from token" if text else "from token", "to"]
        columns: Columns = {
            entry.label: {(row.start, row.end): perplexity_text(row.perplexity) for row in rows}
            for entry, rows in measured
        }
        tables += pivot(name, header, columns, [entry for entry, _ in measured])
    return tables


def _by_position(models: Sequence[ModelEntry]) -> dict[str, ByModel]:
    """The models that were measured on each text, with their rows; if there is one text only, its name is empty."""
    texts = list(dict.fromkeys(row.data or "" for entry in models for row in entry.model.by_position or ()))
    found: dict[str, ByModel] = {}
    for text in texts:
        for entry in models:
            rows = [row for row in entry.model.by_position or () if (row.data or "") == text]
            if rows:
                found.setdefault(text if len(texts) > 1 else "", []).append((entry, rows))
    return found


def _line(entry: ModelEntry, models: Sequence[ModelEntry], points: Sequence[Point]) -> Line:
    base = next((other for other in models if not other.converted), None)
    return Line(entry.label, points, color_of(entry, models, base))


def recall_plots(models: Sequence[ModelEntry]) -> list[Plot]:
    """A plot of accuracy against distance for each probe."""
    return [
        drawn
        for probe, what in PROBES.items()
        for measured in [_probed(models, probe)]
        for drawn in plot(f"recall_{probe}", _recall_panel(measured, models, probe, what), measured)
    ]


def recall_tables(models: Sequence[ModelEntry]) -> list[Table]:
    """A table of accuracy by distance for each probe."""
    tables: list[Table] = []
    for probe, what in PROBES.items():
        measured = _probed(models, probe)
        columns: Columns = {
            entry.label: {(row.distance,): percent_text(row.accuracy) for row in _recall(entry, probe)}
            for entry in measured
        }
        # guessing has the same chance for all models
        rows = [row for entry in measured for row in _recall(entry, probe)]
        columns["chance"] = {(row.distance,): percent_text(row.chance) for row in rows}
        tables += pivot(f"recall {probe}", [f"{what}: distance"], columns, measured)
    return tables


def _probed(models: Sequence[ModelEntry], probe: str) -> list[ModelEntry]:
    return [entry for entry in models if _recall(entry, probe)]


def _recall_panel(measured: Sequence[ModelEntry], models: Sequence[ModelEntry], probe: str, what: str) -> Panel:
    chances = {row.chance for entry in measured for row in _recall(entry, probe) if finite(row.chance) is not None}
    return Panel(
        what.capitalize(),
        "distance (tokens)",
        "accuracy",
        [_line(entry, models, [(row.distance, row.accuracy) for row in _recall(entry, probe)]) for entry in measured],
        log_x=True,
        y_text=lambda value: percent_text(value, 0),
        y_range=(-0.03, 1.03),
        levels=[(chance, f"chance: {percent_text(chance)}") for chance in chances if len(chances) == 1],
    )


def task_tables(models: Sequence[ModelEntry]) -> list[Table]:
    """The metrics of lm-eval tasks, compared with the base, and their averages."""
    measured = [entry for entry in models if entry.model.tasks is not None]
    rows = [
        [task, metric, entry.label, *_score_cells(metrics, _tasks(base).get(task, {}), metric)]
        for entry in measured
        for base in [base_entry(entry, models)]
        for task, metrics in _tasks(entry).items()
        for metric in metrics
        if "_stderr" not in metric
    ]
    header = ["task", "measure", "model", "score", "difference to the base"]
    tasks = table("tasks", header, sorted(rows, key=lambda row: (row[0], row[1])), measured, names=3)
    return [*tasks, *_average_tables(measured)]


def _tasks(entry: ModelEntry | None) -> Mapping[str, Mapping[str, float]]:
    return {} if entry is None else entry.model.tasks or {}


def _average_tables(measured: Sequence[ModelEntry]) -> list[Table]:
    """The mean accuracy over the tasks that all models have, if these are several; against every unconverted model."""
    found = {entry.label: _accuracies(entry) for entry in measured}
    shared = sorted(set.intersection(*map(set, found.values()))) if found else []
    if len(shared) < 2:
        return []
    means = {label: sum(shares[task] for task in shared) / len(shared) for label, shares in found.items()}
    bases = [entry for entry in measured if not entry.converted]
    several = len(bases) > 1
    rows = []
    for entry in measured:
        compared = [base if base is not entry else None for base in bases] if several else [base_entry(entry, measured)]
        shares = [None if base is None else ratio(means[entry.label], means[base.label]) for base in compared]
        rows.append([entry.label, percent_text(means[entry.label]), *map(percent_text, shares)])
    names = [f"of {base.label}'s" for base in bases] if several else ["of the base's"]
    return table("task average", ["model", f"mean of {', '.join(shared)}", *names], rows, measured, names=1)


def _accuracies(entry: ModelEntry) -> dict[str, float]:
    """The accuracy of each task: normalized by the length of the choices where that was measured."""
    values = {
        task: next((value for name in ("acc_norm", "acc") if (value := finite(metrics.get(name))) is not None), None)
        for task, metrics in _tasks(entry).items()
    }
    return {task: value for task, value in values.items() if value is not None}


def _score_cells(metrics: Mapping[str, float], base: Mapping[str, float], metric: str) -> list[str]:
    """A score and its difference to the base model's, each ± its standard error."""
    value, error = _score(metrics, metric)
    base_value, base_error = _score(base, metric)
    difference = None if value is None or base_value is None else value - base_value
    both = None if error is None or base_error is None else math.hypot(error, base_error)
    is_share = metric.partition(",")[0].removesuffix("_norm") in SHARES
    return [_score_text(value, error, is_share, ""), _score_text(difference, both, is_share, "+")]


def _score(metrics: Mapping[str, float], metric: str) -> tuple[float | None, float | None]:
    name, comma, filter_name = metric.partition(",")  # lm-eval's "acc,flexible-extract"
    return finite(metrics.get(metric)), finite(metrics.get(f"{name}_stderr{comma}{filter_name}"))


def _score_text(value: float | None, error: float | None, is_share: bool, sign: str) -> str:
    if value is None:
        return MISSING
    factor, unit = (100, " points" if sign else " %") if is_share else (1, "")
    around = "" if error is None else f" ± {factor * error:.1f}"
    return f"{factor * value:{sign}.1f}{around}{unit}"
