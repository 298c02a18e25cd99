"""Writing a converted model never destroys what is not its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import error_of, save_model, succeed


def test_the_current_folder_and_folders_that_are_no_models_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(tmp_path / "base")
    home = tmp_path / "home"
    (home / "inner").mkdir(parents=True)
    (home / "notes.txt").write_text("mine")
    monkeypatch.chdir(home / "inner")
    for target in (".", "..", str(home)):
        assert "is the folder you are in" in error_of("convert", base, "-o", target, "--overwrite", "--m", 4)
    monkeypatch.chdir(tmp_path)
    assert "is not a saved model" in error_of("convert", base, "-o", home, "--overwrite", "--m", 4)
    assert (home / "notes.txt").read_text() == "mine"


def test_the_model_to_convert_is_not_replaced(tmp_path: Path) -> None:
    base = save_model(tmp_path / "models" / "base")
    (tmp_path / "models" / "config.json").write_text("{}")
    for target in (base, base.parent):
        assert "the model to convert" in error_of("convert", base, "-o", target, "--overwrite", "--m", 4)
    assert (base / "model.safetensors").is_file()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    leftover = tmp_path / f".out.{ended.pid}.abc.tmp"
    leftover.mkdir()
    succeed("convert", base, "-o", tmp_path / "out", "--m", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]
