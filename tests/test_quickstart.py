"""The quickstart on little text and few steps: what it shows, and resuming after an interruption."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastweights import quickstart
from fastweights.loading import load, load_tokenizer
from fastweights.modeling.description import describe
from fastweights.training.recipe import Recipe, load_recipe
from fastweights.training.trainer import TrainingError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recipe:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    for name, value in (("MEASURED_CHARACTERS", 5000), ("RECALL_SAMPLES", 1), ("LENGTHS", (32, 64))):
        monkeypatch.setattr(quickstart, name, value)
    recipe = load_recipe("quickstart")
    stages = tuple(dataclasses.replace(stage, tokens=2048, learning_rate=1e-5) for stage in recipe.stages)
    return dataclasses.replace(
        recipe, stages=stages, batch_tokens=1024, validate_every=1, validation_tokens=1024, checkpoint_every=1
    )


def test_quickstart_shows_and_writes_every_step(small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, folder = io.StringIO(), tmp_path / "out"
    result = quickstart.run(folder, Console(file=output, width=120), small)
    text = output.getvalue()
    for name, perplexity in result["perplexity"].items():
        assert f"{name}" in text and quickstart._rounded(perplexity, 2) in text
    assert result["perplexity"]["after conversion"] > result["perplexity"]["base"]
    assert result["perplexity"]["after training"] < result["perplexity"]["after conversion"]
    assert text.count(quickstart.PROMPT) == 2
    assert (folder / "report/report.html").stat().st_size > 10_000
    assert json.loads((folder / "result.json").read_text())["ratio"] == result["ratio"]
    assert describe(load(folder / "training/best")).converted == (0, 1, 2, 3)
    _check_second_run(folder, small, monkeypatch)


def _check_second_run(folder: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished quickstart starts again, and one that was stopped resumes."""
    called: list[str] = []
    ways: dict[str, Any] = {name: getattr(quickstart, name) for name in ("train", "resume")}
    for name, way in ways.items():
        monkeypatch.setattr(quickstart, name, lambda *a, n=name, w=way, **k: called.append(n) or w(*a, **k))
    quiet = Console(file=io.StringIO())
    quickstart._train(folder, recipe, quiet)
    (folder / "training/result.json").unlink()
    quickstart._train(folder, recipe, quiet)
    assert called == ["train", "resume"]


def test_quickstart_does_not_touch_foreign_files(small: Recipe, tmp_path: Path) -> None:
    stranger = tmp_path / "out/training/notes.txt"
    stranger.parent.mkdir(parents=True)
    stranger.write_text("mine")
    with pytest.raises(TrainingError, match="is not an empty folder"):
        quickstart._train(tmp_path / "out", small, Console(file=io.StringIO()))
    assert stranger.read_text() == "mine"


def test_packaged_model_is_small_and_loads() -> None:
    model, files = load(quickstart.PACKAGED), list(quickstart.PACKAGED.iterdir())
    assert model.num_parameters() <= 3_000_000
    assert sum(file.stat().st_size for file in files if ".txt" not in file.name) <= 6_000_000
    assert sum(file.stat().st_size for file in files if ".txt" in file.name) <= 1_500_000
    tokenizer = load_tokenizer(quickstart.PACKAGED)
    for text in ("It was a dark evening.", "naïve – “quoted” 漢字\n\ttabs"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
