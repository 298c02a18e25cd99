"""Cost measurements: time and memory of one more token against context length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastweights.report.page import Block, Table
from fastweights.report.parts import Columns, Place, color_of, pivot, plot, table
from fastweights.report.plots import Line, Panel, Point
from fastweights.report.results import CostEntry, ModelEntry
from fastweights.report.text import bytes_text, finite, ratio, seconds_text, times_text, whole
from fastweights.results import CacheSize, CostResult, ModelCost


@dataclass(frozen=True)
class Measure:
    """How a quantity of a CostPoint is named and formatted."""

    title: str
    column: str
    text: Callable[[Any], str]
    words: str
    less: str
    more: str


MEASURES = {
    "seconds": Measure("Time of one token", "time", seconds_text, "one more token takes", "faster", "slower"),
    "bytes": Measure("Memory of the cache", "memory", bytes_text, "the cache takes", "smaller", "larger"),
    "peak_bytes": Measure("Peak memory of one token", "peak", bytes_text, "one more token needs", "less", "more"),
}


def _measures(cost: CostResult) -> list[str]:
    """The paper shows the peak memory of a layer. Of a model the cached bytes are shown as well, which do not depend
    on how it is run."""
    return [key for key in MEASURES if key != "bytes" or not cost.is_layer]


def winnings(models: Sequence[ModelEntry], costs: Sequence[CostEntry]) -> list[str]:
    """In words: what each model has won against its base."""
    lines = [line for entry in costs for model in _others(entry.cost) for line in _cost_words(entry.cost, model)]
    measured = {model.name for entry in costs for model in entry.cost.models}
    others = [entry for entry in models if entry.converted and entry.model.name not in measured]
    others = [entry for entry in others if not entry.model.without_window]  # its cache is that of the model
    return lines + [words for entry in others if (words := _cache_words(entry))]


def _cache_words(entry: ModelEntry) -> str:
    """What a model caches and what its base would, where its cost was not measured."""
    cache = entry.model.cache
    if not cache:  # results of earlier versions have the state alone
        state = entry.model.state_bytes
        return f"{entry.label} has a state of {bytes_text(state)}, however long the context is." if state else ""
    constant = len({size.bytes for size in cache}) == 1
    own = f"{bytes_text(cache[0].bytes)}, however long the context is" if constant else _at_ends(cache, "bytes")
    return f"{entry.label} caches {own}; its base caches {_at_ends(cache, 'base_bytes')}."


def _at_ends(cache: Sequence[CacheSize], key: str) -> str:
    ends = cache[0], cache[-1]
    return " and ".join(f"{bytes_text(getattr(size, key))} after {whole(size.tokens)} tokens" for size in ends)


def cache_tables(models: Sequence[ModelEntry]) -> list[Table]:
    """A table of what converted models cache, and of the KV cache of their base, by length."""
    measured = [entry for entry in models if entry.model.cache]
    columns: Columns = {entry.label: _cache_cells(entry, "bytes") for entry in measured}
    for entry in measured:
        cells = _cache_cells(entry, "base_bytes")
        if cells not in columns.values():  # most models of a report have one base
            columns[f"KV cache of the base of {entry.label}"] = cells
    return pivot("cache", ["cache after: tokens"], columns, measured)


def _cache_cells(entry: ModelEntry, key: str) -> dict[Place, str]:
    return {(size.tokens,): bytes_text(getattr(size, key)) for size in entry.model.cache or ()}


def _cost_words(cost: CostResult, model: ModelCost) -> Iterator[str]:
    base, name = _base(cost), f"one {model.name} layer" if cost.is_layer else model.name
    assert base is not None
    starts = _cheaper_from(cost, model)
    for key in _measures(cost):
        measure = MEASURES[key]
        here, there = _curve(model, key), _curve(base, key)
        shared = sorted(here.keys() & there.keys())
        times = ratio(there[shared[-1]], here[shared[-1]]) if shared else None
        if not times:
            continue
        compared = f"{times_text(times)} {measure.less}" if times >= 1 else f"{times_text(1 / times)} {measure.more}"
        yield (
            f"{name}: after {whole(shared[-1])} tokens {measure.words} {measure.text(here[shared[-1]])}, "
            f"{compared} than with {base.name} ({measure.text(there[shared[-1]])})"
            f"{_from_where(measure.less, starts[key], shared[0]) if key in starts else ''}."
        )


def _from_where(less: str, start: int | None, shortest: float) -> str:
    if start is None:
        return f"; not {less} for good at any length measured"
    return f"; {less} at every length measured" if start <= shortest else f"; {less} from {whole(start)} tokens on"


def cost_plots(entry: CostEntry, suffix: str) -> list[Block]:
    """A plot against length for each quantity that was measured."""
    plots: list[Block] = []
    for key in _measures(entry.cost):
        plots += plot(key + suffix, cost_panel(entry.cost, key, ", one layer" if entry.cost.is_layer else ""), [entry])
    return plots


def cost_tables(entry: CostEntry, suffix: str = "") -> list[Table]:
    """A table of time and memory. Peaks of models have a second table, because a terminal is too narrow for all."""
    keys, number = _measures(entry.cost), suffix.replace("_", " ")
    return [*_cost_table(entry, f"cost{number}", keys[:2]), *_cost_table(entry, f"peak bytes{number}", keys[2:])]


def _cost_table(entry: CostEntry, name: str, keys: Sequence[str]) -> list[Table]:
    models = entry.cost.models
    header = ["tokens", *(f"{model.name}: {MEASURES[key].column}" for model in models for key in keys)]
    curves = [(_curve(model, key), MEASURES[key]) for model in models for key in keys]
    lengths = sorted({length for curve, _ in curves for length in curve})
    rows = [[whole(length), *(measure.text(curve.get(length)) for curve, measure in curves)] for length in lengths]
    stretched = [model.name for model in models if model.positions]
    note = f" The position table of {', '.join(stretched)} was repeated for timing." if stretched else ""
    return table(name, header, rows, [entry], names=0, note=note + _left_out(models))


def _left_out(models: Sequence[ModelCost]) -> str:
    """Which lengths are missing, and why."""
    return "".join(
        f" {model.name} has no point at {whole(skipped.length)} tokens: {skipped.reason}."
        for model in models
        for skipped in model.left_out
    )


def conditions_text(cost: CostResult) -> str:
    """The conditions of a measurement, as a title."""
    named = [f"{name} {value}" for name in ("batch", "heads") if (value := getattr(cost, name)) is not None]
    sizes = {name: value for name in ("d", "m") if (value := getattr(cost, name)) is not None}
    alike = len(sizes) == 2 and cost.d == cost.m
    named += [f"d = m = {cost.d}"] if alike else [f"{name} = {value}" for name, value in sizes.items()]
    hardware = (cost.hardware or {}).get("gpu" if cost.device == "cuda" else "cpu")
    where = [str(value) for value in (cost.dtype, hardware) if value]
    return ", ".join(["one layer" if cost.is_layer else "whole models", *named, *where])


def cost_panel(cost: CostResult, key: str, subject: str = "") -> Panel:
    """One quantity against length; circles mark from where a converted model costs less."""
    base, others, measure = _base(cost), _others(cost), MEASURES[key]
    lines = [
        Line(model.name, sorted(_curve(model, key).items()), color_of(model, cost.models, base))
        for model in cost.models
    ]
    crossings = [point for model in others if (point := _crossing(cost, model, key))]
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


def _base(cost: CostResult) -> ModelCost | None:
    """The model that the others are compared with."""
    return next((model for model in cost.models if not model.converted), None)


def _others(cost: CostResult) -> list[ModelCost]:
    return [model for model in cost.models if model.converted] if _base(cost) else []


def _curve(model: ModelCost, key: str) -> dict[float, float]:
    return {point.length: value for point in model.points if (value := finite(getattr(point, key))) is not None}


def _cheaper_from(cost: CostResult, model: ModelCost) -> dict[str, int | None]:
    """From where a model is cheaper: older results have it only for the first model, and not for peaks."""
    return model.cheaper_from or (cost.cheaper_from if model is _others(cost)[0] else {})


def _crossing(cost: CostResult, model: ModelCost, key: str) -> Point | None:
    """Where the curves cross between two measured lengths, on the base model's line as logarithmic axes draw it."""
    base = _base(cost)
    assert base is not None
    start = _cheaper_from(cost, model).get(key)
    for (left, low), (right, high) in itertools.pairwise(sorted(_curve(base, key).items())):
        if start is not None and 0 < left < start <= right and min(low, high) > 0:
            return start, low * (high / low) ** (math.log(start / left) / math.log(right / left))
    return None
