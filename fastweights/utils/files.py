"""Writing files: all of a file or nothing."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: str | os.PathLike, text: str | bytes) -> None:
    """A file, all of it or nothing: under a temporary name first. Bytes are written as they are."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
