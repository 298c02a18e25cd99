"""Atomic writes that survive a power cut: a file or folder is either complete or not there.

Everything is written under a temporary name beside its target and flushed to the disk; then it is renamed, and the
folder that holds it is flushed. The name holds the process and the machine, so that a later write can remove what a
killed process left behind. Only lines that are worth keeping when their process is killed (`atomic_lines`) have a name
that is known.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fastweights.utils.errors import FastWeightsError

if TYPE_CHECKING:
    from torch import Tensor

# of renameat2, see its manual page
_CURRENT_FOLDER, _EXCHANGE = -100, 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)


class LockedError(FastWeightsError):
    """Another process holds the lock of a file."""


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`. At the end of the block the file there replaces `path`.

    Raises:
        OSError: The file cannot be written. `path` is as it was before.
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path))
    with _os_errors(path):
        remove_leftovers(path.parent, path.name)
        try:
            temporary.touch(exist_ok=False)
            mode = temporary.stat().st_mode
            yield temporary
            _flush_file(temporary, mode)
            temporary.replace(path)
            flush(path.parent)
        finally:
            _remove(temporary)


def partial_file(path: str | os.PathLike) -> Path:
    """The file that holds the lines of `atomic_lines` until they are complete: PATH.partial."""
    return Path(f"{os.fspath(path)}.partial")


@contextmanager
def atomic_lines(path: str | os.PathLike) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line. At the end of the block the file of these lines replaces `path`.

    Until then they are in `partial_file(path)`, where each is as soon as it is written: a process that is killed leaves
    them there, and so does a block that fails. That file has one writer at a time. The next one replaces its lines.

    Raises:
        LockedError: Another process is writing this file.
        OSError: The lines cannot be written. `path` is as it was before.
    """
    path, partial = Path(path), partial_file(path)
    with _os_errors(partial), _open_file(partial) as file:
        # Whoever held the lock may have renamed the file after it was opened here.
        if not _lock(file) or not _is_at(file, partial):
            raise LockedError(f"{partial} is being written by another process: wait for it, or choose another file")
        file.truncate()
        try:
            yield lambda line: print(line, file=file)
            file.flush()
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        except BaseException:
            if _is_at(file, partial) and not os.fstat(file.fileno()).st_size:
                _remove(partial)
            raise


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


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
        try:
            temporary.mkdir()
            mode = temporary.stat().st_mode
            yield temporary
            _flush_tree(temporary, mode)
            if unless is None or not unless():
                _replace_folder(temporary, target)
        finally:
            _remove(temporary)


def atomic_link(path: Path, target: str | os.PathLike) -> None:
    """Make `path` a symbolic link to `target`. It replaces a link or a folder of that name."""
    remove_leftovers(path.parent, path.name)
    temporary = path.with_name(temporary_name(path))
    try:
        temporary.symlink_to(target)
        if path.is_dir() and not path.is_symlink():
            _replace_folder(temporary, path)
        else:
            temporary.replace(path)
            flush(path.parent)
    finally:
        _remove(temporary)


def make_folder(path: str | os.PathLike) -> list[Path]:
    """Create a folder and its missing parents. Returns those that were created, parents first."""
    created = []
    for folder in reversed([p for p in (Path(path), *Path(path).parents) if not p.exists()]):
        folder.mkdir(exist_ok=True)
        created.append(folder)
        flush(folder.parent)
    return created


def append_text(path: Path, text: str, sync: bool = False) -> None:
    """Append to a file. With `sync`, everything that was appended to it so far is on the disk afterwards."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
    if sync:
        flush(path)
        flush(path.parent)


def write_text(path: str | os.PathLike, text: str | bytes) -> None:
    """Write a file atomically. Bytes are written as they are, a string as UTF-8. Missing parents are created."""
    path = Path(path)
    make_folder(path.parent)
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


def is_temporary(name: str) -> bool:
    """Whether a name is one that `temporary_name` makes."""
    return re.fullmatch(r"\..+\.\d+\..+\.[\w-]+\.tmp(\.old)?", name) is not None


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete what processes of this machine that have ended left: of target `name`, by default of all.

    A folder that was moved away for its successor is put back if the successor did not take its place.
    """
    target = ".+" if name is None else re.escape(name)
    pattern = re.compile(rf"\.({target})\.(\d+)\.{re.escape(socket.gethostname())}\.[\w-]+\.tmp(\.old)?")
    for path in folder.glob(".*.tmp*") if Path("/proc/self").exists() else ():
        found = pattern.fullmatch(path.name)
        if not found or Path(f"/proc/{found[2]}").exists():
            continue
        if found[3] and not os.path.lexists(folder / found[1]):
            path.rename(folder / found[1])
            flush(folder)
        else:
            _remove(path)


class FileLock:
    """An exclusive lock of a file, which the system releases when its process ends, however that happens.

    Used as a context: `acquire` takes the lock, and the end of the block releases it. A process that inherits the file
    holds the lock, too, until it ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    @property
    def held(self) -> bool:
        """Whether `acquire` has taken the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Take the lock and write the number of this process into the file.

        Raises:
            LockedError: Another process holds it. The message has the number of that process.
            OSError: The file cannot be written.
        """
        file = _open_file(self.path)
        try:
            if not _lock(file):
                holder = file.read(20).strip() or "unknown"
                raise LockedError(f"{self.path.parent} is in use by process {holder}: wait for it, or end it")
        except BaseException:
            file.close()
            raise
        self._file = file
        self.name_holder(os.getpid())

    def name_holder(self, process: int) -> None:
        """Write the number of the process to wait for into the file, for example one that has inherited the lock."""
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate()
            print(process, end="", file=self._file, flush=True)

    def fileno(self) -> int:
        """The descriptor of the locked file, for a process that inherits the lock.

        Raises:
            ValueError: The lock is not held.
        """
        if self._file is None:
            raise ValueError(f"the lock {self.path} is not held")
        return self._file.fileno()

    def release(self) -> None:
        """Release the lock if this process holds it. Processes that have inherited it hold it still."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _open_file(path: Path) -> IO[str]:
    """Open a file to read and write its lines, and create it where it is missing. A link is an error: it could point
    anywhere."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    return os.fdopen(handle, "r+", encoding="utf-8", buffering=1)


def _lock(file: IO[str]) -> bool:
    """Lock an open file. False where another process holds the lock; True where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, *_UNSUPPORTED):
            raise
    return True


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
    created = make_folder(target.parent)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # someone else may have written there meanwhile
            for parent in reversed(created):
                parent.rmdir()
        raise


def flush(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk itself: a power cut does not undo it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _UNSUPPORTED or not path.is_dir():  # a file system that cannot flush folders
            raise
    finally:
        os.close(handle)


def _flush_file(path: Path, mode: int) -> None:
    """Flush a file, with the permissions in `mode`: safetensors creates files that only their owner can read."""
    if (mode ^ path.stat().st_mode) & 0o666:
        path.chmod(mode & 0o666)
    flush(path)


def _flush_tree(folder: Path, mode: int) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _flush_file(Path(parent, name), mode)
        flush(Path(parent))


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _replace_folder(temporary: Path, target: Path) -> None:
    """Rename a folder. One that is there already takes the temporary name, or is deleted after the new one has taken
    its place."""
    if os.path.lexists(target) and _exchange(temporary, target):
        flush(target.parent)
        return
    old = target.with_name(f"{temporary.name}.old")
    if os.path.lexists(target):
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if os.path.lexists(old):
            old.rename(target)
        raise
    flush(target.parent)
    _remove(old)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders in one step; False where the system cannot do that."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    names = os.fsencode(first), os.fsencode(second)
    if not library.renameat2(_CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _EXCHANGE):
        return True
    if ctypes.get_errno() in _UNSUPPORTED:
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
