"""Runs a script of this folder in a process in which Triton compiles for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys


def run_compiling(script: str, *arguments: str, **environment: str) -> str:
    """Returns what helpers.SCRIPT prints. It needs a process of its own: here Triton interprets."""
    compiling = {"TRITON_INTERPRET": "0", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", f"helpers.{script}", *arguments],
        env=os.environ | compiling | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
