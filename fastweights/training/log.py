"""The log of a training run, log.jsonl: a JSON line for each step and for each validation.

Each line has a checksum of its other fields. A line in which a digit has changed is still JSON, and would otherwise
give another loss.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastweights.training.run_folder import LOG
from fastweights.utils.files import write_text

# As a rule, this much of a log's end holds a validation.
TAIL_BYTES = 2**16
# The field with a line's checksum. Logs of earlier versions do not have it.
CHECKSUM = "crc32"
# Fields that a line has, and their types.
_STEP_LINE: dict[str, type] = {"step": int, "stage": int, "tokens": int, "loss": float}
_VALIDATION_LINE: dict[str, type] = {"step": int, "stage": int, "validation_loss": float}


def log_text(line: dict[str, Any]) -> str:
    """A line as it is written to the log."""
    return json.dumps(line | {CHECKSUM: _checksum(line)}) + "\n"


def _checksum(line: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(line).encode()):08x}"


def read_log(folder: Path, until: int | None) -> tuple[list[dict[str, Any]], int]:
    """Read the log up to step `until`, or nothing of it if that is None. A damaged line is left out.

    Returns:
        The lines, and the number of steps that have none.
    """
    path = folder / LOG
    if until is None:
        return [], 0
    texts = path.read_text(errors="replace").splitlines() if path.is_file() else ()
    lines = [line for line in map(_parse_line, texts) if line is not None and line["step"] <= until]
    steps = {line["step"] for line in lines if "loss" in line and line["step"] > 0}
    return lines, until - len(steps)


def _parse_line(text: str) -> dict[str, Any] | None:
    """A line of the log; None where it is damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    checksum = line.pop(CHECKSUM, None)
    if checksum is not None and checksum != _checksum(line):
        return None
    types = _VALIDATION_LINE if "validation_loss" in line else _STEP_LINE
    return line if all(type(line.get(name)) is kind for name, kind in types.items()) else None


def truncate_log(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Replace the log by lines of it: the run writes those again that came after its checkpoint."""
    if (folder / LOG).is_file():
        write_text(folder / LOG, "".join(map(log_text, lines)))


def last_logged(path: Path) -> dict[str, Any]:
    """The last value of each name near the end of a log that is still being written."""
    found: dict[str, Any] = {}
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in file.read().splitlines():
            with suppress(ValueError):  # incomplete: the first line of the tail, or one that is being written
                found |= json.loads(line)
    return found
