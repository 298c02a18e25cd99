"""Pages that are filled from result files say what these files say."""

from __future__ import annotations

from pathlib import Path

from fastweights.report import fill_page, is_filled

ROOT = Path(__file__).parents[2]


def test_pages_are_up_to_date() -> None:
    pages = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if is_filled(page)]
    assert ROOT / "docs/paper.md" in pages
    stale = [str(page.relative_to(ROOT)) for page in pages if fill_page(page, write=False)]
    assert not stale, f"fastweights report {' '.join(f'--fill {page}' for page in stale)}"
