"""Fill every table, plot and value of README.md and docs/; with --check only say which pages are not up to date.

python benchmarks/figures.py [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from decode_cpu_figures import decode_cpu_parts
from paper_tables import paper_tables
from serving_figures import serving_plots
from speed_tables import speed_tables
from wikitext103 import table_3

from fastweights.config import FastWeightsConfig
from fastweights.report import fill_page, is_filled
from fastweights.report.page import Code, Plot, Table
from fastweights.report.plots import draw
from fastweights.report.training import Curve, curves_panel

ROOT = Path(__file__).parent.parent


def stale_pages(write: bool) -> list[str]:
    """The pages in which something was not up to date."""
    pages = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if is_filled(page)]
    parts = {**speed_tables(), **paper_tables(), "settings": _settings(), "recipes compared": _recipes_compared()}
    parts |= {"damaged files": _damaged_files(), **_quickstart(), **_ranking(), **serving_plots(), **decode_cpu_parts()}
    parts |= {"Table 3": table_3(), "window layouts": _window_layouts()}
    return [str(page.relative_to(ROOT)) for page in pages if fill_page(page, parts=parts, write=write)]


def _settings() -> Table:
    """Every field of FastWeightsConfig, in the words of the command line's help."""
    rows = [
        [f.name, str(f.default), ", ".join(f.metadata["choices"]), f.metadata["help"]]
        for f in dataclasses.fields(FastWeightsConfig)
    ]
    return Table(["setting", "default", "choices", "meaning"], rows, names=4, name="settings")


def _window_layouts() -> Table:
    """Attention limited to windows, without training."""
    result = json.loads((ROOT / "results/wide_windows.json").read_text())
    distances = list(result["layouts"][0]["copy"])
    header = ["window", "memory of the windows", "perplexity", "repeated passages"]
    header += [f"{name}, {distance}" for name in ("copied", "pairs") for distance in distances]
    rows = []
    for row in result["layouts"]:
        wide = f", in {len(row['wide layers'])} layers {row['wide window']}" if row["wide window"] else ""
        memory = f"{row['state bytes'] / 2e6:.1f} MB" if row["window"] else "–"  # measured in float32
        recalled = [f"{row[name][distance]:.0%}" for name in ("copy", "pairs") for distance in distances]
        name = f"{row['window']}{wide}" if row["window"] else "none: the base"
        rows.append([name, memory, f"{row['perplexity']:.2f}", f"{row['repeated']:.0%}", *recalled])
    return Table(header, rows, names=1, note="From wide_windows.json.", name="window layouts")


def _quickstart() -> dict[str, Code]:
    """What the quickstart printed, and the table of its models alone."""
    output = json.loads((ROOT / "results/quickstart.json").read_text())["output"]
    lines = [line.rstrip() for line in output.splitlines()]
    last = max(i for i, line in enumerate(lines) if line.startswith(" model "))
    table = lines[last : lines.index("", last)]
    return {"quickstart": Code("", "\n".join(lines)), "quickstart table": Code("", "\n".join(table))}


def _ranking() -> dict[str, Table]:
    """The layers of the packaged model, ranked, and those that are chosen one after the other."""
    result = json.loads((ROOT / "results/rank_packaged.json").read_text())
    layers = [[str(row["layer"]), f"{row['kl']:.4f}", f"{row['gain']:+.4f}"] for row in result["layers"]]
    chosen = [[str(layer), f"{kl:.4f}"] for layer, kl in zip(result["chosen"], result["kl_after"], strict=True)]
    return {
        "ranking": Table(["layer", "KL with it restored", "gain"], layers, names=0, name="ranking"),
        "chosen layers": Table(["keep", "KL with those so far"], chosen, names=0, name="chosen layers"),
    }


def _damaged_files() -> Table:
    """Outcomes of mutated files, now and how many ended badly before."""
    result = json.loads((ROOT / "results/trust_files.json").read_text())
    before = {kind["name"]: kind["failures"] for kind in result["before"]["kinds"]}
    header = ["file", "same result", "other valid value", "refused by name", "bad", "bad before"]
    outcomes = ("same", "changed", "refused", "failures")
    rows = [
        [kind["name"], *(f"{kind[outcome]:,}" for outcome in outcomes), str(before.get(kind["name"], "–"))]
        for kind in result["after"]["kinds"]
    ]
    return Table(header, rows, note="From trust_files.json.", name="damaged files")


def _curve(run: dict[str, Any]) -> Curve:
    return Curve([(point["tokens"], point["perplexity"]) for point in run["validation"]], run["diverged"] is not None)


def _recipes_compared() -> Plot:
    result = json.loads((ROOT / "results/recipes_compared.json").read_text())
    caption = "Validation perplexity against tokens for two recipes, three seeds each. From recipes_compared.json."
    curves = {label: [_curve(run) for run in runs] for label, runs in result["runs"].items()}
    panel = curves_panel(curves, result["base"])
    return Plot("recipes_compared.svg", lambda: draw(panel), caption, "recipes compared")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check = parser.parse_args().check
    stale = stale_pages(write=not check)
    print("\n".join(f"{page}: {'not up to date' if check else 'filled'}" for page in stale) or "all up to date")
    sys.exit(int(check and bool(stale)))
