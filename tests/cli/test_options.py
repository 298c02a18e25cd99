"""How errors of the library become messages of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from helpers.cli import error_of, save_model

from fastweights.cli.compare import compare
from fastweights.cli.convert import convert
from fastweights.cli.options import flag_of, reports_errors
from fastweights.cli.profile import profile
from fastweights.cli.train import train
from fastweights.config import ConfigError
from fastweights.utils.errors import Argument, error_context


@pytest.mark.parametrize(
    ("command", "argument", "typed"),
    [
        (convert, "model", "MODEL"),
        (train, "model", "DIR"),
        (compare, "model", "--model"),
        (convert, "output", "--output"),
        (convert, "feature_map", "--feature-map"),
        (train, "batch_tokens", "--batch-tokens"),
        (profile, "source", "--from"),
        (compare, "changes", "--set"),
        (None, "train_length", "--train-length"),
    ],
)
def test_flag_is_what_the_command_takes(command: Callable[..., Any] | None, argument: str, typed: str) -> None:
    assert flag_of(argument, command) == typed


def test_settings_of_a_file_keep_their_names() -> None:
    with pytest.raises(ConfigError) as flag, error_context("a: "):
        raise ConfigError(Argument("batch_tokens"), " is odd")
    with pytest.raises(ConfigError) as plain, error_context("a: ", plain=True):
        raise ConfigError(Argument("batch_tokens"), " is odd")
    assert flag.value.message(flag_of) == "a: --batch-tokens is odd"
    assert plain.value.message(flag_of) == "a: batch_tokens is odd"


@pytest.mark.parametrize("given", ["flag", "set", "file"])
def test_recipe_setting_is_named_as_it_was_given(tmp_path: Path, given: str) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"batch_tokens": 1} if given == "file" else {}))
    flags = {"flag": ["--batch-tokens", 1], "set": ["--set", "batch_tokens=1"], "file": []}[given]
    command = ("train", tmp_path, "--data", "x", "-o", tmp_path / "out", "--recipe", recipe, *flags)
    message = error_of(*command)
    named = {"flag": "--batch-tokens ", "set": "--set batch_tokens ", "file": f"{recipe}: batch_tokens "}[given]
    assert message.startswith(named), message


@pytest.mark.parametrize("change", ["finetune.tokens=x", "finetune.token=1", "distill.tokens=1", "color=1", "stages=1"])
def test_set_is_named_in_errors_about_stages_and_unknown_settings(tmp_path: Path, change: str) -> None:
    message = error_of(
        "train", tmp_path, "--data", "x", "-o", tmp_path / "out", "--recipe", "finetune", "--set", change
    )
    assert message.startswith("--set: ") and change.partition("=")[0] in message, message


def test_damaged_config_is_not_blamed_on_a_flag(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", m=4)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"m": 4', '"m": 0'))
    message = error_of("info", folder)
    assert "m must be" in message and "--m" not in message and str(folder) in message


def test_only_errors_of_the_library_become_one_line() -> None:
    """A ValueError of a bug has to show where it comes from."""

    @reports_errors
    def command(error: Exception) -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        command(ConfigError(Argument("m"), " is odd"))
    assert ended.value.exit_code == 2
    with pytest.raises(ValueError, match="a bug"):
        command(ValueError("a bug"))
