"""More of what a user can get wrong: values, files and folders that are read or written on the way."""

from __future__ import annotations

import io
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import error_of, run, save_model, succeed, tokenizer
from helpers.tiny import pretrained
from rich.console import Console

from fastweights import quickstart
from fastweights.loading import load, save
from fastweights.modeling.cache import FastWeightsCache, StateError
from fastweights.training.recipe import load_recipe
from fastweights.training.trainer import Interrupted
from fastweights.utils.files import write_text
from fastweights.utils.provenance import provenance


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save(pretrained("gpt2"), tmp_path / "base", tokenizer())
    return tmp_path / "base"


@pytest.fixture
def converted(base: Path, tmp_path: Path) -> Path:
    succeed("convert", base, "-o", tmp_path / "converted", "--m", 4)
    return tmp_path / "converted"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("Hello world, this is a text. " * 400)
    return tmp_path / "text.txt"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--m", 10**9], "--m must be between 1 and 65,536, found 1000000000"),
        (["--seed", 2**31 + 1], "--seed must be between 0 and 2,147,483,648, found 2147483649"),
        (["--layers", "99999999999-99999999999999"], "--layers must be numbers and ranges from low to high"),
    ],
)
def test_huge_values_name_the_flag(base: Path, tmp_path: Path, flags: list[Any], message: str) -> None:
    assert message in error_of("convert", base, "-o", tmp_path / "out", *flags)


def test_weights_of_a_layer_are_refused() -> None:
    message = error_of("profile", "--layer", "--weights", "int8")
    assert "--weights is for models, and --layer measures none" in message


def test_too_many_new_tokens_for_attention_are_refused(base: Path) -> None:
    message = error_of("generate", base, "--prompt", "Hello", "--max-new-tokens", 200)
    assert re.search(r"--max-new-tokens 200 .* 96 tokens", message)


def test_prompt_that_is_not_utf8_is_refused(converted: Path) -> None:
    command = [sys.executable, "-m", "fastweights", "generate", str(converted), "--prompt", "-"]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True)
    assert done.returncode == 2 and done.stderr.decode().strip().endswith(
        "error: --prompt is not UTF-8: convert it first, for example with iconv"
    )


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", m=4)
    settings = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    settings["model"]["vocab"] = {word: 10_000 + i for word, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    assert "is another model's, save its own there" in error_of("generate", folder, "--prompt", "Hello")
    (folder / "tokenizer.json").write_text("{")
    assert f"the tokenizer of {folder}: tokenizer.json is not JSON" in error_of("generate", folder, "--prompt", "Hello")


def test_state_of_the_model_before_training_is_refused(tmp_path: Path) -> None:
    """One parameter of many is enough; rounding to another precision is not."""
    model = load(save_model(tmp_path / "model", m=4))
    cache = FastWeightsCache(model.config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
    cache.save(tmp_path / "state", model)
    FastWeightsCache.load(tmp_path / "state", load(tmp_path / "model").to(torch.bfloat16))
    smallest = min(model.parameters(), key=lambda p: (float(p.detach().norm()) or torch.inf, p.numel()))
    with torch.no_grad():
        smallest.mul_(1.02)
    with pytest.raises(StateError, match="belongs to another model"):
        FastWeightsCache.load(tmp_path / "state", model)


# what is measured with, and written to


def test_lengths_of_zero_name_the_flag(converted: Path, text: Path) -> None:
    assert "--length 0: a window has at least 1 token" in error_of("eval", converted, "--data", text, "--length", 0)
    for flag in ("--limit", "--position-length"):
        done = run("eval", converted, "--data", text, flag, 0)
        assert done.exit_code == 2 and f"Invalid value for '{flag}'" in done.stderr


def test_result_that_cannot_be_written_is_named(converted: Path, text: Path, tmp_path: Path) -> None:
    """A file that may not grow stands for a full disk."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "fastweights", "eval", str(converted), "--data", str(text), "--length", "32"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # noqa: E731
    done = subprocess.run([*command, "-o", str(result)], capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2 and f"error: {result}: File too large" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.glob("*result.json*")) == []


def test_reading_the_commit_takes_no_git_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends in the middle would leave the lock in the user's repository."""
    monkeypatch.delenv("FASTWEIGHTS_COMMIT", raising=False)
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "check_output", lambda command, **_: asked.append(command) or "found")
    assert provenance()["commit"] == "found+"
    git = [command for command in asked if command[0] == "git"]  # `platform` may ask uname, too
    assert len(git) == 3 and all(command[1] == "--no-optional-locks" for command in git)


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "folder"))):
        write_text(tmp_path / "folder", "text")


# training


def train_error(converted: Path, text: Path, *flags: Any) -> str:
    return error_of(
        "train", converted, "--data", text, "-o", converted.parent / "run", "--length", 32, "--batch-tokens", 64, *flags
    )


def test_settings_are_named_as_flag_file_or_set(converted: Path, text: Path, tmp_path: Path) -> None:
    assert "--set takes NAME=VALUE, such as seed=1 or" in train_error(converted, text, "--set", "distill.tokens")
    assert "--set length=[1: '[1' is no value" in train_error(converted, text, "--set", "length=[1")
    recipe = tmp_path / "mine.yaml"
    for settings, message in (("stages: 3", "mine.yaml: stages must"), ("stages: []\nlength: 0", "mine.yaml: ")):
        recipe.write_text(settings)
        found = train_error(converted, text, "--recipe", recipe)
        assert message in found and "--stages" not in found and "--length" not in found


def test_shard_with_one_process_is_refused(converted: Path, text: Path) -> None:
    assert "--shard: there is one process only: start several with torchrun" in train_error(converted, text, "--shard")


def test_missing_recipe_names_the_flag(converted: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name, found in ((text, "its name must end in .yaml"), (tmp_path / "folder.yaml", "that is a folder")):
        assert f"--recipe {name}: {found}; shipped are" in train_error(converted, text, "--recipe", name)


def test_missing_base_names_the_teacher_flag(converted: Path, base: Path, text: Path) -> None:
    base.rename(base.with_name("elsewhere"))
    message = train_error(converted, text)
    assert (
        f"the base of {converted} is not found, name it with --teacher: no folder at {base}: give a model's folder"
        in message
    )


def test_bad_validation_data_names_its_flag(converted: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    missing = train_error(converted, text, "--validation", tmp_path / "none.txt")
    assert missing.startswith(f"--validation: {tmp_path}/none.txt: there is no such file") and "--data" not in missing
    empty = train_error(converted, text, "--validation", tmp_path / "empty.txt")
    assert empty.startswith("--validation: ") and "has no text in it" in empty


# the quickstart


def test_quickstart_replaces_only_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/converted").write_text("mine")
    assert f"--output {tmp_path}/mine exists and is not the folder of a quickstart" in error_of(
        "quickstart", "-o", tmp_path / "mine"
    )
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["converted"]
    for _ in range(2):
        quickstart._claim(tmp_path / "new")
    (tmp_path / "new/converted").write_text("its own")
    quickstart._claim(tmp_path / "new")


def test_stopped_quickstart_names_the_command_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise Interrupted(tmp_path, 2)

    monkeypatch.setattr(quickstart, "train", stop)
    with pytest.raises(Interrupted, match=f"resume with: fastweights quickstart -o {tmp_path}$") as raised:
        quickstart._train(tmp_path, load_recipe("quickstart"), Console(file=io.StringIO()))
    assert raised.value.exit_code == 130
