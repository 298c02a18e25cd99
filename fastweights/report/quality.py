"""Evaluations: perplexity, perplexity by position, recall, tasks, each against the base model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastweights.report.page import Plot, Table
from fastweights.report.parts import by_key, colour_of, file_names, is_wide, pivot, plot, points, rows_of, table
from fastweights.report.plots import Line, Panel
from fastweights.report.results import (
    MISSING,
    Entry,
    base_of,
    bytes_text,
    count_text,
    finite,
    number,
    objects,
    percent_text,
    perplexity_text,
    ratio,
    times_text,
    value_at,
    whole,
)

PROBES = {"pairs": "pairs recalled", "copy": "tokens copied"}
SHARES = ("acc", "exact_match", "em", "f1")


def losses(models: Sequence[Entry]) -> list[str]:
    """In words: what each model has lost against its base."""
    pairs = [(model, base) for model in models if (base := base_of(model, models))]
    return [line for model, base in pairs for line in (*_perplexity_words(model, base), *_recall_words(model, base))]


def _perplexity_words(model: Entry, base: Entry) -> Iterator[str]:
    longest_context: dict[str, dict[str, Any]] = {}
    for row in sorted(objects(model.body, "perplexity"), key=lambda row: finite(row.get("context")) or 0):
        longest_context[str(row.get("data") or "")] = row
    for data, row in longest_context.items():
        here, there = row.get("token"), _token_perplexity(base, row)
        on = f" on {data}" if data else ""
        times = ratio(here, there)
        if number(here) is not None and finite(here) is None:
            yield f"{model.label} has no finite perplexity{on}: it diverged."
        elif times is not None:
            compared = f"{times_text(times)} that of {base.label} ({perplexity_text(there)})"
            yield f"{model.label} has a perplexity of {perplexity_text(here)}{on}, {compared}."


def _recall_words(model: Entry, base: Entry) -> Iterator[str]:
    for probe, what in PROBES.items():
        here, there = (by_key(entry, ("recall", probe), ("distance",)) for entry in (model, base))
        shared = sorted(here.keys() & there.keys())
        if not shared:
            continue
        ends = list(dict.fromkeys((shared[0], shared[-1])))
        distances = " and ".join(whole(place[0]) for place in ends)
        said, base_said = (
            " and ".join(percent_text(found[place].get("accuracy"), 0) for place in ends) for found in (here, there)
        )
        chance = percent_text(here[shared[-1]].get("chance"))
        by_chance = "" if chance == MISSING else f"; chance {chance}"
        yield f"{model.label}, {what} over {distances} tokens: {said} ({base.label}: {base_said}{by_chance})."


def model_tables(models: Sequence[Entry]) -> list[Table]:
    about = [
        [
            model.label,
            str(model.body.get("rule") or ("converted" if model.converted else "attention")),
            whole(model.body.get("parameters")),
            bytes_text(model.body.get("state_bytes") or None),
        ]
        for model in models
    ]
    rows = rows_of(models, "perplexity")
    header = ["model", "data", "window", "context", "perplexity", "× base", "by word", "bits per byte", "tokens"]
    cells = [_perplexity_cells(model, base_of(model, models), row) for model, row in rows]
    return [
        *table("models", ["model", "rule", "parameters", "state"], about, models, names=2),
        *table("perplexity", header, cells, [model for model, _ in rows], names=2),
    ]


def _perplexity_cells(model: Entry, base: Entry | None, row: dict[str, Any]) -> list[str]:
    times = None if base is None else ratio(row.get("token"), _token_perplexity(base, row))
    bits = finite(row.get("bits_per_byte"))
    return [
        model.label,
        str(row.get("data") or MISSING),
        whole(row.get("length")),
        whole(row.get("context")),
        perplexity_text(row.get("token")),
        times_text(times),
        perplexity_text(row.get("word")),
        MISSING if bits is None else f"{bits:.3f}",
        count_text(row.get("tokens")),
    ]


def _token_perplexity(model: Entry, like: dict[str, Any]) -> Any:
    """What a model has on the same data, read in the same windows."""
    for row in objects(model.body, "perplexity"):
        if all(row.get(name) == like.get(name) for name in ("data", "length", "context")):
            return row.get("token")
    return None


def position_plots(models: Sequence[Entry]) -> list[Plot]:
    """One for each text."""
    made: list[Plot] = []
    by_text = _by_position(models)
    for file, (text, measured) in zip(file_names(list(by_text)), by_text.items(), strict=True):
        lines = [_line(model, models, _middles(objects(part.body, "by_position"))) for model, part in measured]
        title, axis = f"Perplexity by position{text and f', {text}'}", "position in the text (tokens)"
        panel = Panel(title, axis, "perplexity", lines, log_x=True, log_y=is_wide(lines))
        name, parts = f"position {text}".strip(), [part for _, part in measured]
        made += plot(f"position_{file}" if text else "position", panel, parts, name=f"{name} plot")
    return made


def position_tables(models: Sequence[Entry]) -> list[Table]:
    """One for each text, named after it where there are several."""
    made: list[Table] = []
    for text, measured in _by_position(models).items():
        name, header = f"position {text}".strip(), [f"{text}: from token" if text else "from token", "to"]
        parts, key = [part for _, part in measured], ("from", "to")
        made += pivot(name, parts, ("by_position",), key, "perplexity", perplexity_text, header=header)
    return made


def _by_position(models: Sequence[Entry]) -> dict[str, list[tuple[Entry, Entry]]]:
    """The models that were measured on each text, with what was measured on it; of one text alone the name is empty."""
    rows = {model.label: objects(model.body, "by_position") for model in models}
    texts = list(dict.fromkeys(str(row.get("data", "")) for found in rows.values() for row in found))
    parts: dict[str, list[tuple[Entry, Entry]]] = {}
    for text in texts:
        for model in models:
            own = [row for row in rows[model.label] if str(row.get("data", "")) == text]
            if own:
                part = replace(model, body=model.body | {"by_position": own})
                parts.setdefault(text if len(texts) > 1 else "", []).append((model, part))
    return parts


def _middles(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, Any]]:
    ends = [(finite(row.get("from")), finite(row.get("to")), row.get("perplexity")) for row in rows]
    return [((start + end) / 2, value) for start, end, value in ends if start is not None and end is not None]


def _line(model: Entry, models: Sequence[Entry], where: list[tuple[Any, Any]]) -> Line:
    base = next((other for other in models if not other.converted), None)
    return Line(model.label, where, colour_of(model, models, base))


def recall_plots(models: Sequence[Entry]) -> list[Plot]:
    return [
        made
        for probe, what in PROBES.items()
        for measured in [_probed(models, probe)]
        for made in plot(f"recall_{probe}", _recall_panel(measured, models, probe, what), measured)
    ]


def recall_tables(models: Sequence[Entry]) -> list[Table]:
    key, shared = ("distance",), ("chance",)
    return [
        made
        for probe, what in PROBES.items()
        for made in pivot(
            f"recall {probe}",
            _probed(models, probe),
            ("recall", probe),
            key,
            "accuracy",
            percent_text,
            header=[f"{what}: distance"],
            shared=shared,
        )
    ]


def _probed(models: Sequence[Entry], probe: str) -> list[Entry]:
    return [model for model in models if objects(model.body, "recall", probe)]


def _recall_panel(measured: Sequence[Entry], models: Sequence[Entry], probe: str, what: str) -> Panel:
    rows = [row for model in measured for row in objects(model.body, "recall", probe)]
    chances = {chance for row in rows if (chance := finite(row.get("chance"))) is not None}
    return Panel(
        what.capitalize(),
        "distance (tokens)",
        "accuracy",
        [_line(m, models, points(objects(m.body, "recall", probe), "distance", "accuracy")) for m in measured],
        log_x=True,
        y_text=lambda value: percent_text(value, 0),
        y_range=(-0.03, 1.03),
        levels=[(chance, f"chance: {percent_text(chance)}") for chance in chances if len(chances) == 1],
    )


def task_tables(models: Sequence[Entry]) -> list[Table]:
    measured = [model for model in models if isinstance(model.body.get("tasks"), dict)]
    rows = [
        [task, metric, model.label, *_score_cells(metrics, value_at(base and base.body, "tasks", task) or {}, metric)]
        for model in measured
        for base in [base_of(model, models)]
        for task, metrics in model.body["tasks"].items()
        if isinstance(metrics, dict)
        for metric in metrics
        if "_stderr" not in metric
    ]
    header = ["task", "measure", "model", "score", "difference to the base"]
    tasks = table("tasks", header, sorted(rows, key=lambda row: (row[0], row[1])), measured, names=3)
    return [*tasks, *_average_tables(measured)]


def _average_tables(measured: Sequence[Entry]) -> list[Table]:
    """Of the tasks with a share of right answers that all models have, several at least; against every unconverted
    model."""
    found = {model.label: _shares(model) for model in measured}
    shared = sorted(set.intersection(*map(set, found.values()))) if found else []
    if len(shared) < 2:
        return []
    means = {label: sum(shares[task] for task in shared) / len(shared) for label, shares in found.items()}
    bases = [model for model in measured if not model.converted]
    several = len(bases) > 1
    rows = []
    for model in measured:
        compared = [base if base is not model else None for base in bases] if several else [base_of(model, measured)]
        shares = [None if base is None else ratio(means[model.label], means[base.label]) for base in compared]
        rows.append([model.label, percent_text(means[model.label]), *map(percent_text, shares)])
    names = [f"of {base.label}'s" for base in bases] if several else ["of the base's"]
    return table("task average", ["model", f"mean of {', '.join(shared)}", *names], rows, measured, names=1)


def _shares(model: Entry) -> dict[str, float]:
    """Of each task, of right answers: normalised by their length where that was measured."""
    values = {
        task: next((value for name in ("acc_norm", "acc") if (value := finite(metrics.get(name))) is not None), None)
        for task, metrics in model.body["tasks"].items()
        if isinstance(metrics, dict)
    }
    return {task: value for task, value in values.items() if value is not None}


def _score_cells(metrics: dict[str, Any], base: dict[str, Any], metric: str) -> list[str]:
    """A score and its difference to the base model's, each ± its standard error."""
    value, error = _score(metrics, metric)
    base_value, base_error = _score(base, metric)
    difference = None if value is None or base_value is None else value - base_value
    both = None if error is None or base_error is None else math.hypot(error, base_error)
    is_share = metric.partition(",")[0].removesuffix("_norm") in SHARES
    return [_score_text(value, error, is_share, ""), _score_text(difference, both, is_share, "+")]


def _score(metrics: dict[str, Any], metric: str) -> tuple[float | None, float | None]:
    name, comma, filter_name = metric.partition(",")  # lm-eval's "acc,flexible-extract"
    return finite(metrics.get(metric)), finite(metrics.get(f"{name}_stderr{comma}{filter_name}"))


def _score_text(value: float | None, error: float | None, is_share: bool, sign: str) -> str:
    if value is None:
        return MISSING
    factor, unit = (100, " points" if sign else " %") if is_share else (1, "")
    around = "" if error is None else f" ± {factor * error:.1f}"
    return f"{factor * value:{sign}.1f}{around}{unit}"
