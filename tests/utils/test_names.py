"""The name of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastweights.cli.options import short_name
from fastweights.model_paths import display_name


def test_best_and_last_of_a_run_have_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("linked", "copied"):
        (tmp_path / name / "checkpoints" / "0-0000003").mkdir(parents=True)
    (tmp_path / "linked" / "best").symlink_to("checkpoints/0-0000003")
    (tmp_path / "copied" / "last").mkdir()
    (tmp_path / "copied" / "run.json").touch()
    assert display_name(tmp_path / "linked" / "best") == "linked"
    assert display_name(tmp_path / "copied" / "last") == "copied"
    monkeypatch.chdir(tmp_path / "linked")
    assert display_name("best") == "linked" and display_name(".") == "linked"


def test_other_models_have_the_name_of_their_folder_file_or_repository(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    assert display_name(tmp_path / "best") == "best"
    assert display_name("models/tiny.gguf") == "tiny.gguf" and display_name("gpt2") == "gpt2"
    assert display_name("HuggingFaceTB/SmolLM2-135M") == "SmolLM2-135M"


def test_models_of_one_name_are_named_as_typed(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    names = [str(tmp_path / "best"), str(tmp_path / "last")]
    assert [short_name(name, names) for name in names] == names
    assert short_name(names[0], names[:1]) == tmp_path.name
