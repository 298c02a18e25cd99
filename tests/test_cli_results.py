"""The commands that measure and report, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import error_of, save_model, succeed

from fastweights.report import model_card

TEXT = "A quick brown fox jumps over the lazy dog. Why\n" * 20


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.chdir(tmp_path)
    base = save_model(tmp_path / "base")
    succeed("convert", base, "-o", "converted", "--m", 4)
    Path("text.txt").write_text(TEXT)
    return base, tmp_path / "converted"


def test_eval_takes_a_window_that_all_models_have_positions_for(models: tuple[Path, Path]) -> None:
    shown = succeed("eval", *models, "--data", "text.txt", "-o", "eval.json").stdout
    result = json.loads(Path("eval.json").read_text())
    assert result["settings"]["length"] == 96
    assert [model["name"] for model in result["models"]] == ["base", "converted"]
    for model in result["models"]:
        assert f"{model['parameters']:,}" in shown
    assert "96 tokens" in error_of("eval", *models, "--data", "text.txt", "--length", 97)


def test_texts_of_one_name_are_told_apart(models: tuple[Path, Path]) -> None:
    Path("other").mkdir()
    Path("other/text.txt").write_text(TEXT[:200])
    succeed("eval", models[1], "--data", "text.txt", "--data", "other/text.txt", "-o", "eval.json")
    (model,) = json.loads(Path("eval.json").read_text())["models"]
    assert [row["data"] for row in model["perplexity"]] == ["text.txt", "other/text.txt"]


@pytest.mark.parametrize("command", [["eval", "--data", "text.txt"], ["profile"]])
def test_where_the_result_cannot_go_is_said_first(models: tuple[Path, Path], command: list[str]) -> None:
    for target in ("missing/out.json", "base"):
        assert f"--output {target} cannot be written" in error_of(command[0], models[1], *command[1:], "-o", target)


def test_profile_adds_the_base_of_a_converted_model(models: tuple[Path, Path]) -> None:
    succeed("profile", models[1], "--lengths", "4,8", "-o", "cost.json")
    entries = json.loads(Path("cost.json").read_text())["models"]
    assert [(entry["name"], entry["converted"]) for entry in entries] == [("base", False), ("converted", True)]
    (models[0] / "config.json").unlink()
    assert "measured without it" in succeed("profile", models[1], "--lengths", "4,8").stderr


def test_profile_alone_measures_the_packaged_model(tmp_path: Path) -> None:
    succeed("profile", "--lengths", "4,8", "-o", tmp_path / "cost.json")
    assert [m["name"] for m in json.loads((tmp_path / "cost.json").read_text())["models"]] == ["packaged", "decay"]


def test_a_card_of_a_run_has_the_name_of_the_run(models: tuple[Path, Path]) -> None:
    Path("smol").mkdir()
    Path("smol/best").symlink_to(models[1])
    card = model_card([], "smol/best")
    assert "\n# smol\n" in card and 'from_pretrained("smol")' in card


def test_lengths_are_numbers(models: tuple[Path, Path]) -> None:
    assert (
        error_of("profile", models[1], "--lengths", "4,x") == "--lengths takes whole numbers such as 0,480, found '4,x'"
    )
