"""Tables and plots of SmolLM2 on a CPU, for the blocks of docs/speed.md that benchmarks/figures.py fills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastweights.report.page import Plot, Table
from fastweights.report.plots import Line, Panel, draw

FILE = "decode_cpu_peers.json"
NOTE = f"From {FILE}."
# A library's color, and the dash of its weights.
COLORS = {"fastweights": 0, "llama.cpp": 1, "transformers": None}
DASHES = {"int8": 0, "Q8_0": 0, "bfloat16": 1, "BF16": 1, "Q4_1": 2, "float32": 3}


def decode_cpu_parts() -> dict[str, Table | Plot]:
    """Every table and plot by the name that a page asks for it with."""
    result = json.loads((Path(__file__).parent.parent / "results" / FILE).read_text())
    parts: dict[str, Table | Plot] = {}
    for batch in sorted({point["batch"] for point in result["points"]}):
        points = [point for point in result["points"] if point["batch"] == batch]
        name = f"CPU, {_texts(batch)}"
        parts[name] = _times(points, name)
        parts[f"{name}, plot"] = _plot(points, batch, f"{name}, plot")
    parts["CPU, faster from"] = _crossings(result["crossings"])
    parts["CPU, perplexity"] = _perplexity(result)
    return parts


def _texts(batch: int) -> str:
    return "one text" if batch == 1 else f"{batch} texts"


def _times(points: list[dict[str, Any]], name: str) -> Table:
    lengths = sorted({point["length"] for point in points})
    found = {(p["library"], p["weights"], p["length"]): f"{1e3 * p['seconds']:,.1f} ms" for p in points}
    contenders = dict.fromkeys((point["library"], point["weights"]) for point in points)
    rows = [[*pair, *(found.get((*pair, length), "–") for length in lengths)] for pair in contenders]
    header = ["", "weights", *(f"{length:,}" for length in lengths)]
    return Table(header, rows, names=2, note=NOTE, name=name)


def _plot(points: list[dict[str, Any]], batch: int, name: str) -> Plot:
    pairs = dict.fromkeys((point["library"], point["weights"]) for point in points)
    lines = [
        Line(
            f"{library}, {weights}",
            [(p["length"], 1e3 * p["seconds"]) for p in points if (p["library"], p["weights"]) == (library, weights)],
            COLORS[library],
            dash=DASHES[weights],
        )
        for library, weights in pairs
    ]
    title = f"SmolLM2-135M on a CPU, {_texts(batch)}"
    panel = Panel(title, "tokens before", "milliseconds of a step", lines, log_x=True, log_y=True)
    caption = f"Time of a step of {_texts(batch)} against context length, by library and weights. {NOTE}"
    return Plot(f"cpu_{batch}.svg", lambda: draw(panel), caption, name)


def _crossings(crossings: list[dict[str, Any]]) -> Table:
    """From which length on the engine is faster, with weights of as many bits and against transformers."""
    compared = [
        ("int8", "Q8_0"),
        ("int8", "Q4_1"),
        ("bfloat16", "BF16"),
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
    ]
    rows = [
        [row["weights"], f"{row['library']}, {row['other_weights']}", _texts(row["batch"]), _length(row["faster_from"])]
        for row in crossings
        if (row["weights"], row["other_weights"]) in compared
    ]
    header = ["weights of the converted model", "base", "at once", "faster from"]
    return Table(header, rows, names=3, note=NOTE, name="CPU, faster from")


def _length(length: int | None) -> str:
    return "never" if length is None else f"{length:,} tokens"


def _perplexity(result: dict[str, Any]) -> Table:
    """Perplexity of the base in each format; in fastweights and transformers relative to float32."""
    models = (result["perplexity"] or {"models": []})["models"]
    exact = next((m["perplexity"] for m in models if m["library"] == "transformers"), 1.0)
    errors = result["relative errors"]
    rows = [
        [
            model["library"],
            model["weights"],
            f"{model['perplexity']:.3f}",
            f"{model['perplexity'] / exact - 1:+.2%}",
            f"{errors[model['library']][model['weights']]:.1e}",
        ]
        for model in models
    ]
    header = ["", "weights", "perplexity of the base", "difference", "error of logits"]
    return Table(header, rows, names=2, note=NOTE, name="CPU, perplexity")
