"""Atomic writes: a file or a folder is written under a temporary name and renamed when it is complete.

A temporary name is `.NAME.PROCESS.HOST.RANDOM.tmp`. So what a killed process left behind can be recognised and removed,
also where several machines share a file system.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces `path` when the block succeeds.

    Raises:
        OSError: if the file cannot be written or renamed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str | bytes) -> None:
    """Write a whole file or nothing. Bytes are written unchanged.

    Raises:
        OSError: with `path` as its file name, not the temporary one.
    """
    try:
        with atomic_file(path) as temporary:
            temporary.write_bytes(text.encode() if isinstance(text, str) else text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def atomic_folder(target: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder that replaces `target` when the block succeeds.

    If the block raises, an existing `target` is unchanged and nothing new is left, not even parent folders.

    Raises:
        OSError: if a folder cannot be made or renamed.
    """
    target = Path(target).resolve()
    new_parents: list[Path] = []
    temporary: Path | None = None
    try:
        for parent in reversed([p for p in target.parents if not p.exists()]):
            parent.mkdir()
            new_parents.append(parent)
        _remove_leftovers(target)
        prefix = f".{target.name}.{os.getpid()}.{socket.gethostname()}."
        temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=target.parent))
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        _replace(temporary, target)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for parent in reversed(new_parents):
            parent.rmdir()
        raise


def _replace(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target`; the old folder is deleted only after the new one is in place."""
    if not target.exists():
        temporary.rename(target)
        return
    old = target.with_name(f"{temporary.name}.old")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of `target` whose process on this machine has ended."""
    if not Path("/proc/self").exists():
        return
    pattern = rf"\.{re.escape(target.name)}\.(\d+)\.{re.escape(socket.gethostname())}\.\w+\.tmp(\.old)?"
    for folder in target.parent.iterdir():
        found = re.fullmatch(pattern, folder.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            shutil.rmtree(folder, ignore_errors=True)
