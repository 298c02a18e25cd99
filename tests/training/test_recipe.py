"""Recipes as files, as changes typed on the command line, and what the train command refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli import error_of, run, save_model, succeed
from helpers.tiny import config_of
from helpers.training import (
    CHAIN,
    STEP,
    Files,
    Program,
    command,
    make_recipe,
    make_train_config,
    save_converted,
    train_in,
    training_files,
)
from transformers import GPT2LMHeadModel

from fastweights.training.recipe import RECIPE_FOLDER, Recipe, RecipeError, Stage, change, load_recipe, parse_changes

SHIPPED = sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def error_in(folder: Path, text: str) -> str:
    with pytest.raises(RecipeError) as found:
        load_recipe(write(folder, text))
    return str(found.value)


def test_paper_and_distill_are_shipped() -> None:
    assert {"paper", "distill"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_loads(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe == load_recipe(RECIPE_FOLDER / f"{name}.yaml")
    assert all(recipe.steps_of(stage) > 1 and 0 < stage.learning_rate < 0.1 for stage in recipe.stages)


def test_fields_of_a_file_replace_defaults(tmp_path: Path) -> None:
    text = "stages:\n- loss: distill\n  learning_rate: 1e-3\n  tokens: 1e6\n- {}\nseed: 3\nbatch_tokens: 2_048\n"
    stages = (Stage(loss="distill", learning_rate=1e-3, tokens=1_000_000), Stage())
    assert load_recipe(write(tmp_path, text)) == Recipe(stages=stages, seed=3, batch_tokens=2048)
    assert load_recipe(write(tmp_path, "seed: 3")) == Recipe(seed=3)


def test_recipe_round_trips_through_json() -> None:
    recipe = load_recipe("distill")
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_steps_and_rows_follow_tokens_and_lengths() -> None:
    long, short = Stage(tokens=257, length=64), Stage(tokens=1)
    recipe = Recipe(stages=(long, short), length=32, batch_tokens=128)
    assert [recipe.steps_of(stage) for stage in recipe.stages] == [3, 1]
    assert [recipe.rows_of(stage) for stage in recipe.stages] == [2, 4]
    assert not recipe.needs_teacher
    assert all(Stage(**asks).needs_teacher for asks in (dict(loss="distill"), dict(loss="transfer"), dict(fit="full")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch: 3", "unknown setting batch; known are stages, length, batch_tokens"),
        ("stages: [{rate: 1}]", r"unknown setting stages[0].rate; known are loss, tokens, learning_rate"),
        ("stages: [{}, {tokens: x}]", "stages[1].tokens must be a whole number, found 'x'"),
        ("stages: [{tokens: 1.5}]", "stages[0].tokens must be a whole number, found 1.5"),
        ("stages: [{tokens: true}]", "stages[0].tokens must be a whole number, found True"),
        ("stages: [{learning_rate: [1]}]", "stages[0].learning_rate must be a number, found [1]"),
        ("stages: [{learning_rate: -1}]", "stages[0].learning_rate must be between 0 and 1,000,000, found -1"),
        ("stages: [{learning_rate: .nan}]", "stages[0].learning_rate must be between 0 and 1,000,000, found nan"),
        ("stages: [{learning_rate: 1e40}]", "stages[0].learning_rate must be between 0 and 1,000,000, found 1"),
        (
            "stages: [{body_learning_rate: .inf}]",
            "stages[0].body_learning_rate must be between 0 and 1,000,000, found inf",
        ),
        ("stages: [{tokens: 1e22}]", "stages[0].tokens must be between 1 and 1,000,000,000,000,000, found 1"),
        ("lora: 999_999_999", "lora must be between 0 and 65,536, found 999999999"),
        ("stages: [{body_learning_rate: x}]", "stages[0].body_learning_rate must be a number or empty, found 'x'"),
        ("stages: [{loss: gan}]", "stages[0].loss='gan' is not known; choose one of finetune, transfer, distill"),
        ("stages: [{fit: half}]", "stages[0].fit='half' is not known"),
        ("stages: [{tokens: 0}]", "stages[0].tokens must be between 1 and 1,000,000,000,000,000, found 0"),
        ("stages: [{warmup: 2}]", "stages[0].warmup must be between 0 and 1, found 2"),
        ("stages: [{final: -0.1}]", "stages[0].final must be between 0 and 1, found -0.1"),
        ("stages: [{temperature: 0}]", "stages[0].temperature must be above 0, found 0"),
        ("stages: [{clip: .nan}]", "stages[0].clip must be above 0, found nan"),
        ("stages: [{beta2: 1}]", "stages[0].beta2 must be at least 0 and below 1, found 1"),
        ("stages: [{cross_entropy: -1}]", "stages[0].cross_entropy must be at least 0, found -1"),
        ("stages: [{recall: 1.5}]", "stages[0].recall must be between 0 and 1, found 1.5"),
        ("stages: [{recall: .nan}]", "stages[0].recall must be between 0 and 1, found nan"),
        ("stages: [{window_dropout: -1}]", "stages[0].window_dropout must be between 0 and 1, found -1"),
        ("stages: [{window_dropout: half}]", "stages[0].window_dropout must be a number, found 'half'"),
        (
            "stages: [{loss: distill, recall: 0.2, length: 32}]",
            "distill.recall=0.2: distill.length must be at least 64, found 32",
        ),
        ("stages: [{length: 1}]", "stages[0].length must be at least 2, found 1"),
        (
            "stages: [{length: 500}]",
            "batch_tokens must be a multiple of the sequence length, found 16384 and finetune.length=500",
        ),
        ("batch_tokens: 500", "batch_tokens must be a multiple of the sequence length, found 500 and length=512"),
        ("stages: []", "stages must name at least one stage"),
        ("stages: {loss: distill}", "stages must be a list of settings, found {'loss': 'distill'}"),
        ("stages: [distill]", "stages must be a list of settings, found ['distill']"),
        ("precision: float16", "precision='float16' is not known; choose one of auto, float32, bfloat16"),
        ("dropout: 0.1", "dropout must be true or false, found 0.1"),
        ("micro_batch: 0", "micro_batch must be at least 1, found 0"),
        ("seed: -1", "seed must be between 0 and"),
        ("seed: 1e30", "seed must be between 0 and"),
        ("diverged_for: 0", "diverged_for must be at least 1, found 0"),
        ("- loss: distill", "must hold settings, `name: value`, found list"),
        ("", "must hold settings, `name: value`, found NoneType"),
        ("a: [", "is not YAML"),
    ],
)
def test_invalid_recipe_names_file_field_and_value(tmp_path: Path, text: str, says: str) -> None:
    found = error_in(tmp_path, text)
    assert found.startswith(str(tmp_path / "recipe.yaml")) and says in found


def test_unknown_recipe_lists_the_shipped_ones() -> None:
    for name in ("nothing", "nothing.yaml"):
        with pytest.raises(RecipeError, match=rf"recipe {name}: no such recipe; shipped are {', '.join(SHIPPED)}"):
            load_recipe(name)


def test_changes_replace_settings_of_recipe_and_stages() -> None:
    recipe = Recipe(stages=(Stage(loss="distill"), Stage(), Stage(loss="distill", tokens=5)))
    typed = parse_changes(["distill.tokens=1e3", "seed=4", "finetune.learning_rate=3e-4", "micro_batch=", "lora = 2"])
    assert typed == {
        "distill.tokens": 1000,
        "seed": 4,
        "finetune.learning_rate": 3e-4,
        "micro_batch": None,
        "lora": 2,
    }
    made = change(recipe, typed)
    assert [stage.tokens for stage in made.stages] == [1000, Stage().tokens, 1000]
    assert (made.stages[1].learning_rate, made.seed, made.lora) == (3e-4, 4, 2)
    assert recipe.stages[2].tokens == 5 and recipe.seed == 0


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("seed", "changes takes NAME=VALUE, such as seed=1 or distill.tokens=100000, found 'seed'"),
        ("=3", "changes takes NAME=VALUE"),
        ("seed=[", "changes seed=[: '[' is no value"),
        ("sead=3", "unknown setting sead"),
        ("distill.speed=3", "unknown setting distill.speed; known are loss, tokens"),
        ("distill.token=3", "unknown setting distill.token (did you mean distill.tokens?); known are loss, tokens"),
        ("distill.lr=3", "unknown setting distill.lr (did you mean distill.learning_rate?)"),
        ("learning_rate=3", "(did you mean transfer.learning_rate or distill.learning_rate"),
        ("batch_token=3", "unknown setting batch_token (did you mean batch_tokens?); known are stages, length"),
        ("finetune.tokens=3", "finetune.tokens=3: the recipe has no stage finetune; its stages are transfer, distill"),
        ("distill.tokens=0", "distill.tokens must be between 1 and 1,000,000,000,000,000, found 0"),
        ("distill.length=1", "distill.length must be at least 2, found 1"),
        ("stages=[]", "stages cannot be changed as a whole"),
        ("length=1", "length must be at least 2, found 1"),
    ],
)
def test_invalid_change_names_field_and_value(typed: str, says: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(says)):
        change(load_recipe("distill"), parse_changes([typed]))


@pytest.mark.parametrize("name", [f.name for f in fields(Recipe) if f.name != "stages"])
def test_every_setting_is_an_option_with_its_help(name: str) -> None:
    text = re.sub(r"\s+", "", succeed("train", "--help").stdout)
    assert f"--{name.replace('_', '-')}" in text
    assert re.sub(r"\s+", "", Recipe.help(name)) in text


@pytest.mark.parametrize("name", [f.name for f in fields(Stage)])
def test_every_setting_of_a_stage_has_a_line_in_the_help(name: str) -> None:
    shown = succeed("train", "--help").stdout
    assert len(re.findall(rf"^  {name} ", shown, re.MULTILINE)) == 1
    assert max(map(len, shown.splitlines())) <= 80


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("recipe")) as made:
        yield made


def refused(files: Files, *arguments: Any, model: Path | None = None, output: str = "refused") -> str:
    """The error of a train command that is refused before anything is written."""
    target = files.folder / output
    before = sorted(target.iterdir()) if target.is_dir() else None
    name, _, *typed = command(files, files.folder / "refused")
    typed[typed.index("-o") + 1] = target
    result = run(name, model or files.converted, *typed, *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert (sorted(target.iterdir()) if target.is_dir() else None) == before
    # where the teacher was loaded, a line names it; where text was read, the bar's empty line stands before the error
    *notices, error = result.stderr.strip().splitlines()
    assert all(" was converted from " in notice for notice in notices if notice.strip())
    assert result.stdout == "" and error.startswith("error: ")
    return error.removeprefix("error: ")


def test_missing_arguments_are_named(files: Files) -> None:
    assert error_of("train").startswith("DIR, --data, --output missing")
    assert error_of("train", files.converted, "-o", "out").startswith("--data missing")
    assert error_of("train", files.converted, "--data", files.data).startswith("--output missing")
    assert error_of("train", "--data", files.data, "-o", "out").startswith("DIR missing")


def test_command_line_errors_name_flags(files: Files) -> None:
    assert refused(files, "--length", 1).startswith("--length must be at least 2")
    assert refused(files, "--batch-tokens", 100).startswith("--batch-tokens must be a multiple of the sequence length")
    assert refused(files, "--precision", "float16").startswith("--precision='float16' is not known")
    assert refused(files, "--set", "distill.length=1").startswith("--set: distill.length must be at least 2")
    assert refused(files, "--recipe", "none").startswith("--recipe none: no such recipe")
    assert refused(files, "--device", "cuda").startswith("--device cuda cannot be used here")
    assert "--text-field" in refused(files, "--data", _json_lines(files.folder))


def _json_lines(folder: Path) -> Path:
    path = folder / "other.jsonl"
    path.write_text('{"body": "text"}\n')
    return path


def test_length_beyond_the_position_table_is_refused(files: Files) -> None:
    assert "--length 128" in refused(files, "--length", 128)
    assert "positions for 96 tokens" in refused(files, "--set", "distill.length=128")
    validated = ("--set", "transfer.length=32", "--set", "distill.length=32", "--length", 128)
    assert "positions for 96 tokens" in refused(files, *validated)


def test_missing_empty_or_short_data_is_refused(files: Files) -> None:
    empty, short = files.folder / "empty.txt", files.folder / "short.txt"
    empty.write_text("\n<|endoftext|>\n \n")
    short.write_text("Hello world")
    assert "no such file or folder" in refused(files, "--data", "nowhere.txt")
    assert "has no text in it" in refused(files, "--data", empty)
    assert "fewer than one row of 32" in refused(files, "--data", short)
    assert "no batch of 400 rows" in refused(files, "--batch-tokens", 32 * 400)
    assert "fewer than one row of 32" in refused(files, "--validation", short)


def test_recipe_that_does_not_fit_the_model_is_refused(files: Files) -> None:
    bare = save_model(files.folder / "bare", with_tokenizer=False)
    finetune = ("--set", "transfer.loss=finetune", "--set", "distill.loss=finetune")
    assert "has no tokenizer" in refused(files, model=bare)
    assert "is not converted: transfer and fit teach" in refused(files, model=files.base)
    assert "is not converted: --lora" in refused(files, *finetune, "--lora", 2, model=files.base)
    frozen = (*finetune, "--set", "finetune.body_learning_rate=0")
    assert "the stage finetune trains nothing" in refused(files, *frozen, model=files.base)
    assert "the stage distill trains nothing" in refused(files, "--set", "distill.learning_rate=0")
    assert "distill.top_k=62: " in refused(files, "--set", "distill.top_k=62")
    assert "no folder at" in refused(files, model=files.folder / "nowhere")


def test_window_dropout_of_a_model_without_window_is_refused(files: Files) -> None:
    local = save_converted(files.folder / "local", files.base, rule="local", window=4)
    typed, setting = ("--set", "distill.window_dropout=0.1"), "distill.window_dropout=0.1: "
    assert f"{setting}{files.converted} has no window: convert it with a window" in refused(files, *typed)
    assert f"{setting}{local} has the rule local" in refused(files, *typed, model=local)
    finetune = ("--set", "transfer.loss=finetune", "--set", "distill.loss=finetune")
    unconverted = refused(files, *finetune, "--set", "finetune.window_dropout=1", model=files.base)
    assert f"finetune.window_dropout=1: {files.base} is not converted" in unconverted


def test_teacher_that_does_not_fit_is_refused(files: Files) -> None:
    deep, orphan = files.folder / "deep", save_model(files.folder / "orphan", m=4)
    GPT2LMHeadModel(config_of("gpt2", n_layer=3)).save_pretrained(deep)
    assert "no folder at" in refused(files, "--teacher", files.folder / "nowhere")
    assert "is converted itself" in refused(files, "--teacher", files.converted)
    assert "vocabulary 61, 3 layers, width 32) is not the model" in refused(files, "--teacher", deep)
    assert "name it with --teacher" in refused(files, model=orphan)


def test_output_folder_that_is_not_empty_is_refused(files: Files) -> None:
    task = make_train_config(files, make_recipe(({"tokens": 128},)), validation=None)
    train_in(files.folder / "done", task)
    assert "holds a run already: fastweights train --resume" in refused(files, output="done")
    (files.folder / "full").mkdir()
    (files.folder / "full" / "notes.txt").write_text("mine")
    assert "exists and is not an empty folder" in refused(files, output="full")
    assert "choose another output folder" in refused(files, output="text.txt/inside")


def test_resume_of_no_run_or_with_other_flags_is_refused(files: Files) -> None:
    assert "there is no run to resume" in error_of("train", "--resume", files.folder / "nothing")
    assert "give it alone" in error_of("train", "--resume", files.folder / "nothing", "--seed", 3)
    odd = files.folder / "odd"
    odd.mkdir()
    for text, says in (
        ("{", "cannot be read"),
        ('{"recipe": {}}', "not of this version"),
        ("[]", "must hold an object"),
    ):
        (odd / "run.json").write_text(text)
        assert says in error_of("train", "--resume", odd)


def test_missing_tracker_is_refused(files: Files) -> None:
    assert refused(files, "--report-to", "nonsense").startswith("--report-to nonsense is not known; choose one of aim")
    assert "pip install dvclive" in refused(files, "--report-to", "dvclive")


def test_missing_tracker_is_one_line_in_a_process_of_its_own(files: Files, tmp_path: Path) -> None:
    """Nothing has set up accelerate's logging there."""
    program = Program(tmp_path / "output", *command(files, tmp_path / "run"), "--report-to", "dvclive")
    assert program.wait() == 2
    assert program.output.startswith("error: --report-to dvclive") and "Traceback" not in program.output


def test_missing_tensorboard_names_the_extra(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.training.checks.get_available_trackers", list)
    for name in ("tensorboard", "all"):
        assert "pip install 'fastweights[tensorboard]'" in refused(files, "--report-to", name)


def test_learning_rate_flags_set_that_of_all_stages_and_set_that_of_one(files: Files, tmp_path: Path) -> None:
    rates = ("--learning-rate", 3e-4, "--body-learning-rate", 0, "--set", "transfer.learning_rate=2e-4")
    succeed(*command(files, tmp_path / "run", make_recipe(tuple(dict(stage, tokens=STEP) for stage in CHAIN)), *rates))
    stages = json.loads((tmp_path / "run" / "result.json").read_text())["recipe"]["stages"]
    assert [stage["learning_rate"] for stage in stages] == [2e-4, 3e-4]
    assert [stage["body_learning_rate"] for stage in stages] == [0, 0]
    assert run(*command(files, tmp_path / "wrong", None, "--learning-rate", -1)).exit_code == 2


def test_flags_replace_settings_of_a_recipe_file(files: Files) -> None:
    path = files.folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"stages": [{"tokens": 128}], "length": 32, "batch_tokens": 128}))
    output = files.folder / "typed"
    succeed(
        *("train", files.converted, "--data", files.data, "-o", output, "--recipe", path, "--device", "cpu"),
        *("--seed", 5, "--set", "finetune.learning_rate=2e-4", "--no-dropout"),
    )
    recipe = json.loads((output / "result.json").read_text())["recipe"]
    assert (recipe["seed"], recipe["stages"][0]["learning_rate"], recipe["length"]) == (5, 2e-4, 32)
