"""The size of the cache of token files: those that were not used for longest are removed when it is above its limit.

A token file is in use while a process has a shared lock on its tokens. This module imports neither torch nor
transformers, so that the command line checks a size before it does.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastweights.data.readers import TOKENS, DataError
from fastweights.utils.errors import Argument
from fastweights.utils.files import temporary_name

VARIABLE = "FASTWEIGHTS_CACHE_LIMIT"
META = "meta.json"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int | None:
    """The bytes of a size such as "20GB", "500M" or "1e9". None if it is not one."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    return None if found is None else int(float(found[1]) * _UNITS[found[2].upper()])


def cache_limit(given: str | int | None = None) -> int | None:
    """The limit in bytes: the given one, else $FASTWEIGHTS_CACHE_LIMIT. None: no limit.

    Raises:
        DataError: It is not a size.
    """
    value = os.environ.get(VARIABLE) or None if given is None else str(given)
    size = None if value is None else parse_size(value)
    if value is not None and size is None:
        where = (VARIABLE,) if given is None else (Argument("cache_limit"),)
        raise DataError(*where, f" must be a size such as 500MB or 20GB, found {value!r}")
    return size


class Hold:
    """A shared lock of a token file. It ends with this object.

    Args:
        folder: The token file.

    Raises:
        OSError: There is no such file, or another process is removing it.
    """

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder / TOKENS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks: there, nothing is removed
            pass
        with suppress(OSError):  # not ours to change
            os.utime(folder / META)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound early: when the interpreter ends, `os` may be gone before this object.
        if hasattr(self, "_handle"):
            close(self._handle)


def shrink(root: Path, limit: int) -> list[Path]:
    """Remove token files in `root` until the others take at most `limit` bytes. Those in use stay.

    Returns:
        The folders that were removed.
    """
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        with suppress(OSError):  # removed by another process in the meantime
            if not folder.name.startswith(".") and folder.is_dir():
                size = sum(file.stat().st_size for file in folder.iterdir())
                found.append(((folder / META).stat().st_mtime_ns, size, folder))
    total, removed = sum(size for _, size, _ in found), []
    for _, size, folder in sorted(found):
        if total <= limit:
            break
        if _remove(folder):
            total -= size
            removed.append(folder)
    return removed


def _remove(folder: Path) -> bool:
    """Remove a token file, unless it is in use. It disappears as a whole: its folder is renamed first."""
    try:
        with (folder / TOKENS).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary = folder.with_name(temporary_name(folder))
            folder.rename(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
            return True
    except OSError:
        return False
