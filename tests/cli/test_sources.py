"""Every command that takes a model takes it from a folder, a training run, the hub and a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run, save_model, succeed, tokenizer
from helpers.sample_results import EVALUATION, write
from helpers.tiny_gguf import write_tiny_llama

from fastweights.loading import load

HUB_ID, COMMIT = "me/tiny", "0" * 40
COMMANDS: dict[str, list[Any]] = {
    "info": [],
    "generate": ["--prompt", "Hello", "--max-new-tokens", 3],
    "eval": ["--data", "text.txt", "--length", 16],
    "profile": ["--lengths", 4, "--device", "cpu"],
    "rank": ["--data", "text.txt", "--teacher", "base", "--tokens", 32, "--length", 16],
    "train": [
        "--data",
        "text.txt",
        "-o",
        "out",
        "--recipe",
        "finetune",
        "--set",
        "finetune.tokens=32",
        "--length",
        "16",
        "--batch-tokens",
        "32",
    ],
    "convert": ["-o", "out", "--m", 4],
}
CONVERTED = ("info", "generate", "eval", "profile", "rank", "train")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a base, a text, and the hub's cache in place of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "tokens"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    save_model(tmp_path / "base")
    Path("text.txt").write_text("A quick brown fox jumps over the lazy dog. Why\n" * 20)
    return tmp_path


def save_run(folder: Path, *checkpoints: str) -> Path:
    for name in checkpoints:
        save_model(folder / name, m=8, seed=len(name))
    (folder / "run.json").write_text("{}")
    return folder


def cache_on_hub(here: Path, **settings: Any) -> None:
    repository = here / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    save_model(repository / "snapshots" / COMMIT, **settings)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)


@pytest.mark.parametrize("command", CONVERTED)
def test_training_run_stands_for_its_best_checkpoint(here: Path, command: str) -> None:
    save_run(here / "run", "best", "last")
    result = succeed(command, "run", *COMMANDS[command])
    assert result.stderr.splitlines()[0] == "run is a training run: its model is run/best"


def test_base_that_was_trained_is_converted_from_its_run(here: Path) -> None:
    shutil.copytree("base", "run/best")
    (here / "run/run.json").write_text("{}")
    succeed("convert", "run", *COMMANDS["convert"])
    assert load("out").config.fastweights_base == str(here / "run/best")


def test_teacher_may_be_a_training_run(here: Path) -> None:
    shutil.copytree("base", "run/best")
    (here / "run/run.json").write_text("{}")
    save_model(here / "converted", m=8)
    flags = ["run" if flag == "base" else flag for flag in COMMANDS["rank"]]
    assert "run is a training run" in succeed("rank", "converted", *flags).stderr


def test_run_without_validation_stands_for_its_last_checkpoint(here: Path) -> None:
    save_run(here / "run", "last")
    assert "run/last" in succeed("info", "run").stderr
    assert load("run").state_dict().keys() == load("run/last").state_dict().keys()


def test_run_names_the_model_in_results(here: Path) -> None:
    save_run(here / "run", "best")
    succeed("eval", "base", "run", *COMMANDS["eval"], "-o", "eval.json")
    assert [model["name"] for model in json.loads(Path("eval.json").read_text())["models"]] == ["base", "run"]


@pytest.mark.parametrize("command", ["convert", *CONVERTED])
def test_hub_id_is_read_from_the_cache(here: Path, command: str) -> None:
    cache_on_hub(here, **({} if command == "convert" else {"m": 8}))
    succeed(command, HUB_ID, *COMMANDS[command])


@pytest.mark.parametrize("command", ["info", "generate", "eval", "profile", "convert"])
def test_gguf_file_is_read(here: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny file has no tokenizer."""
    write_tiny_llama(here / "tiny.gguf")
    monkeypatch.setattr("fastweights.loading.load_tokenizer", lambda source: tokenizer())
    succeed(command, "tiny.gguf", *COMMANDS[command])


def test_info_of_a_gguf_file_reads_no_tensor(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(here / "tiny.gguf")
    described = json.loads(succeed("info", "tiny.gguf", "--json").stdout)
    assert described["parameters"] == sum(p.numel() for p in load("tiny.gguf").parameters())
    monkeypatch.setattr("gguf.dequantize", None)
    monkeypatch.setattr("torch.nn.Module.to", None)
    assert json.loads(succeed("info", "tiny.gguf", "--json").stdout) == described


def test_gguf_file_is_not_ranked(here: Path) -> None:
    write_tiny_llama(here / "tiny.gguf")
    result = run("rank", "tiny.gguf", *COMMANDS["rank"])
    assert result.exit_code == 2 and "error: tiny.gguf is not converted" in result.stderr


def test_card_of_a_run_is_written_beside_its_best_model(here: Path) -> None:
    save_run(here / "run", "best")
    (result,) = write(here, {"eval.json": EVALUATION})
    succeed("report", result, "--card", "run")
    assert (here / "run/best/README.md").is_file()


@pytest.mark.parametrize("command", ["info", "eval"])
def test_tables_have_their_full_width_in_a_pipe(here: Path, command: str) -> None:
    name = "a-long-name" * 10
    Path("base").rename(name)
    assert any(line.strip().startswith(name) for line in succeed(command, name, *COMMANDS[command]).stdout.splitlines())
