"""The file of a saved state: its error and whether it is there. `state_format` says what is in it.

This module does not import torch, so that the command line checks the file before.
"""

from __future__ import annotations

from pathlib import Path

from fastweights.utils.errors import FastWeightsError


class StateError(FastWeightsError):
    """A state that cannot be read, or that belongs to another model."""


def check_state_file(path: Path) -> None:
    """Refuse a path at which there is no file."""
    if not path.is_file():
        raise StateError(f"no state file at {path}: give one that was saved before")
