"""Runs of a grid with cells, as the tables of a paper have them."""

from __future__ import annotations

from typing import Any

from helpers.sample_results import TRAINING

WIKI = {"data": "wiki.test.raw.xz", "word": 44.0, "bits_per_byte": 1.1, "tokens": 300_000, "length": 1024, "context": 0}


def run(cell: dict[str, Any], best: Any, **changes: Any) -> dict[str, Any]:
    last = best if isinstance(best, float) else 20.0
    first = TRAINING["validation"][0]
    points = [first | {"tokens": 1_000_000 * i, "perplexity": last * 3 / i} for i in (1, 2, 3)]
    reached = None if best is None else TRAINING["best"] | {"perplexity": best}
    name = "-".join(str(cell.get(part, "")) for part in ("row", "column"))
    own = {"name": name, "cell": cell, "best": reached, "validation": points}
    return TRAINING | own | changes


def in_table_1(row: str, column: str, paper: Any, best: Any, **changes: Any) -> dict[str, Any]:
    return run({"table": "Table 1", "row": row, "column": column, "paper": paper}, best, **changes)


def in_table_2(row: str, paper: Any, best: Any, *tests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return run({"table": "Table 2", "row": row, "paper": paper}, best, tests=list(tests), **changes)


FAILED = {"diverged": {"step": 120, "stage": 1, "reason": "the loss is nan"}, "finished": False}
TABLE_1 = {
    "add_baseline": in_table_1("add", "baseline", 22.6, 31.234),
    "add_norm": in_table_1("add", "no norm", "diverged", 40.0, **FAILED),
    "add_map": in_table_1("add", "no map", 20.0, 28.0),
    "delta_baseline_0": in_table_1("delta", "baseline", 21.6, 33.0, seed=0),
    "delta_baseline_1": in_table_1("delta", "baseline", 21.6, 34.0, seed=1),
    "delta_map": in_table_1("delta", "no map", "diverged", None, **FAILED),
    "decay_baseline": in_table_1("decay", "baseline", "N/A", None, validation=[]),
    "decay_map": in_table_1("decay", "no map", 17.1, 25.5),
}
TABLE_2 = {
    "local": in_table_2("local", 19.4, 30.0, WIKI | {"token": 41.5}),
    "gated_0": in_table_2("gated, m 32", 16.4, 26.0, WIKI | {"token": 36.0}, seed=0, tokens=20_000_000),
    "gated_1": in_table_2("gated, m 32", 16.4, 27.0, WIKI | {"token": 37.0}, seed=1, tokens=25_000_000),
    "decay": in_table_2("decay, m 32", 14.6, 24.0, WIKI | {"token": 31.25}, WIKI | {"token": 30.0, "context": 480}),
}
