"""Pages that are filled from result files say what these files say."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))


def test_figures_of_all_pages_are_up_to_date() -> None:
    from figures import stale_pages

    assert not stale_pages(write=False), "make figures"
