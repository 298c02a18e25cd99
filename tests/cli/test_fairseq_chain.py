"""Every command on a fairseq checkpoint and what is made of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from helpers import fairseq as written
from helpers.cli import error_of, succeed


def _text(path: Path, lines: int, seed: int) -> Path:
    """Lines between spaces, a few words unknown."""
    draw = random.Random(seed)
    words = [f"w{number}" for number in range(written.WORDS - 4)] + ["unknown"]
    path.write_text("".join(f" {' '.join(draw.choices(words, k=draw.randint(0, 12)))} \n" for _ in range(lines)))
    return path


def test_a_checkpoint_goes_through_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    checkpoint = written.save(tmp_path / "model.pt", written.state_dict())
    written.dictionary(tmp_path / "dict.txt")
    data, test = _text(tmp_path / "train.txt", 200, 0), _text(tmp_path / "test.txt", 30, 1)
    (tmp_path / "recipe.yaml").write_text(
        "stages:\n"
        "  - {loss: transfer, tokens: 256, fit: full}\n  - {loss: distill, tokens: 256, cross_entropy: 0.3}\n"
        "  - {loss: finetune, tokens: 128}\n"
        "length: 32\nbatch_tokens: 128\nvalidation_tokens: 128\ndropout: true\n"
    )
    converted, run = tmp_path / "converted", tmp_path / "run"
    succeed("convert", checkpoint, "--preset", "paper", "--rule", "decay", "--m", 4, "-o", converted)
    trained = ("train", converted, "--data", data, "--validation", test, "--recipe", tmp_path / "recipe.yaml")
    succeed(*trained, "--device", "cpu", "-o", run)
    windows = ("--length", 16, "--context", "0,12", "-o", tmp_path / "eval.json")
    succeed("eval", checkpoint, converted, run, "--data", test, *windows)
    lines = test.read_text().splitlines()
    for model in json.loads((tmp_path / "eval.json").read_text())["models"]:
        assert [row["context"] for row in model["perplexity"]] == [0, 12]
        assert {row["tokens"] for row in model["perplexity"]} == {sum(len(line.split()) + 1 for line in lines)}
    told = succeed("generate", run, "--prompt", "w1 w2", "--max-new-tokens", 5).stdout.split()
    assert told and set(told) <= {f"w{number}" for number in range(written.WORDS)} | {"<s>", "<pad>", "<unk>"}
    ranked = ("--tokens", 256, "--keep", 1, "-o", tmp_path / "ranking.json", "--save", tmp_path / "hybrid")
    succeed("rank", run, "--data", data, *ranked)
    succeed("profile", run, "--lengths", "8,16", "--device", "cpu", "-o", tmp_path / "profile.json")
    succeed("generate", tmp_path / "hybrid", "--prompt", "w1 w2", "--max-new-tokens", 5)
    assert "adaptive_input" in succeed("info", checkpoint).stdout


def test_a_checkpoint_without_dictionary_is_one_line_in_every_command(tmp_path: Path) -> None:
    checkpoint, data = written.save(tmp_path / "model.pt", written.state_dict()), _text(tmp_path / "text.txt", 9, 0)
    for arguments in (
        ("eval", checkpoint, "--data", data),
        ("train", checkpoint, "--data", data, "-o", tmp_path / "run"),
    ):
        assert "has no dictionary beside it" in error_of(*arguments)
    (tmp_path / "dict.txt").write_text("w1 1\n")
    assert "another model's" in error_of("eval", checkpoint, "--data", data)
