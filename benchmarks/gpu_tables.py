"""The targets of benchmarks/gpu.py, whether they are reached, and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 140
TIMES = ["forward ms", "forward+backward ms", "peak extra MiB"]
GRAPH_TIMES = ["graph forward ms", "graph forward+backward ms"]
ASKED = (32, 16384)
# Milliseconds in a graph that are asked for, by m and T.
FORWARD_BACKWARD_MS = {32: {1024: 0.42, 4096: 0.45, 16384: 0.47}, 64: {1024: 0.62, 4096: 0.70, 16384: 0.72}}

Rows = list[dict[str, Any]]
# The worst of what was found, None where something is missing; how it is to compare; with what.
Targets = dict[str, tuple[float | None, str, float]]


def targets(parts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: Targets = {}
    if "precision" in parts:
        for dtype, limit in (("bfloat16", 5e-3), ("float32", 1e-4)):
            cases = [case for case in parts["precision"].get("cases", []) if case["dtype"] == dtype]
            worst = _worst(max(case["errors"].values()) if "errors" in case else None for case in cases)
            found[f"relative error, {dtype}"] = (worst, "<=", limit)
    if "kernels" in parts:
        found |= _kernel_targets(parts["kernels"])
    if "fla" in parts:
        found |= _fla_targets(parts["fla"])
    if "first_call" in parts:
        waits = [call["waited seconds"] for call in parts["first_call"].get("shapes", {}).values()]
        found["first call on a new shape: seconds"] = (_worst(waits), "<=", 5)
    if "training" in parts:
        speeds = {name: row.get("tokens/s") for name, row in parts["training"].get("models", {}).items()}
        ratio = _ratio(speeds.get("decay"), speeds.get("attention"))
        found["training: decay's tokens/s over attention's"] = (ratio, ">=", 1)
    if "decode" in parts:
        found |= _decode_targets(parts["decode"])
    return {
        name: {"found": value, "wanted": f"{sign} {limit:g}", "reached": _reached(value, sign, limit)}
        for name, (value, sign, limit) in found.items()
    }


def _kernel_targets(part: dict[str, Any]) -> Targets:
    ours = _of(part, "decay", 32)
    fastest: dict[str, float] = {}
    for row in part.get("peers", []):
        if "forward+backward ms" in row:
            fastest[row["shape"]] = min(row["forward+backward ms"], fastest.get(row["shape"], math.inf))
    found: Targets = {"decay, m 32: peak extra MiB": (_worst(row.get("peak extra MiB") for row in ours), "<=", 400)}
    for m, limits in FORWARD_BACKWARD_MS.items():
        rows = {row["T"]: row for row in _of(part, "decay", m)}
        for length, limit in limits.items():
            in_graph = rows.get(length, {}).get(GRAPH_TIMES[1])
            found[f"decay, m {m}, T {length}: {GRAPH_TIMES[1]}"] = (in_graph, "<=", limit)
            launched = _ratio(rows.get(length, {}).get(TIMES[1]), in_graph)
            found[f"decay, m {m}, T {length}: launched from Python over graph"] = (launched, "<=", 1.15)
    for key in (TIMES[1], GRAPH_TIMES[1]):
        ratios = [_ratio(row.get(key), fastest.get(row["shape"])) for row in ours]
        found[f"decay, m 32: {key} over the fastest attention's"] = (_worst(ratios), "<=", 1)
    decay = {row["T"]: row.get(GRAPH_TIMES[1]) for row in _of(part, "decay", 64)}
    for rule in ("delta", "gated_delta"):
        ratios = [_ratio(row.get(GRAPH_TIMES[1]), decay.get(row["T"])) for row in _of(part, rule, 64)]
        found[f"{rule}, m 64: {GRAPH_TIMES[1]} over decay's"] = (_worst(ratios), "<=", 2)
    return found


def _fla_targets(part: dict[str, Any]) -> Targets:
    ours = {row["shape"]: row for row in part.get("ops", []) if row["rule"] == "gated_delta"}
    kda = [row for row in part.get("peers", []) if row["peer"] == "fla chunk_kda"]
    found: Targets = {}
    for key in (TIMES[1], GRAPH_TIMES[1]):
        ratios = [_ratio(row.get(key), ours.get(row["shape"], {}).get(key)) for row in kda]
        found[f"gated_delta, m 64: fla chunk_kda's {key} over ours"] = (_least(ratios), ">=", 2)
    return found


def _of(part: dict[str, Any], rule: str, m: int) -> Rows:
    """The rows of an operation, each with its length."""
    rows = [row for row in part.get("ops", []) if (row["rule"], row["m"]) == (rule, m)]
    return [row | {"T": int(row["shape"].split(", ")[1].removeprefix("T "))} for row in rows]


def _decode_targets(part: dict[str, Any]) -> Targets:
    rows = {(row["batch"], row["context"]): row for row in part.get("decay", [])}
    by_batch: dict[int, Rows] = {}
    for (batch, _), row in rows.items():
        by_batch.setdefault(batch, []).append(row)
    found: Targets = {}
    for batch, of_batch in by_batch.items():
        spent = [row["ms"] for row in of_batch if "ms" in row]
        ratio = max(spent) / min(spent) if len(spent) == len(of_batch) else None
        found[f"decode, batch {batch}: slowest context over fastest"] = (ratio, "<=", 1.1)
    for batch, limit in ((1, 6), (256, 2.5)):
        worst = _worst(row.get("times the floor") for row in by_batch.get(batch, []))
        found[f"decode, batch {batch}: times the floor"] = (worst, "<=", limit)
    peer = {(row["batch"], row["context"]): row.get("tokens/s") for row in part.get("attention", [])}
    ratio = _ratio(rows.get(ASKED, {}).get("tokens/s"), peer.get(ASKED))
    found["decode, batch 32, context 16384: tokens/s over attention's"] = (ratio, ">=", 10)
    return found


def _worst(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    return None if not listed or None in listed else max(value for value in listed if value is not None)


def _least(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    return None if not listed or None in listed else min(value for value in listed if value is not None)


def _ratio(a: Any, b: Any) -> float | None:
    """a / b of two times. None if one is missing or failed, which left a dictionary with the error."""
    return a / b if isinstance(a, float) and isinstance(b, float) else None


def _reached(value: float | None, sign: str, limit: float) -> bool:
    if value is None:
        return False
    return value <= limit if sign == "<=" else value >= limit


def show_part(name: str, part: dict[str, Any]) -> None:
    tables = {
        "precision": _precision,
        "kernels": _kernels,
        "fla": _operations,
        "first_call": lambda part: [_text(part["shapes"])],
        "training": _training,
        "decode": _decode,
    }
    Console(width=WIDTH).print(*tables[name](part))
    print(f"{name}: {part['seconds']:.0f} seconds", flush=True)


def show_targets(result: dict[str, Any]) -> None:
    rows = [
        [name, row["found"], row["wanted"], "yes" if row["reached"] else "NO"]
        for name, row in result["targets"].items()
    ]
    spent = ", ".join(f"{name} {part.get('seconds', 0):.0f} s" for name, part in result["parts"].items())
    Console(width=WIDTH).print(_table("targets", ["target", "found", "wanted", "reached"], rows), spent)


def _precision(part: dict[str, Any]) -> list[Any]:
    tables = []
    for rule, m in dict.fromkeys((case["rule"], case["m"]) for case in part["cases"]):
        cases = [case for case in part["cases"] if case["rule"] == rule]
        names = list(next((case["errors"] for case in cases if "errors" in case), {}))
        rows = [case | case.get("errors", {}) for case in cases]
        title = f"relative error of {rule}, m {m}, against the float64 loop"
        tables.append(_columns(title, ["shape", "bias", "dtype", *names, "limit"], rows))
    return tables


def _kernels(part: dict[str, Any]) -> list[Any]:
    profiles = [
        _table(
            f"decay, m 32, {shape}: what the time goes to", ["kernel", "us", "share"], [row.values() for row in rows]
        )
        for shape, rows in part["profiles"].items()
        if isinstance(rows, list)
    ]
    return [
        *profiles,
        *_operations(part),
    ]


def _operations(part: dict[str, Any]) -> list[Any]:
    of_peers = ["shape", "peer", "m", "first seconds", "error of y"]
    ops = [row | {"worst error": max(row["errors"].values()) if "errors" in row else None} for row in part["ops"]]
    return [
        _columns("operations, bfloat16", ["shape", "rule", "m", "worst error", *TIMES, *GRAPH_TIMES], ops),
        _columns("peers, bfloat16", [*of_peers, *TIMES, *GRAPH_TIMES], part["peers"]),
    ]


def _training(part: dict[str, Any]) -> list[Any]:
    keys = ["model", "tokens/s", "ms a step", "peak MiB", "first step seconds", "graphs", "graph breaks"]
    rows = [{"model": name} | row for name, row in part["models"].items()]
    return [_columns(f"training, {part['model']}, B {part['batch']}, T {part['length']}", keys, rows)]


def _decode(part: dict[str, Any]) -> list[Any]:
    keys = ["batch", "context", "ms", "tokens/s"]
    attention = [*keys, "prompt", "all seconds"]
    return [
        _columns(f"decoding, {part['model']}", [*keys, "step alone ms", "floor ms", "times the floor"], part["decay"]),
        _columns(f"decoding, attention: {part['attention is']}", attention, part["attention"]),
    ]


def _columns(title: str, keys: list[str], rows: Rows) -> Table:
    """A row's own entries; what failed has a reason instead of values."""
    return _table(title, [*keys, "failed"], [[*(row.get(key) for key in keys), _failure(row)] for row in rows])


def _failure(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    wrong = {name: value for name, value in row.get("errors", {}).items() if value > row["limit"]}
    return "" if row.get("passed", True) else f"FAILED {_text(wrong)}"


def _table(title: str, headers: list[str], rows: Iterable[Iterable[Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, header in enumerate(headers):
        table.add_column(header, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"
    return "-" if value is None else str(value)
