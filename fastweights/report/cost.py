"""Cost measurements: time and memory of one more token against the length of the text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastweights.report.page import Block, Table
from fastweights.report.parts import colour_of, plot, table
from fastweights.report.plots import Line, Panel, Point
from fastweights.report.results import (
    Entry,
    Result,
    bytes_text,
    finite,
    objects,
    ratio,
    seconds_text,
    times_text,
    value_at,
    whole,
)


@dataclass(frozen=True)
class Measure:
    title: str
    column: str
    text: Callable[[Any], str]
    words: str
    less: str
    more: str


MEASURES = {
    "seconds": Measure("Time of one token", "time", seconds_text, "one more token takes", "faster", "slower"),
    "bytes": Measure(
        "Memory kept of the text", "memory", bytes_text, "what is kept of the text is", "smaller", "larger"
    ),
    "peak_bytes": Measure("Peak memory of one token", "peak", bytes_text, "one more token needs", "less", "more"),
}


def cost_parts(result: Result) -> list[Result]:
    """What was measured of one layer, and of whole models; a result may hold either or both."""
    layer = result.body.get("layer")
    whole_models = {name: value for name, value in result.body.items() if name != "layer"}
    if not isinstance(layer, dict):
        return [result]
    return [Result(result.file, {"hardware": result.body.get("hardware"), **layer}), Result(result.file, whole_models)]


def is_layer(cost: Result) -> bool:
    return cost.body.get("level") == "layer"


def _measures(cost: Result) -> list[str]:
    """The paper shows the peak memory of a layer; of a model what it keeps is told as well, which does not depend on
    how it is run."""
    return [key for key in MEASURES if key != "bytes" or not is_layer(cost)]


def winnings(models: Sequence[Entry], costs: Sequence[Result]) -> list[str]:
    """In words: what each model has won against its base."""
    lines = [line for cost in costs for entry in _others(cost) for line in _cost_words(cost, entry)]
    told = {str(entry.get("name")) for cost in costs for entry in objects(cost.body, "models")}
    untold = [model for model in models if model.converted and str(model.body.get("name")) not in told]
    return lines + [
        f"{model.label} keeps {bytes_text(model.body['state_bytes'])} of a text, however long it is."
        for model in untold
        if finite(model.body.get("state_bytes"))
    ]


def _cost_words(cost: Result, entry: dict[str, Any]) -> Iterator[str]:
    base, name = _base(cost), f"one {entry.get('name')} layer" if is_layer(cost) else entry.get("name")
    told = _told(cost, entry)
    for key in _measures(cost):
        measure = MEASURES[key]
        here, there = _curve(entry, key), _curve(base, key)
        shared = sorted(here.keys() & there.keys())
        times = ratio(there[shared[-1]], here[shared[-1]]) if shared else None
        if not times:
            continue
        compared = f"{times_text(times)} {measure.less}" if times >= 1 else f"{times_text(1 / times)} {measure.more}"
        yield (
            f"{name}: after {whole(shared[-1])} tokens {measure.words} {measure.text(here[shared[-1]])}, "
            f"{compared} than with {base.get('name')} ({measure.text(there[shared[-1]])})"
            f"{_from_where(measure.less, finite(told[key]), shared[0]) if key in told else ''}."
        )


def _from_where(less: str, start: float | None, shortest: float) -> str:
    if start is None:
        return f"; not {less} for good at any length measured"
    return f"; {less} at every length measured" if start <= shortest else f"; {less} from {whole(start)} tokens on"


def cost_plots(cost: Result, suffix: str) -> list[Block]:
    plots: list[Block] = []
    for key in _measures(cost):
        plots += plot(key + suffix, cost_panel(cost, key, ", one layer" if is_layer(cost) else ""), [cost])
    return plots


def cost_tables(cost: Result, suffix: str = "") -> list[Table]:
    """Time and memory; the peaks of models in a table of their own, as a terminal has no room beside what is kept."""
    keys, number = _measures(cost), suffix.replace("_", " ")
    return [*_cost_table(cost, f"cost{number}", keys[:2]), *_cost_table(cost, f"peak bytes{number}", keys[2:])]


def _cost_table(cost: Result, name: str, keys: Sequence[str]) -> list[Table]:
    entries = objects(cost.body, "models")
    header = ["tokens", *(f"{entry.get('name')}: {MEASURES[key].column}" for entry in entries for key in keys)]
    curves = [(_curve(entry, key), MEASURES[key]) for entry in entries for key in keys]
    lengths = sorted({length for curve, _ in curves for length in curve})
    rows = [[whole(length), *(measure.text(curve.get(length)) for curve, measure in curves)] for length in lengths]
    stretched = [str(entry.get("name")) for entry in entries if entry.get("positions")]
    note = f" The position table of {', '.join(stretched)} was repeated for timing." if stretched else ""
    return table(name, header, rows, [cost], names=0, note=note + _left_out(entries))


def _left_out(entries: Sequence[dict[str, Any]]) -> str:
    """Which lengths are missing, and why."""
    missing = [
        f" {entry.get('name')} has no point at {whole(item.get('length'))} tokens: {item.get('reason')}."
        for entry in entries
        for item in objects(entry, "left_out")
    ]
    return "".join(missing)


def conditions_text(cost: Result) -> str:
    """Under which the numbers were measured, as a title."""
    body = cost.body
    named = [f"{name} {body[name]}" for name in ("batch", "heads") if name in body]
    named += [f"d = m = {body['d']}"] if "d" in body and body["d"] == body.get("m") else []
    named += [f"{name} = {body[name]}" for name in ("d", "m") if name in body and body.get("d") != body.get("m")]
    hardware = value_at(body, "hardware", "gpu" if body.get("device") == "cuda" else "cpu")
    where = [str(value) for value in (body.get("dtype"), hardware) if value]
    return ", ".join(["one layer" if is_layer(cost) else "whole models", *named, *where])


def cost_panel(cost: Result, key: str, subject: str = "") -> Panel:
    entries, base, measure = objects(cost.body, "models"), _base(cost), MEASURES[key]
    lines = [
        Line(str(entry.get("name")), sorted(_curve(entry, key).items()), colour_of(entry, entries, base))
        for entry in entries
    ]
    others = _others(cost)
    crossings = [point for entry in others if (point := _crossing(cost, entry, key))]
    cheaper = f": less from {whole(crossings[0][0])} tokens" if len(crossings) == len(others) == 1 else ""
    return Panel(
        measure.title + subject + cheaper,
        "text before it (tokens)",
        "",
        lines,
        log_x=True,
        log_y=True,
        x_text=whole,
        y_text=measure.text,
        circles=crossings,
    )


def _base(cost: Result) -> dict[str, Any]:
    """The model that the others are compared with: the first where a result does not say."""
    entries = objects(cost.body, "models")
    return next((entry for i, entry in enumerate(entries) if not entry.get("converted", i > 0)), {})


def _others(cost: Result) -> list[dict[str, Any]]:
    base = _base(cost)
    return [entry for entry in objects(cost.body, "models") if base and entry.get("converted", entry is not base)]


def _curve(entry: dict[str, Any], key: str) -> dict[float, float]:
    found = [(finite(point.get("length")), finite(point.get(key))) for point in objects(entry, "points")]
    return {length: value for length, value in found if length is not None and value is not None}


def _told(cost: Result, entry: dict[str, Any]) -> dict[str, Any]:
    """From where a model is cheaper: a result tells it of each, or only of the first, and not always of peaks."""
    told = entry.get("cheaper_from") or (cost.body.get("cheaper_from") if entry is _others(cost)[0] else None)
    return told if isinstance(told, dict) else {}


def _crossing(cost: Result, entry: dict[str, Any], key: str) -> Point | None:
    """Where the curves cross between two measured lengths, on the base model's line as logarithmic axes draw it."""
    start, curve = finite(_told(cost, entry).get(key)), sorted(_curve(_base(cost), key).items())
    for (left, low), (right, high) in itertools.pairwise(curve):
        if start is not None and 0 < left < start <= right and min(low, high) > 0:
            return start, low * (high / low) ** (math.log(start / left) / math.log(right / left))
    return None
