"""Single values of result files, written as short expressions in a page: no code of the page is ever run.

    results/gpu_decode.json parts.decode.decay[batch=1, context=1024].tokens/s as ,.3s

An expression is an operand, or several joined by +, -, * and / (spaces around them), computed from left to right.
An operand is a number, or `[mean|min|max|count] [FILE.json] PATH`; without a file it reads that of the first operand.
A path is keys joined by dots ("quoted" where a key has a dot or an operator in it; `a or b` takes the first there is;
`*` takes all), each followed by any number of [3], [-1], [*] or [key=value, ...].
After ` as ` comes a format of Python's (`,.2f`, `.1%`, `.1e`) or `,.3s`, three significant digits without an exponent,
and a unit: `.1f ms` of 0.0123 is "12.3 ms", `.1f in ms` is "12.3".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fastweights.report.results import ReportError
from fastweights.utils.parsing import ParseError, read_json

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "min": 60.0}
UNITS |= {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}
UNITS |= {"thousand": 1e3, "million": 1e6, "M": 1e6}
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
FUNCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {"mean": fmean, "min": min, "max": max, "count": len}

_JOINED = re.compile(r' ([-+*/]) (?=(?:[^"]*"[^"]*")*[^"]*$)')
_OPERAND = re.compile(r"(?:(?P<function>mean|min|max|count) )?(?:(?P<file>\S+\.json) )?(?P<path>.+)")
_STEP = re.compile(r'\.?(?:"(?P<quoted>[^"]+)"|(?P<key>[^."\[\]]+)|\[(?P<select>[^\]]+)\])')
_CONDITIONS = re.compile(r", (?=[^,=]+=)")
_FORMAT = re.compile(r"(?P<spec>\+?,?(?:\.\d+)?[fegs%]?)(?: (?P<bare>in )?(?P<unit>\S+))?")


def value_text(expression: str, folder: Path) -> str:
    """Compute an expression and write it as its format says.

    Args:
        expression: what stands between `value:` and the end of the comment.
        folder: where result files are looked for, in it and then in the folders above it.

    Raises:
        ReportError: the expression is not understood, or the results do not have what it names.
    """
    calculation, separator, layout = expression.rpartition(" as ")
    if not separator:
        return _plain_text(_calculate(expression, folder))
    return _formatted(_calculate(calculation, folder), layout.strip())


def _calculate(expression: str, folder: Path) -> Any:
    first, *rest = _JOINED.split(expression)
    total, file = _operand(first.strip(), None, folder)
    for sign, operand in zip(rest[::2], rest[1::2], strict=True):
        other, _ = _operand(operand.strip(), file, folder)
        if not _is_number(total) or not _is_number(other):
            raise ReportError(f"{expression!r} computes with {total!r} and {other!r}: both must be numbers")
        total = OPERATORS[sign](total, other)
    return total


def _operand(text: str, file: Path | None, folder: Path) -> tuple[Any, Path | None]:
    """The operand's value, and the file it came from."""
    try:
        return float(text), file
    except ValueError:
        pass
    parts = _OPERAND.fullmatch(text)
    if parts is None:
        raise ReportError(f"{text!r} is not a value: write FILE.json and a path of keys")
    file = find_result(parts["file"], folder) if parts["file"] else file
    if file is None:
        raise ReportError(f"{text!r} names no file: begin it with one, results/NAME.json")
    found = _follow([_read(file)], parts["path"].strip(), file)
    if parts["function"]:
        return FUNCTIONS[parts["function"]](found), file
    if len(found) != 1:
        raise ReportError(f"{parts['path']!r} names {len(found)} values of {file.name}: put mean, min or max before it")
    return found[0], file


def find_result(name: str, folder: Path) -> Path:
    """The file of this name in a folder, or in the nearest one above it that has it."""
    folder = folder.resolve()
    for above in (folder, *folder.parents):
        if (above / name).is_file():
            return above / name
    raise ReportError(f"no result file {name} in {folder} or above it")


def _read(file: Path) -> Any:
    try:
        return read_json(file)
    except (OSError, ParseError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from error


def _follow(found: list[Any], path: str, file: Path) -> list[Any]:
    position = 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise ReportError(f"the path {path!r} is not understood from {path[position:]!r} on")
        found = [item for one in found for item in _take(one, step)]
        if not found:
            raise ReportError(f"{file.name} has nothing at {path[: step.end()]!r}")
        position = step.end()
    return found


def _take(item: Any, step: re.Match[str]) -> list[Any]:
    if step["select"]:
        return _selected(item, step["select"].strip()) if isinstance(item, list) else []
    if not isinstance(item, dict):
        return []
    if step["key"] == "*":
        return list(item.values())
    names = [step["quoted"]] if step["quoted"] else step["key"].split(" or ")
    return next(([item[name]] for name in names if name in item), [])


def _selected(items: list[Any], select: str) -> list[Any]:
    if select == "*":
        return items
    if re.fullmatch(r"-?\d+", select):
        return items[int(select) :][:1]
    conditions = [condition.split("=", 1) for condition in _CONDITIONS.split(select) if "=" in condition]
    return [item for item in items if conditions and all(_plain_text(item.get(key)) == v for key, v in conditions)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


def _formatted(value: Any, layout: str) -> str:
    parts = _FORMAT.fullmatch(layout)
    unit = parts and parts["unit"]
    if parts is None or (unit and unit not in UNITS):
        known = ", ".join(UNITS)
        raise ReportError(f"{layout!r} is not a format: write one such as ,.2f or .1f ms; units are {known}")
    if not _is_number(value) or not math.isfinite(value):
        raise ReportError(f"{value!r} cannot be written as {layout!r}: it is not a finite number")
    scaled = value / UNITS[unit] if unit else value
    text = _significant(scaled, parts["spec"]) if parts["spec"].endswith("s") else format(scaled, parts["spec"])
    text = text.replace("%", " %")
    return f"{text} {unit}" if unit and not parts["bare"] else text


def _significant(value: float, spec: str) -> str:
    """`,.3s`: 467,871 is 468,000 and 0.0012345 is 0.00123."""
    digits = int(spec.rstrip("s").partition(".")[2] or 3)
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else digits - 1
    return format(round(value, places), f"{spec.partition('.')[0].rstrip('s')}.{max(places, 0)}f")
