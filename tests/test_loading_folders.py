"""Writing a converted model never destroys other files."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import error_of, save_model, succeed


def test_overwrite_does_not_replace_current_folder_or_folder_without_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(tmp_path / "base")
    home = tmp_path / "home"
    (home / "inner").mkdir(parents=True)
    (home / "notes.txt").write_text("mine")
    monkeypatch.chdir(home / "inner")
    for target in (".", "..", str(home)):
        assert "is the current folder" in error_of("convert", base, "-o", target, "--overwrite", "--m", 4)
    monkeypatch.chdir(tmp_path)
    assert "is not a saved model" in error_of("convert", base, "-o", home, "--overwrite", "--m", 4)
    assert (home / "notes.txt").read_text() == "mine"


def test_overwrite_does_not_replace_source_model(tmp_path: Path) -> None:
    base = save_model(tmp_path / "models" / "base")
    (tmp_path / "models" / "config.json").write_text("{}")
    for target in (base, base.parent):
        assert "the model to convert" in error_of("convert", base, "-o", target, "--overwrite", "--m", 4)
    assert (base / "model.safetensors").is_file()


def test_leftovers_of_killed_process_are_removed(tmp_path: Path) -> None:
    """Only those of the same target, whose process has ended on this machine."""
    base = save_model(tmp_path / "base")
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    host = socket.gethostname()
    leftover, other_target, other_host = (
        tmp_path / name
        for name in (
            f".out.{ended.pid}.{host}.abc.tmp",
            f".out.2.{ended.pid}.{host}.abc.tmp",
            f".out.{ended.pid}.another-machine.abc.tmp",
        )
    )
    for folder in (leftover, other_target, other_host):
        folder.mkdir()
    succeed("convert", base, "-o", tmp_path / "out", "--m", 4)
    assert set(tmp_path.iterdir()) == {base, tmp_path / "out", other_target, other_host}
