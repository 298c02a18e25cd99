"""What can be known from the arguments and from the headers of files is refused before torch is imported, which takes
seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import save_model

# Importing a module that is None in sys.modules fails. All commands run in one process, so that this takes seconds.
WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["accelerate"] = None
from typer.testing import CliRunner
from fastweights.cli.app import app
done = {command: CliRunner().invoke(app, command.split()) for command in json.load(sys.stdin)}
json.dump({command: (result.exit_code, result.stdout, result.stderr) for command, result in done.items()}, sys.stdout)
"""
COMMANDS = (
    "convert",
    "info",
    "generate",
    "train",
    "compare",
    "eval",
    "profile",
    "report",
    "rank",
    "serve",
    "quickstart",
)
HELP = ["--help", *(f"{command} --help" for command in COMMANDS)]
TRAIN = "train {base} --data {text} -o {new}"
COMPARE = "compare paper --model {base} --data {text} --validation {text} -o {new}"
RANK = "rank {base} --data {text}"
# Commands, and what their one line must name. Folders in braces are made by the fixture `paths`.
REFUSED = {
    "convert {missing} -o {new}": "no folder at {missing}",
    "convert {empty} -o {new}": "{empty} is not a checkpoint: it has no config.json",
    "convert {no_config} -o {new}": "{no_config} is not a checkpoint: it has no config.json",
    "convert {bad_config} -o {new}": "{bad_config}: config.json is not JSON",
    "convert {bad_weights} -o {new}": "{bad_weights}: model.safetensors cannot be read",
    "convert {empty_gguf} -o {new}": "{empty_gguf} is not a GGUF file",
    "convert {missing}.gguf -o {new}": "no GGUF file at {missing}.gguf",
    "convert {base} -o {new} --m 0": "--m must be between 1 and 65,536, found 0",
    "convert {base} -o {new} --window -1": "--window must be between 0",
    "convert {base} -o {base}": "exists and is not empty",
    "convert {base} -o {text}/x": "cannot write to {text}/x: Not a directory",
    "info {missing}": "no folder at {missing}",
    "info {empty}": "no config.json",
    "info {bad_weights}": "model.safetensors cannot be read",
    "generate {missing} --prompt x": "no folder at {missing}",
    "generate {base} --prompt x --temperature 0": "--temperature must be above 0",
    "generate {base} --prompt x --save-state {empty}": "--save-state {empty} cannot be written",
    "generate {base} --prompt x --save-state /proc/s": "--save-state /proc/s cannot be written: no file can be written",
    "generate {base} --prompt x --load-state {missing}": "--load-state: no state file at {missing}",
    "train {missing} --data {text} -o {new}": "no folder at {missing}",
    "train {base} --data {missing} -o {new}": "{missing}: there is no such file or folder",
    "train {base} --data {empty_text} -o {new}": "{empty_text} has no text in it",
    "train {base} --data {text} -o {base}": "{base} exists and is not an empty folder",
    "train {base} --data {text} -o /proc/run": "--output /proc/run cannot be written",
    "train {base} --data {text} -o {run}": "{run} holds a run already: fastweights train --resume {run}",
    "train --resume {missing}": "--resume {missing}: there is no run to resume",
    f"{TRAIN} --validation {{missing}}": "--validation: {missing}: there is no such file",
    f"{TRAIN} --teacher {{missing}}": "--teacher: no folder at {missing}",
    f"{TRAIN} --recipe nonsense": "--recipe nonsense: no such recipe",
    f"{TRAIN} --set nonsense=1": "--set: unknown setting nonsense",
    f"{TRAIN} --batch-tokens -1": "--batch-tokens must be at least 2, found -1",
    "compare nonsense --model {base} --data {text} --validation {text} -o {new}": "GRID nonsense: no such grid",
    "compare paper --model {missing} --data {text} --validation {text} -o {new}": "no folder at {missing}",
    f"{COMPARE} --test {{missing}}": "--test: {missing}: there is no such file",
    "eval {missing} --data {text}": "no folder at {missing}",
    "eval {base} --data {missing}": "{missing}: there is no such file or folder",
    "eval {base} --data {text} --length 0": "--length 0: a window has at least 1 token",
    "eval {base} --data {text} --length 8 --context 8": "--context 8 with --length 8",
    "eval {base} --data {text} -o {missing}/x.json": "--output {missing}/x.json cannot be written",
    "eval {base}": "nothing to evaluate on: give --data",
    "profile {missing}": "no folder at {missing}",
    "profile {base} --lengths 0": "--lengths must be at least one length of 1 or more tokens, found [0]",
    "profile --from {missing}": "{missing}",
    "rank {missing} --data {text}": "no folder at {missing}",
    "rank {base} --data {empty_text}": "--data {empty_text} has no text in it",
    f"{RANK} --tokens 4 --length 8": "--tokens 4 are fewer than one row",
    f"{RANK} --keep 1 --save {{base}}": "--save {base} exists and is not an empty folder",
    f"{RANK} --keep 1 --save /proc/hybrid": "--save /proc/hybrid cannot be written",
    "serve {missing}": "no folder at {missing}",
    "serve {base} --host nowhere.invalid": "--host nowhere.invalid is not an address",
    "serve {base} --api-keys {empty_text}": "--api-keys {empty_text} has no key in it",
    "report {missing}": "{missing}",
    "report {text} -o {text}": "--output {text} cannot be written: {text} is a file",
    "report --card {missing}": "--card {missing}: there is no such folder",
    "quickstart -o {text}/x": "--output {text}/x cannot be written: {text} is a file",
    "info {unstarted_run}": "the training run in {unstarted_run} has no checkpoint yet",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("paths")
    names = ("missing", "new", "base", "empty", "no_config", "bad_config", "bad_weights", "run", "unstarted_run")
    made = {name: folder / name for name in names}
    made |= {name: folder / f"{name}.txt" for name in ("text", "empty_text")} | {"empty_gguf": folder / "empty.gguf"}
    for name in ("base", "no_config", "bad_config", "bad_weights", "run/best"):
        save_model(folder / name)
    (made["no_config"] / "config.json").unlink()
    (made["bad_config"] / "config.json").write_text("")
    (made["bad_weights"] / "model.safetensors").write_bytes(b"")
    for name in ("empty", "unstarted_run"):
        made[name].mkdir()
    for name in ("run", "unstarted_run"):
        (made[name] / "run.json").write_text("{}")
    made["text"].write_text("Some text.")
    for name in ("empty_text", "empty_gguf"):
        made[name].touch()
    return made


@pytest.fixture(scope="module")
def outcomes(paths: dict[str, Path]) -> dict[str, tuple[int, str, str]]:
    """The exit code and the output of each command."""
    commands = json.dumps([command.format(**paths) for command in (*REFUSED, *HELP)])
    program = [sys.executable, "-c", WITHOUT_TORCH]
    return json.loads(subprocess.run(program, input=commands, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_bad_arguments_are_refused_in_one_line_without_importing_torch(
    command: str, message: str, paths: dict[str, Path], outcomes: dict[str, tuple[int, str, str]]
) -> None:
    exit_code, stdout, stderr = outcomes[command.format(**paths)]
    assert (exit_code, stdout) == (2, ""), stderr
    (line,) = stderr.splitlines()
    assert line.startswith("error: ") and message.format(**paths) in line
    assert not paths["new"].exists()


@pytest.mark.parametrize("command", HELP)
def test_help_does_not_import_torch(command: str, outcomes: dict[str, tuple[int, str, str]]) -> None:
    exit_code, stdout, stderr = outcomes[command]
    assert exit_code == 0 and "Usage" in stdout, stderr
