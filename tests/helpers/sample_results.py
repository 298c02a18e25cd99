"""Small results of every kind, and pages made from them taken apart again."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fastweights.report import make_report

NAN, INFINITY = float("nan"), float("inf")
PROVENANCE = {
    "date": "2026-11-20",
    "commit": "abcdef123456",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "hardware": {"cpu": "x86_64", "threads": 2},
}


CACHE = [
    {"tokens": 1024, "bytes": 2_211_840, "base_bytes": 47_185_920},
    {"tokens": 65536, "bytes": 2_211_840, "base_bytes": 3_019_898_880},
]


def evaluated(name: str, converted: bool, factor: float) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": 134_515_008,
        "converted": converted,
        "rule": "decay" if converted else "attention",
        "state_bytes": 2_211_840 if converted else 0,
        **({"cache": CACHE} if converted else {}),
        "perplexity": [
            {"data": "wiki", "length": 1024, "context": 0, "tokens": 5000, "token": 20.0 * factor, "word": 31.5}
            | {"bits_per_byte": 0.8125 * factor},
            {"data": "wiki", "length": 1024, "context": 480, "tokens": 5000, "token": 16.0 * factor},
        ],
        "by_position": [
            {"from": 0, "to": 64, "loss": 3.0, "perplexity": 40.0 * factor, "tokens": 64},
            {"from": 64, "to": 128, "loss": 2.9, "perplexity": 18.25 * factor, "tokens": 64},
        ],
        "recall": {
            "pairs": [
                {"distance": 16, "accuracy": 0.97, "chance": 0.125, "samples": 64},
                {"distance": 512, "accuracy": 0.95 / factor**4, "chance": 0.125, "samples": 64},
            ],
            "copy": [{"distance": 16, "accuracy": 0.5, "chance": 1e-5, "samples": 64}],
        },
        "tasks": {"lambada": {"acc": 0.43 / factor, "acc_stderr": 0.007}, "wikitext": {"word_perplexity": 33.25}},
        "seconds": 12.5,
    }


EVALUATION = {
    "kind": "evaluation",
    **PROVENANCE,
    "seed": 0,
    "tokens": 5000,
    "settings": {"length": 1024, "contexts": [0, 480], "batch_size": 8},
    "models": [evaluated("gpt2", False, 1.0), evaluated("gpt2-decay", True, 1.25)],
}
COST = {
    "kind": "cost",
    **PROVENANCE,
    "seed": 0,
    "tokens": 16,
    "batch": 1,
    "dtype": "float32",
    "device": "cpu",
    "models": [
        {
            "name": "gpt2",
            "converted": False,
            "points": [
                {"length": 256, "seconds": 0.004, "bytes": 4_000_000},
                {"length": 1024, "seconds": 0.012, "bytes": 16_000_000},
            ],
            "positions": "table repeated for timing",
        },
        {
            "name": "gpt2-decay",
            "converted": True,
            "points": [
                {"length": 256, "seconds": 0.006, "bytes": 500_000},
                {"length": 1024, "seconds": 0.006, "bytes": 500_000},
            ],
        },
    ],
    "cheaper_from": {"seconds": 449, "bytes": 256},
}
TRAINING = {
    "kind": "training",
    **PROVENANCE,
    "seed": 3,
    "tokens": 3_000_000,
    "name": "paper-run",
    "recipe": {"lr": 1e-3, "stages": [{"loss": "transfer"}]},
    "model": {"name": "gpt2-decay", "parameters": 1, "settings": {"rule": "decay", "m": 32, "window": 0}},
    "data": {"name": "books.txt", "tokens": 9_000_000},
    "base": {"name": "gpt2", "perplexity": 14.5},
    "processes": 1,
    "stages": [
        {"name": "transfer", "loss": "transfer", "steps": 100, "tokens": 1_000_000, "seconds": 90.0},
        {"name": "finetune", "loss": "finetune", "steps": 200, "tokens": 2_000_000, "seconds": 7300.0},
    ],
    "curve": [{"step": 50 * i, "tokens": 500_000 * i, "stage": int(i >= 3), "loss": 4.0 / i} for i in range(1, 7)],
    "validation": [
        {"step": 100 * i, "tokens": 1_000_000 * i, "stage": 1, "loss": 3.0, "perplexity": 14.0 + 30.0 / i**2}
        for i in range(1, 4)
    ],
    "best": {"step": 300, "tokens": 3_000_000, "stage": 1, "loss": 2.85, "perplexity": 17.3333},
    "last": {"step": 300, "tokens": 3_000_000, "stage": 1, "loss": 2.86, "perplexity": 17.4},
    "diverged": None,
    "seconds": 7390.0,
    "finished": True,
}
RANKING = {
    "kind": "ranking",
    **PROVENANCE,
    "seed": 0,
    "tokens": 65_536,
    "model": {"name": "gpt2-decay", "base": "gpt2", "settings": {"rule": "decay", "m": 32, "window": 0}},
    "data": {"name": "books.txt"},
    "settings": {"keep": 2, "fit": False, "length": 512, "device": "cpu"},
    "kl": 0.25,
    "layers": [
        {"layer": 3, "kl": 0.125, "gain": 0.125},
        {"layer": 0, "kl": 0.2, "gain": 0.05},
        {"layer": 7, "kl": 0.2625, "gain": -0.0125},
    ],
    "chosen": [3, 0],
    "kl_after": [0.125, 0.0875],
    "seconds": 42.0,
}
ALL = {"eval": EVALUATION, "cost": COST, "train": TRAINING, "rank": RANKING}
PLOTS = {"position", "recall_pairs", "recall_copy", "seconds", "bytes", "loss", "validation", "ranking"}


def diverged(**changes: Any) -> dict[str, Any]:
    ending = {"diverged": {"step": 120, "stage": 1, "reason": "the loss is nan"}, "finished": False}
    curve = [*TRAINING["curve"][:3], {"step": 120, "tokens": 1_600_000, "stage": 1, "loss": NAN}]
    worst = {"best": None, "last": TRAINING["last"] | {"loss": INFINITY, "perplexity": INFINITY}}
    return TRAINING | ending | {"curve": curve, "validation": TRAINING["validation"][:1]} | worst | changes


def write(folder: Path, results: dict[str, Any]) -> list[Path]:
    paths = [folder / f"{name}.json" for name in results]
    for path, result in zip(paths, results.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    return paths


def report(folder: Path, results: dict[str, Any], **options: Any) -> tuple[str, str]:
    """The Markdown and the HTML."""
    page = make_report(write(folder, results), folder / "report", **options)
    return (folder / "report" / "report.md").read_text(), page.read_text()


def section(markdown: str, title: str) -> str:
    return markdown.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def tables(markdown: str) -> list[list[list[str]]]:
    """Rows of cells, the rule below the header left out; every row as wide as its header."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", markdown, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        assert all(re.fullmatch("---:?", cell) for cell in rows[1])
        assert {len(row) for row in rows} == {len(rows[0])}
        found.append([rows[0], *rows[2:]])
    return found


def table(markdown: str, *header: str) -> list[dict[str, str]]:
    for first, *rows in tables(markdown):
        if set(header) <= set(first):
            return [dict(zip(first, row, strict=True)) for row in rows]
    raise AssertionError(f"no table has {header}: {[found[0] for found in tables(markdown)]}")


def svg_texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


class Page(HTMLParser):
    """What an HTML page is made of, and whether its tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img"):
            self._open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._open and self._open[-1] in ("td", "th"):
            self.cells[-1] += data
