"""Tables of the GPU and CPU measurements, for the blocks of docs/speed.md that benchmarks/figures.py fills."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastweights.report.page import Table

ROOT = Path(__file__).parent.parent
# Names of peers that need a word more in a table.
PEERS = {
    "torch SDPA": "attention (torch SDPA, cuDNN)",
    "torch SDPA (flash)": "attention (torch SDPA, FlashAttention 2)",
}


def speed_tables() -> dict[str, Table]:
    """Every table by the name that a page asks for it with."""
    kernels, training, decode = (_result(f"gpu_{name}")["parts"] for name in ("kernels", "training", "decode"))
    operations = _only(_result("gpu_operations")["parts"]["fla"], "decay")
    lines = {
        "operations": (_operations(operations, []), "gpu_operations.json"),
        "delta rules": (_operations(_delta_rules(), []), "gpu_delta_rules.json and gpu_delta_rules_again.json"),
        "operations before": (_operations(kernels["kernels"], kernels["fla"]["peers"]), "gpu_kernels.json"),
        "kernel times": (_parts(kernels["kernels"]["profiles"]), "gpu_kernels.json"),
        "precision": (_precision(_result("gpu_precision")["parts"]["precision"]["cases"]), "gpu_precision.json"),
        "training speed": (_training(training["training"]["models"]), "gpu_training.json"),
        "training, converted": (_training_pieces(_result("training_speed")["measured"]), "training_speed.json"),
        "decoding speed": (_decode(decode["decode"]), "gpu_decode.json"),
        "decoding on a CPU": (_cpu(_result("decode_cpu")), "decode_cpu.json"),
        "chunked on a CPU": (_chunked(_result("cpu")["operations"]), "cpu.json"),
    }
    return {name: _table(name, rows, f"From {file}.") for name, (rows, file) in lines.items()}


def _table(name: str, lines: Sequence[Sequence[str]], note: str) -> Table:
    return Table(lines[0], lines[1:], names=1, note=note, name=name)


def _result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / f"results/{name}.json").read_text())


def _operations(part: dict[str, Any], others: list[dict[str, Any]]) -> list[list[str]]:
    """One line an operation, three lengths side by side: on the device alone, and with Python's launches."""
    shapes = list(dict.fromkeys(row["shape"] for row in part["peers"]))
    others = [*part["peers"], *(row for row in others if row["m"])]
    lines = [["", "m", *(shape.split(", H")[0] for shape in shapes), "peak MiB"]]
    names = dict.fromkeys((row["rule"], row["m"]) for row in part["ops"])
    for rule, m in names:
        rows = {row["shape"]: row for row in part["ops"] if (row["rule"], row["m"]) == (rule, m)}
        cells = [_times(rows.get(shape, {}), "graph ") for shape in shapes]
        lines.append([rule, str(m), *cells, _peak(rows[shapes[0]])])
    rule, m = next(iter(names))
    rows = {row["shape"]: row for row in part["ops"] if (row["rule"], row["m"]) == (rule, m)}
    launched = [_times(rows.get(shape, {}), "") for shape in shapes]
    lines.append([f"{rule}, launched from Python", str(m), *launched, ""])
    for name, m in dict.fromkeys((row["peer"], row["m"]) for row in others if "peak extra MiB" in row):
        rows = {row["shape"]: row for row in others if (row["peer"], row["m"]) == (name, m)}
        in_graph = any("graph forward ms" in row for row in rows.values())
        cells = [_times(rows.get(shape, {}), "graph " if in_graph else "") for shape in shapes]
        lines.append([PEERS.get(name, name), str(m or ""), *cells, _peak(rows[shapes[0]])])
    return lines


def _only(part: dict[str, Any], rule: str) -> dict[str, Any]:
    return part | {"ops": [row for row in part["ops"] if row["rule"] == rule]}


def _delta_rules() -> dict[str, Any]:
    """The rows of the delta rules, those that were measured again in place of the first ones."""
    part, again = _result("gpu_delta_rules")["parts"]["fla"], _result("gpu_delta_rules_again")["ops"]
    rows = {(row["rule"], row["shape"]): row | {"m": 64} for row in [*part["ops"], *again]}
    return part | {"ops": list(rows.values())}


def _times(row: dict[str, Any], way: str) -> str:
    keys = [f"{way}forward ms", f"{way}forward+backward ms"]
    times = [row.get(key) for key in keys]  # an error in place of a time is a dictionary
    return ", ".join(f"{time:.3f}" for time in times) if all(isinstance(time, float) for time in times) else "–"


def _peak(row: dict[str, Any]) -> str:
    return f"{row['peak extra MiB']:.0f}" if "peak extra MiB" in row else "–"


def _parts(profiles: dict[str, Any]) -> list[list[str]]:
    names = ["forward", "backward", "segment_sums", "scan_segments"]
    lines = [["µs of forward + backward", *names]]
    for shape, rows in profiles.items():
        found = {row["kernel"]: row["us"] for row in rows}
        lines.append([shape.split(", H")[0], *(f"{found.get(name, 0):.0f}" for name in names)])
    return lines


def _precision(cases: list[dict[str, Any]]) -> list[list[str]]:
    """The worst of the three shapes, for each rule."""
    names = list(dict.fromkeys(name for case in cases for name in case["errors"]))
    lines = [["rule", "m", "dtype", "gate bias", *names]]
    for key in dict.fromkeys(_case(case) for case in cases):
        errors = [case["errors"] for case in cases if _case(case) == key]
        worst = {name: max(error[name] for error in errors) for name in errors[0]}
        rule, m, dtype, bias = key
        lines.append([rule, str(m), dtype, f"{bias:+g}", *(f"{worst[n]:.1e}" if n in worst else "–" for n in names)])
    return lines


def _case(case: dict[str, Any]) -> tuple[str, int, str, float]:
    return case["rule"], case["m"], case["dtype"], case["bias"]


def _training(models: dict[str, Any]) -> list[list[str]]:
    lines = [["", "tokens/s", "ms a step", "peak GiB", "parameters"]]
    for name, row in models.items():
        step, peak = row["ms a step"]["median"], row["peak MiB"] / 1024
        lines.append([name, f"{row['tokens/s']:,.0f}", f"{step:.1f}", f"{peak:.1f}", f"{row['parameters']:,}"])
    return lines


def _training_pieces(measured: dict[str, Any]) -> list[list[str]]:
    lines = [["", "tokens/s", "ms a step", "GPU busy", "peak GiB"]]
    for name, row in measured.items():
        cells = [f"{row['tokens/s']:,.0f}", f"{row['ms a step']:.1f}", f"{row['profile']['busy share']:.0%}"]
        lines.append([name, *cells, f"{row['peak GiB']:.1f}"])
    return lines


def _decode(part: dict[str, Any]) -> list[list[str]]:
    lines = [["", "batch", "context", "ms a step", "tokens/s", "times the floor"]]
    for name, rows in (("decay", part["decay"]), ("attention", part["attention"])):
        for row in sorted(rows, key=lambda row: (row["batch"], row["context"])):
            if "ms" in row:
                floor = f"{row['times the floor']:.1f}" if "times the floor" in row else "–"
                cells = [f"{row['batch']}", f"{row['context']:,}", f"{row['ms']:.2f}", f"{row['tokens/s']:,.0f}", floor]
                lines.append([name, *cells])
    return lines


def _cpu(result: dict[str, Any]) -> list[list[str]]:
    lines = [["tokens before", "attention", "engine", "ratio"]]
    for row in result["points"]:
        base, engine = row["attention"], row["engine"]
        lines.append([f"{row['length']:,}", f"{1e3 * base:.2f} ms", f"{1e3 * engine:.2f} ms", f"{engine / base:.2f}"])
    return lines


def _chunked(operations: dict[str, Any]) -> list[list[str]]:
    lines = [["rule", "chunked", "plain loop", "split loop", "memory: chunked", "memory: split loop"]]
    for rule in ("decay", "gated", "delta", "add"):
        seconds, peak = operations[rule]["seconds"], operations[rule]["peak bytes"]
        fast = seconds["chunked"]
        loops = [f"{1e3 * seconds[name]:,.0f} ms, {seconds[name] / fast:.1f} ×" for name in ("loop", "split loop")]
        memory = [f"{peak[name] / 1e6:.0f} MB" for name in ("chunked", "split loop")]
        lines.append([rule, f"{1e3 * fast:.0f} ms", *loops, *memory])
    return lines
