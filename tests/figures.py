"""What tests of figures in pages need: the pages' words, and the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
Json = dict[str, Any]


def says(page: str, *phrases: str) -> None:
    """The page has every phrase, wherever its lines break; a number at the end of a phrase ends there, too."""
    text = " ".join((ROOT / page).read_text().split())
    found = {phrase: re.search(rf"(?<![\d.,]){re.escape(phrase)}(?!\d|[.,]\d)", text) for phrase in phrases}
    missing = [phrase for phrase, match in found.items() if not match]
    assert not missing, f"{page} does not say what the result files say: {missing}"


def result(name: str) -> Json:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def folder(name: str) -> dict[str, Json]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "results" / name).glob("*.json"))}


def rate(value: float, digits: int = 0) -> str:
    """As in 5e-4, or 1.5e-4."""
    return f"{value:.{digits}e}".replace("e-0", "e-")


def million(tokens: float, digits: int = 0) -> str:
    return f"{tokens / 1e6:.{digits}f}"


def after_stage(run: Json, stage: int) -> float:
    """The validation perplexity at a stage's end."""
    tokens = sum(part["tokens"] for part in run["stages"][: stage + 1])
    return next(point["perplexity"] for point in run["validation"] if point["tokens"] == tokens)


def target(file: Json, name: str) -> tuple[float, str]:
    """What was found, and what was meant to be reached, as written."""
    entry = file["targets"][name]
    return entry["found"], entry["wanted"].split()[-1]
