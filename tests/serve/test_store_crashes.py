"""Processes that share a folder, and that are killed at any moment, lose and corrupt nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: object) -> None:
    command = [sys.executable, "-m", "helpers.store_crashes", *map(str, arguments)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_killed_process_loses_no_stored_response(tmp_path: Path) -> None:
    run("crash", tmp_path / "store", 4, 0)


@pytest.mark.full
def test_100_killed_processes_lose_no_stored_response(tmp_path: Path) -> None:
    run("crash", tmp_path / "store", 100, 1)


def test_processes_that_remove_entries_of_each_other_corrupt_nothing(tmp_path: Path) -> None:
    run("evict", tmp_path / "store", 7)
