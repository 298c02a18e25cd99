"""The folder of a training run: whether a run can start or resume there.

This module does not import torch, so that the command line checks the folder before it does.
"""

from __future__ import annotations

from pathlib import Path

from fastweights.model_paths import RUN
from fastweights.utils.errors import Argument, Call, FastWeightsError
from fastweights.utils.files import is_temporary

# In that folder; see `checkpoint` for what they hold.
CHECKPOINTS, LOG, RESULT, LOCK = "checkpoints", "log.jsonl", "result.json", ".lock"


class TrainingError(FastWeightsError):
    """A run that cannot start or continue, with what to change."""


def resume_call(folder: Path) -> Call:
    """The call, or the command, that resumes a run."""
    return Call(f"resume({str(folder)!r})", command=f"fastweights train --resume {folder}")


def check_new_run(folder: Path) -> None:
    """Refuse a folder in which no run can start.

    Raises:
        TrainingError: It holds a run already, or is not empty.
    """
    check_no_run(folder)
    if folder.exists() and not is_unused(folder):
        raise TrainingError(f"{folder} exists and is not an empty folder: choose another output folder")


def check_no_run(folder: Path) -> None:
    """Refuse a folder that holds a run."""
    if (folder / RUN).is_file():
        raise TrainingError(f"{folder} holds a run already: ", resume_call(folder), ", or choose another folder")


def check_resumes(folder: Path) -> None:
    """Refuse a folder that holds no run to resume."""
    if not (folder / RUN).is_file():
        raise TrainingError(Argument("resume"), f" {folder}: there is no run to resume (no {RUN} there)")


def is_unused(folder: Path) -> bool:
    """Whether a run can start in a folder: it is empty, but for what a run that was killed at its start left."""
    return folder.is_dir() and all(path.name == LOCK or is_temporary(path.name) for path in folder.iterdir())
