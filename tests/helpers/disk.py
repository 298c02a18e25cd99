"""A disk that can be cut off: records file operations, fails them, and rebuilds what a power cut may leave.

The model is that of POSIX: the content of a file is on the disk as of the last fsync of that file, and the names in a
folder are as of the last fsync of that folder. Whatever came later may be there or not.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import transformers.modeling_utils

from fastweights.utils import files

OPERATIONS = ("fsync", "rename", "replace", "mkdir", "symlink", "unlink", "rmdir")
# What a disk image has under a name: a file's content, a folder's entries, or the target of a link.
Image = dict[str, Any]


class Link(str):
    pass


@contextmanager
def watched_operations(root: Path, before: Callable[[str, str], None], after: Callable[[str, str], None]) -> Iterator:
    """Call before(operation, path) and after(operation, path) around each file operation below `root`.

    fsync itself is left out: it takes most of the time and changes nothing that a program can see.
    """
    with pytest.MonkeyPatch.context() as patch:

        def watch(owner: Any, name: str, path_of: Callable[..., str]) -> None:
            original = getattr(owner, name)

            def operation(*args: Any, **kwargs: Any) -> Any:
                path = path_of(*args, **kwargs)
                if path != str(root) and not path.startswith(f"{root}{os.sep}"):
                    return original(*args, **kwargs)
                before(name, path)
                result = None if name == "fsync" else original(*args, **kwargs)
                after(name, path)
                return result

            patch.setattr(owner, name, operation)

        for name in OPERATIONS:
            watch(os, name, _path_of_descriptor if name == "fsync" else _path_changed_by(name))
        for module in (io, builtins):  # Path.open calls the first
            watch(module, "open", _path_written)
        watch(safetensors.torch, "save_file", lambda _, path, *__, **___: str(path))
        watch(transformers.modeling_utils, "safe_save_file", lambda _, path, **__: str(path))
        if hasattr(files, "_exchange"):
            watch(files, "_exchange", lambda first, _: str(first))
        yield


def _path_written(path: Any, mode: str = "r", *_: Any, **__: Any) -> str:
    return str(path) if set(mode) & set("wax+") else ""


def _path_of_descriptor(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


def _path_changed_by(name: str) -> Callable[..., str]:
    def path_of(*args: Any, dir_fd: int | None = None, **_: Any) -> str:
        path = os.fspath(args[1] if name == "symlink" else args[0])
        return path if dir_fd is None else os.path.join(_path_of_descriptor(dir_fd), path)

    return path_of


class RecordedDisk:
    """All that a folder may look like if a program is killed, or the power is cut, before any of its file operations.

    Attributes:
        images: Pairs of what had been reported (`reported` at that moment) and an image of the disk, without
            repetitions, by policy: "kill" (all is there), "nothing unsynced" (all that was not flushed is lost),
            "empty files" (names are there, contents are lost), "random" (of each folder's changes and each file's
            content some are lost).
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root, self.operations = root, 0
        self.reported: Any = None
        self.images: dict[str, list[tuple[Any, Image]]] = {}
        self._draw = random.Random(seed)
        self._seen: set[int] = set()
        self._keys: dict[int, int] = {}  # of inodes, by descriptors that prevent their reuse
        self._stamps: dict[int, tuple[int, int]] = {}
        self._content: dict[int, bytes] = {}
        self._synced: dict[int, bytes] = {}
        self._names: dict[int, list[dict[str, Any]]] = {}
        self._synced_names: dict[int, int] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        self._scan(self.root)
        self._synced = dict(self._content)
        self._synced_names = {key: len(history) - 1 for key, history in self._names.items()}
        try:
            with watched_operations(self.root, self._before, self._after):
                yield
            self._take_images()
        finally:
            for handle in self._keys.values():
                os.close(handle)

    def _before(self, *_: str) -> None:
        self.operations += 1
        self._scan(self.root)
        self._take_images()

    def _after(self, name: str, path: str) -> None:
        self._scan(self.root)
        if name != "fsync":
            return
        key = os.stat(path).st_ino
        if os.path.isdir(path):
            self._synced_names[key] = len(self._names[key]) - 1
        else:
            self._synced[key] = self._content[key]

    def _scan(self, folder: Path) -> int:
        """Note the names and contents below a folder. Returns its inode."""
        found: dict[str, Any] = {}
        for entry in os.scandir(folder):
            if entry.is_symlink():
                found[entry.name] = Link(os.readlink(entry.path))
            elif entry.is_dir():
                found[entry.name] = ("folder", self._scan(Path(entry.path)))
            else:
                found[entry.name] = ("file", self._read(entry.path))
        key = self._hold(folder)
        history = self._names.setdefault(key, [{}])
        if history[-1] != found:
            history.append(found)
        return key

    def _hold(self, path: Any) -> int:
        key = os.stat(path).st_ino
        if key not in self._keys:
            self._keys[key] = os.open(path, os.O_PATH)
        return key

    def _read(self, path: str) -> int:
        key, status = self._hold(path), os.stat(path)
        if self._stamps.get(key) != (status.st_size, status.st_mtime_ns):
            self._stamps[key] = (status.st_size, status.st_mtime_ns)
            with open(path, "rb") as file:
                self._content[key] = file.read()
        return key

    def _take_images(self) -> None:
        draw, synced = self._draw, self._synced_names
        root = os.stat(self.root).st_ino

        def latest(key: int) -> int:
            return len(self._names[key]) - 1

        def durable(key: int) -> bytes:
            return self._synced.get(key, b"")

        def some(key: int) -> bytes:
            content = self._content[key]
            appended = len(durable(key)) if content.startswith(durable(key)) else 0
            return draw.choice([durable(key), content, content[: draw.randint(appended, len(content))]])

        policies: dict[str, tuple[Callable[[int], int], Callable[[int], bytes]]] = {
            "kill": (latest, self._content.__getitem__),
            "nothing unsynced": (lambda key: synced.get(key, 0), durable),
            "empty files": (latest, durable),
            "random": (lambda key: draw.randint(synced.get(key, 0), latest(key)), some),
        }
        for policy, (version, content) in policies.items():
            image = self._image(root, version, lambda key, of=content: self._unchanged(key) or of(key))
            fingerprint = hash((policy, self.reported, _frozen(image)))
            if fingerprint not in self._seen:
                self._seen.add(fingerprint)
                self.images.setdefault(policy, []).append((self.reported, image))

    def _unchanged(self, key: int) -> bytes | None:
        content = self._content[key]
        return content if self._synced.get(key) == content else None

    def _image(self, key: int, version: Callable[[int], int], content: Callable[[int], bytes]) -> Image:
        image: Image = {}
        for name, entry in self._names[key][version(key)].items():
            if isinstance(entry, Link):
                image[name] = entry
            else:
                kind, inode = entry
                image[name] = self._image(inode, version, content) if kind == "folder" else content(inode)
        return image


def _frozen(image: Any) -> Any:
    return frozenset((name, _frozen(part)) for name, part in image.items()) if isinstance(image, dict) else image


def write_image(folder: Path, image: Image) -> Path:
    folder.mkdir()
    for name, content in image.items():
        path = folder / name
        if isinstance(content, Link):
            path.symlink_to(content)
        elif isinstance(content, dict):
            write_image(path, content)
        else:
            path.write_bytes(content)
    return folder


@contextmanager
def failing_disk(root: Path, number: int, lasting: bool) -> Iterator[None]:
    """File operation `number` below `root` fails; if it is lasting, all later ones fail, too."""
    count = 0

    def fail(*_: str) -> None:
        nonlocal count
        count += 1
        if count == number or (lasting and count > number):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with watched_operations(root, fail, lambda *_: None):
        yield
