"""The documentation site builds without a warning and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs")


def test_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    # not with -q: it would hide the warnings from --strict
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    front = (tmp_path / "index.html").read_text()
    assert "fonts.googleapis.com" not in front and 'src="http' not in front and 'stylesheet" href="http' not in front
