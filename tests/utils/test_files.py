"""Atomic writes: complete or not there, and nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fastweights.utils import files
from fastweights.utils.files import (
    FileLock,
    LockedError,
    atomic_file,
    atomic_folder,
    atomic_lines,
    is_temporary,
    partial_file,
    remove_leftovers,
    temporary_name,
    write_json,
    write_tensors,
    write_text,
)


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_writers_create_parents_and_replace_files(tmp_path: Path) -> None:
    for text in ("old", b"new"):
        write_text(tmp_path / "a" / "b.txt", text)
    write_json(tmp_path / "c.json", {"x": 1})
    assert content(tmp_path) == {"a/b.txt": "new", "c.json": '{\n "x": 1\n}\n'}
    write_tensors(tmp_path / "t.safetensors", {"x": torch.ones(2)})
    assert load_file(tmp_path / "t.safetensors")["x"].tolist() == [1, 1]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), SafetensorError("No space left")])
def test_failed_write_leaves_the_old_content_and_names_the_target(tmp_path: Path, failure: Exception) -> None:
    write_text(tmp_path / "file", "old")
    write_text(tmp_path / "folder" / "file", "old")
    before = content(tmp_path)
    for write, target in ((atomic_file, tmp_path / "file"), (atomic_folder, tmp_path / "folder")):
        with pytest.raises(OSError, match="No space left") as found, write(target) as temporary:
            (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
            raise failure
        assert found.value.filename == str(target) and content(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "a" / "folder") as temporary:
            (temporary / name).write_text(name)
    assert content(tmp_path) == {"a/folder/new": "new"}
    with atomic_folder(tmp_path / "a" / "folder", unless=lambda: True) as temporary:
        (temporary / "third").write_text("third")
    assert content(tmp_path) == {"a/folder/new": "new"} and os.listdir(tmp_path / "a") == ["folder"]


def test_parents_created_for_a_failed_folder_are_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "a" / "b" / "folder"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_folder_that_cannot_be_renamed_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "folder" / "file", "old")
    rename = Path.rename

    def fail(self: Path, target: Any) -> Any:
        if self.name.endswith(".tmp"):
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="broken"), atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "file").write_text("new")
    assert content(tmp_path) == {"folder/file": "old"}


def test_replaced_folder_is_never_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while it replaces a folder leaves the old one or the new one."""
    write_text(tmp_path / "folder" / "file", "old")
    flush = files.flush

    def check(path: Path) -> None:
        flush(path)
        assert (tmp_path / "folder" / "file").read_text() in ("old", "new")

    monkeypatch.setattr(files, "flush", check)
    monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("two renames"))
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "file").write_text("new")
    assert content(tmp_path) == {"folder/file": "new"}


def test_folder_moved_away_by_a_killed_process_is_put_back(tmp_path: Path, ended: int) -> None:
    old = tmp_path / f"{temporary_name(tmp_path / 'folder', ended)}.old"
    write_text(old / "file", "old")
    remove_leftovers(tmp_path, "folder")
    assert content(tmp_path) == {"folder/file": "old"}
    write_text(old / "file", "older")
    remove_leftovers(tmp_path, "folder")
    assert content(tmp_path) == {"folder/file": "old"}


def test_everything_is_flushed_before_and_after_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []

    def name(path: Path) -> str:
        return path.name.split(".")[1] if is_temporary(path.name) else path.name

    monkeypatch.setattr(files, "flush", lambda path: flushed.append(name(path)))
    write_text(tmp_path / "new" / "file", "x")
    assert flushed == [tmp_path.name, "file", "new"]
    flushed.clear()
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "nested").mkdir()
        for path in (temporary / ".inside", temporary / "nested" / "deep"):
            path.write_text("x")
    assert flushed == ["deep", "nested", ".inside", "folder", tmp_path.name]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "state", {"x": torch.ones(2)})
        with atomic_folder(tmp_path / "folder") as temporary:
            save_file({"x": torch.ones(2)}, temporary / "weights")
    finally:
        os.umask(before)
    for path in (tmp_path / "state", tmp_path / "folder" / "weights"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_lines_are_in_the_partial_file_at_once_and_in_the_file_at_the_end(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "old")
    write_text(tmp_path / "file.partial", "a longer text of a process that was killed")
    with atomic_lines(tmp_path / "file") as write:
        write("ä")
        assert content(tmp_path) == {"file": "old", "file.partial": "ä\n"}
        write("b")
    assert content(tmp_path) == {"file": "ä\nb\n"}


def test_failed_block_leaves_its_lines_in_the_partial_file_and_none_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="broken") as found, atomic_lines(tmp_path / "file") as write:
        write("a")
        raise OSError(errno.EIO, "broken")
    assert found.value.filename == str(tmp_path / "file.partial")
    assert content(tmp_path) == {"file.partial": "a\n"}
    with pytest.raises(KeyboardInterrupt), atomic_lines(tmp_path / "file"):
        raise KeyboardInterrupt
    assert content(tmp_path) == {}


def test_lines_have_one_writer_at_a_time(tmp_path: Path) -> None:
    with atomic_lines(tmp_path / "file") as write:
        write("a")
        with pytest.raises(LockedError, match=r"file\.partial is being written by another process"):
            atomic_lines(tmp_path / "file").__enter__()
    assert content(tmp_path) == {"file": "a\n"}


def test_file_that_its_writer_completed_meanwhile_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = files._lock

    def complete(file: Any) -> bool:
        """The other writer renames the file between the time it is opened and the time it is locked."""
        partial_file(tmp_path / "file").rename(tmp_path / "file")
        return lock(file)

    write_text(tmp_path / "file.partial", "complete")
    monkeypatch.setattr(files, "_lock", complete)
    with pytest.raises(LockedError):
        atomic_lines(tmp_path / "file").__enter__()
    assert content(tmp_path) == {"file": "complete"}


def test_lines_are_not_written_through_a_link(tmp_path: Path) -> None:
    write_text(tmp_path / "other", "x")
    (tmp_path / "file.partial").symlink_to("other")
    with pytest.raises(OSError, match="symbolic links") as found:
        atomic_lines(tmp_path / "file").__enter__()
    assert found.value.filename == str(tmp_path / "file.partial")
    assert (tmp_path / "other").read_text() == "x" and not (tmp_path / "file").exists()


def test_lock_names_its_holder_and_is_released(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as lock:
        lock.acquire()
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            FileLock(tmp_path / "lock").acquire()
    with FileLock(tmp_path / "lock") as lock:
        lock.acquire()


def test_lock_does_not_follow_links(tmp_path: Path) -> None:
    write_text(tmp_path / "other", "x")
    (tmp_path / "lock").symlink_to("other")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(tmp_path / "lock").acquire()
    assert (tmp_path / "other").read_text() == "x"


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    take = "from fastweights.utils.files import FileLock; import pathlib, sys, time; "
    take += "lock = FileLock(pathlib.Path(sys.argv[1])); lock.acquire(); print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", take, tmp_path / "lock"], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    with pytest.raises(LockedError, match=f"process {holder.pid}"):
        FileLock(tmp_path / "lock").acquire()
    holder.kill()
    holder.communicate()
    with FileLock(tmp_path / "lock") as lock:
        lock.acquire()


def test_lock_is_held_by_a_process_that_inherits_it(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as lock:
        lock.acquire()
        command = [sys.executable, "-c", "input()"]
        heir = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(lock.fileno(),))
        lock.name_holder(heir.pid)
    with pytest.raises(LockedError, match=f"process {heir.pid}:"):
        FileLock(tmp_path / "lock").acquire()
    heir.communicate(b"\n")
    with FileLock(tmp_path / "lock") as lock:
        lock.acquire()


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_leftovers_of_ended_processes_are_removed(tmp_path: Path, ended: int) -> None:
    own, other = (tmp_path / temporary_name(Path(name), ended) for name in ("folder", "other"))
    file, link = (tmp_path / temporary_name(Path(name), ended) for name in ("file", "link"))
    running = tmp_path / temporary_name(Path("folder"))
    for folder in (own, other, running):
        folder.mkdir()
    file.write_text("half")
    link.symlink_to(running)
    with atomic_folder(tmp_path / "folder"):
        pass
    assert set(tmp_path.iterdir()) == {running, other, file, link, tmp_path / "folder"}
    write_text(tmp_path / "file", "x")
    assert set(tmp_path.iterdir()) == {running, other, link, tmp_path / "folder", tmp_path / "file"}
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {running, tmp_path / "folder", tmp_path / "file"}
