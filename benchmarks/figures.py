"""Fill every table, plot and value of README.md and docs/ from results/; with --check only list what is not up to date.

python benchmarks/figures.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from speed_tables import speed_tables

from fastweights.report import fill_page, is_filled
from fastweights.report.page import Plot
from fastweights.report.plots import draw
from fastweights.report.training import comparison

ROOT = Path(__file__).parent.parent


def stale_pages(write: bool) -> list[str]:
    """The pages in which something was not up to date."""
    pages = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if is_filled(page)]
    parts = {**speed_tables(), "recipes compared": _recipes_compared()}
    return [str(page.relative_to(ROOT)) for page in pages if fill_page(page, parts=parts, write=write)]


def _recipes_compared() -> Plot:
    result = json.loads((ROOT / "results/recipes_compared.json").read_text())
    caption = "Validation perplexity against tokens for two recipes, three seeds each. From recipes_compared.json."
    panel = comparison(result["runs"], result["base"])
    return Plot("recipes_compared.svg", lambda: draw(panel), caption, "recipes compared")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check = parser.parse_args().check
    stale = stale_pages(write=not check)
    print("\n".join(f"{page}: {'not up to date' if check else 'filled'}" for page in stale) or "all up to date")
    sys.exit(int(check and bool(stale)))
