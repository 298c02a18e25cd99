"""Result files as training, evaluation and profiling write them, read back; and their numbers in words.

Any field may be absent and any number may be NaN: a run that failed has results, too.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from fastweights.utils.errors import FastWeightsError

KINDS = ("training", "evaluation", "cost")
MEASURES = {"perplexity", "by_position", "recall", "tasks"}
MISSING = "–"
DIVERGED = "diverged"
ResultFile = str | os.PathLike


class ReportError(FastWeightsError):
    """A report that cannot be made, with the file and the reason."""


@dataclass(frozen=True)
class Result:
    """`file` is as much of the path as tells it from the others."""

    file: str
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        return self.body["kind"]


@dataclass(frozen=True)
class Entry:
    """A model or a training run, under a label that no other has here."""

    label: str
    file: str
    body: dict[str, Any]
    converted: bool = True

    @property
    def diverged(self) -> dict[str, Any] | None:
        return self.body.get("diverged") or None

    @property
    def files(self) -> set[str]:
        """Those of a model that was measured in parts."""
        return set(self.file.split(", "))


def read_results(paths: Iterable[ResultFile]) -> list[Result]:
    """Results in the order given, a file named twice only once."""
    unique = list({Path(path).resolve(): Path(path) for path in paths}.values())
    return [Result(name, _read(path)) for name, path in zip(_short_names(unique), unique, strict=True)]


def _read(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ReportError(f"no result file at {path}: fastweights train, eval and profile write them") from error
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}; give a result file (.json)") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path} is not text: give a result file (.json)") from error
    except json.JSONDecodeError as error:
        raise ReportError(f"{path} is not JSON: line {error.lineno}: {error.msg}; write the result again") from error
    kind = body.get("kind") if isinstance(body, dict) else None
    if kind not in KINDS:
        found = "no kind" if kind is None else f"kind {kind!r}"
        raise ReportError(f"{path} has {found}: a report is made from results of the kinds {', '.join(KINDS)}")
    return body


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of the paths, long enough to differ."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return []


def models_in(results: Sequence[Result]) -> list[Entry]:
    """The models of all evaluations, one that was measured in parts as one. The first of all is taken for a base
    model where a result does not say."""
    found = [
        (str(body.get("name") or "model"), result.file, body)
        for result in results
        if result.kind == "evaluation"
        for body in objects(result.body, "models")
    ]
    return [
        Entry(label, file, body, bool(body.get("converted", i > 0)))
        for i, (label, file, body) in enumerate(_labelled(_joined(found)))
    ]


def _joined(found: Sequence[tuple[str, str, dict[str, Any]]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Models of one name that agree in all that both files say, and were measured in different ways in each."""
    joined: list[tuple[str, str, dict[str, Any]]] = []
    for name, file, body in found:
        for i, (other_name, other_file, other) in enumerate(joined):
            both = (body.keys() & other.keys()) - {"seconds"}
            if other_name == name and not both & MEASURES and all(body[key] == other[key] for key in both):
                joined[i] = name, f"{other_file}, {file}", other | body
                break
        else:
            joined.append((name, file, body))
    return joined


def runs_in(results: Sequence[Result]) -> list[Entry]:
    """The training runs. Those of one name are told apart by their seeds, or else by their files."""
    found = [(_run_name(result.body), result.file, result.body) for result in results if result.kind == "training"]
    names = Counter(name for name, _, _ in found)
    seeded = [
        (f"{name}, seed {body['seed']}" if names[name] > 1 and "seed" in body else name, file, body)
        for name, file, body in found
    ]
    return [Entry(label + "*" * bool(body.get("diverged")), file, body) for label, file, body in _labelled(seeded)]


def _run_name(body: dict[str, Any]) -> str:
    return str(body.get("name") or value_at(body, "model", "name") or "run")


def _labelled(found: Sequence[tuple[str, str, dict[str, Any]]]) -> list[tuple[str, str, dict[str, Any]]]:
    """The same without copies; after a name that is not the only one its file, and a number if that is not enough."""
    kept = [item for i, item in enumerate(found) if not any(item[::2] == other[::2] for other in found[:i])]
    names = Counter(name for name, _, _ in kept)
    seen: Counter[tuple[str, str]] = Counter()
    labelled = []
    for name, file, body in kept:
        seen[name, file] += 1
        again = f", {seen[name, file]}" if seen[name, file] > 1 else ""
        labelled.append((f"{name} ({file}{again})" if names[name] > 1 else name, file, body))
    return labelled


def base_of(model: Entry, models: Sequence[Entry]) -> Entry | None:
    """What a model is compared with: the unconverted model of its own file, else of any, else the first of all."""
    unconverted = [other for other in models if not other.converted]
    nearest = [other for other in unconverted if other.files & model.files] or unconverted or list(models)
    return None if nearest[0] is model or not model.converted else nearest[0]


def value_at(body: Any, *path: str) -> Any:
    for name in path:
        body = body.get(name) if isinstance(body, dict) else None
    return body


def objects(body: Any, *path: str) -> list[dict[str, Any]]:
    """The list of objects at a path, empty where there is none."""
    found = value_at(body, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def number(value: Any) -> float | None:
    """A number as it stands in a result, NaN and infinity included; None for anything else."""
    return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)


def finite(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def ratio(value: Any, base: Any) -> float | None:
    above, below = finite(value), finite(base)
    return None if above is None or not below else above / below


def perplexity_text(value: Any) -> str:
    found = number(value)
    if found is None:
        return MISSING
    if not math.isfinite(found):
        return DIVERGED
    if found >= 1e9:
        return f"{found:.1e}"
    if found >= 1e6:
        return f"{found / 1e6:,.1f} million"
    return f"{found:,.0f}" if found >= 1000 else f"{found:.1f}" if found >= 100 else f"{found:.2f}"


def whole(value: Any) -> str:
    found = finite(value)
    return MISSING if found is None else f"{found:,.0f}"


def count_text(value: Any) -> str:
    """Tokens and parameters: 512, 10,240, 25.6 M, 3.3 B."""
    found = finite(value)
    if found is None or abs(found) < 1e6:
        return whole(value)
    return f"{found / 1e9:.3g} B" if abs(found) >= 0.9995e9 else f"{found / 1e6:.3g} M"


def percent_text(value: Any, digits: int = 1) -> str:
    found, smallest = finite(value), 10**-digits
    if found is not None and 0 < 100 * found < smallest / 2:
        return f"< {smallest:g} %"
    return MISSING if found is None else f"{100 * found:.{digits}f} %"


def times_text(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f} ×" if value >= 100 else f"{value:.{1 + (value < 10)}f} ×"


def bytes_text(value: Any) -> str:
    found = finite(value)
    return MISSING if found is None else decimal(int(found))


def seconds_text(value: Any) -> str:
    found = finite(value)
    if found is None:
        return MISSING
    if found < 0.9995:
        return f"{1e3 * found:.3g} ms" if found >= 0.9995e-3 else f"{1e6 * found:.3g} µs"
    if found < 120:
        return f"{found:.3g} s"
    return f"{found / 60:.0f} min" if found < 7200 else f"{found / 3600:.1f} h"


def axis_text(value: float) -> str:
    return count_text(value) if abs(value) >= 1000 else f"{value:.4g}"


def settings_text(settings: Any) -> str:
    """The settings that most tell models apart, in a few words."""
    if not isinstance(settings, dict):
        return MISSING
    parts = [str(settings.get("rule", MISSING))]
    parts += [f"{name} {settings[name]}" for name in ("m", "window") if settings.get(name)]
    return ", ".join(parts)
