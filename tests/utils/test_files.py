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
from safetensors.torch import load_file

from fastweights.utils import files
from fastweights.utils.files import (
    atomic_file,
    atomic_folder,
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

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="broken"), atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "file").write_text("new")
    assert content(tmp_path) == {"folder/file": "old"}


def test_everything_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(files, "_flush", lambda path: flushed.append(path.name.split(".")[1] or path.name))
    write_text(tmp_path / "file", "x")
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / ".inside").write_text("x")
    assert flushed == ["file", "inside", "folder"]


def test_leftovers_of_ended_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    own, other = (tmp_path / temporary_name(Path(name), ended.pid) for name in ("folder", "other"))
    running = tmp_path / temporary_name(Path("folder"))
    for folder in (own, other, running):
        folder.mkdir()
    with atomic_folder(tmp_path / "folder"):
        pass
    assert set(tmp_path.iterdir()) == {running, other, tmp_path / "folder"}
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {running, tmp_path / "folder"}
