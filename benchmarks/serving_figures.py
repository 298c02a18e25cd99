"""Plots of the server's load, for the blocks of docs/serving.md that benchmarks/figures.py fills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastweights.report.page import Plot
from fastweights.report.plots import Line, Panel, draw

ROOT = Path(__file__).parent.parent


def serving_plots() -> dict[str, Plot]:
    """Every plot by the name that a page asks for it with."""
    load, turns = (_result(name) for name in ("load", "turns"))
    return {
        "serving speed": Plot(
            "speed.svg",
            lambda: draw(_speed(load["speed"])),
            "Tokens a second by the number of streams, of the server and of Engine.generate. From serving_load.json.",
            "serving speed",
        ),
        "serving first token": Plot(
            "first_token.svg",
            lambda: draw(_first(load["speed"])),
            "Time to the first token by the number of streams that begin at once. From serving_load.json.",
            "serving first token",
        ),
        "serving turns": Plot(
            "turns.svg",
            lambda: draw(_turns(turns["turns"])),
            "Seconds of each turn of a conversation, of the server and of the base. From serving_turns.json.",
            "serving turns",
        ),
    }


def _result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"results/serving_{name}.json").read_text())["parts"]


def _speed(part: dict[str, Any]) -> Panel:
    lines = [
        Line(label, [(point["streams"], point[name]) for point in part["points"]], color)
        for label, name, color in (("Engine.generate", "engine", None), ("fastweights serve", "server", 0))
    ]
    return Panel("Throughput", "streams", "tokens a second", lines, log_x=True, log_y=True)


def _first(part: dict[str, Any]) -> Panel:
    points = [(point["streams"], 1e3 * point["first"]) for point in part["points"]]
    line = Line("fastweights serve", points, 0)
    return Panel("First token", "streams that begin at once", "milliseconds", [line], log_x=True, log_y=True)


def _turns(part: dict[str, Any]) -> Panel:
    lines = [
        Line(label, [(point["turn"], point[name]) for point in part["points"]], color)
        for label, name, color in (("base, transformers serve", "base", None), ("fastweights serve", "server", 0))
    ]
    return Panel("A conversation", "turn", "seconds of a turn", lines, log_y=True)
