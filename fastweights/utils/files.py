"""Atomic writes: a file or folder is either complete or not there.

Everything is written under a temporary name beside its target, flushed to the disk and then renamed. The name holds the
process and the machine, so that a later write can remove what a killed process left behind.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`. At the end of the block the file there replaces `path`.

    Raises:
        OSError: The file cannot be written. `path` is as it was before.
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path))
    try:
        with _os_errors(path):
            yield temporary
            _flush(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: str | os.PathLike, *, unless: Callable[[], bool] | None = None) -> Iterator[Path]:
    """Yield a new temporary folder beside `target`. At the end of the block it replaces `target`.

    Args:
        target: The folder to write. Missing parents are created, and removed again on failure.
        unless: Asked at the end of the block: where it returns True, `target` stays and the new folder is dropped.

    Raises:
        OSError: The folder cannot be written. `target` is as it was before.
    """
    target = Path(target)
    with _os_errors(target), _parents(target):
        remove_leftovers(target.parent, target.name)
        temporary = target.with_name(temporary_name(target))
        temporary.mkdir()
        try:
            yield temporary
            for path in (*temporary.iterdir(), temporary):
                _flush(path)
            if unless is None or not unless():
                _replace_folder(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike, text: str | bytes) -> None:
    """Write a file atomically. Bytes are written as they are, a string as UTF-8. Missing parents are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        temporary.write_bytes(text.encode() if isinstance(text, str) else text)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write a value as JSON atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_tensors(path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    from safetensors.torch import save_file

    with atomic_file(path) as temporary:
        save_file(tensors, temporary, metadata)


def absolute(source: str) -> str:
    """A path that exists as an absolute one; anything else, such as a hub id, as it is."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def temporary_name(path: Path, process: int | None = None) -> str:
    """The temporary name of a file or folder that a process (by default this one) is writing."""
    return f".{path.name}.{process or os.getpid()}.{socket.gethostname()}.{secrets.token_urlsafe(6)}.tmp"


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete temporary folders whose process on this machine has ended: those of target `name`, by default of all."""
    target = ".+" if name is None else re.escape(name)
    pattern = re.compile(rf"\.{target}\.(\d+)\.{re.escape(socket.gethostname())}\.[\w-]+\.tmp(\.old)?")
    for path in folder.glob(".*.tmp*") if Path("/proc/self").exists() else ():
        found = pattern.fullmatch(path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Errors of the disk become OSErrors that name `path`, not the temporary file."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    except SafetensorError as error:
        raise OSError(None, str(error), str(path)) from error


@contextmanager
def _parents(target: Path) -> Iterator[None]:
    """The parents of `target` exist in the block. Those that were created for it are removed if it fails."""
    created: list[Path] = []
    try:
        for parent in reversed([p for p in target.parents if not p.exists()]):
            parent.mkdir(exist_ok=True)
            created.append(parent)
        yield
    except BaseException:
        with suppress(OSError):  # someone else may have written there meanwhile
            for parent in reversed(created):
                parent.rmdir()
        raise


def _flush(path: Path) -> None:
    """Write to the disk itself: after a power cut a renamed file must have its content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_folder(temporary: Path, target: Path) -> None:
    """Rename a folder. One that is there already is only deleted when the new one has taken its place."""
    old = target.with_name(f"{temporary.name}.old")
    if target.exists():
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
