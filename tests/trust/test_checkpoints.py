"""Damaged, missing and foreign checkpoints: a run resumes to the bit from the newest whole one, or says why not."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run
from helpers.training import (
    FINETUNE,
    PEAK,
    STEP,
    Crash,
    CrashingDisplay,
    Files,
    assert_same_run,
    crash_after,
    lines_in,
    log_of,
    make_recipe,
    make_train_config,
    resume_in,
    train_in,
    training_files,
    two_programs,
)
from rich.console import Console
from safetensors.torch import load_file, save_file

from fastweights.loading import load
from fastweights.training.checkpoint import damage_of
from fastweights.training.log import read_log
from fastweights.training.trainer import TrainConfig, TrainingError, resume
from fastweights.utils.errors import CheckpointError, FastWeightsError
from fastweights.utils.files import FileLock, LockedError, temporary_name
from fastweights.utils.manifest import write_manifest
from fastweights.utils.progress import Display


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("checkpoints")) as made:
        yield made


@pytest.fixture(scope="module")
def config(files: Files) -> TrainConfig:
    """Checkpoints after steps 2, 4 and 6."""
    return make_train_config(files, make_recipe(FINETUNE, checkpoint_every=2, validate_every=100))


@pytest.fixture(scope="module")
def whole(files: Files, config: TrainConfig) -> Path:
    train_in(files.folder / "whole", config)
    return files.folder / "whole"


@pytest.fixture(scope="module")
def crashed(files: Files, config: TrainConfig) -> Path:
    crash_after(files.folder / "crashed", config, 5)
    return files.folder / "crashed"


@pytest.fixture
def folder(crashed: Path, tmp_path: Path) -> Path:
    """A run that crashed after step 5, with the checkpoints of steps 2 and 4."""
    return Path(shutil.copytree(crashed, tmp_path / "run", symlinks=True))


def resume_with_output(folder: Path) -> str:
    shown = io.StringIO()
    resume(folder, display=Display(console=Console(file=shown, width=1000)))
    return shown.getvalue()


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)


def drop_adam_state(path: Path) -> None:
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith(":exp_avg"))]
    save_file(tensors, path)


def edit_step(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 3, "stage_step": 3}))


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "flipped bit in a weight": ("model.safetensors", flip_bit),
    "flipped bit in the optimizer's state": ("training.safetensors", flip_bit),
    "missing Adam state": ("training.safetensors", drop_adam_state),
    "edited step": ("progress.json", edit_step),
    "truncated weights": ("model.safetensors", lambda path: os.truncate(path, 1000)),
    "no weights": ("model.safetensors", Path.unlink),
    "empty progress": ("progress.json", lambda path: path.write_text("")),
    "no progress": ("progress.json", Path.unlink),
    "no optimizer's state": ("training.safetensors", Path.unlink),
    "no tokenizer": ("tokenizer.json", Path.unlink),
    "no manifest": ("manifest.json", Path.unlink),
    "empty manifest": ("manifest.json", lambda path: path.write_text("")),
    "manifest of nothing": ("manifest.json", lambda path: path.write_text("[1]")),
    "deeply nested manifest": ("manifest.json", lambda path: path.write_text("[" * 100_000)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_announced_and_the_run_resumes_from_the_one_before(
    folder: Path, whole: Path, damage: str
) -> None:
    name, do = DAMAGES[damage]
    do(folder / "checkpoints" / "0-0000004" / name)
    shown = resume_with_output(folder)
    assert f"the checkpoint {folder / 'checkpoints' / '0-0000004'} is damaged: " in shown
    assert "resuming from checkpoints/0-0000002, step 2" in shown
    assert_same_run(folder, whole)


def test_resume_without_a_whole_checkpoint_is_refused(folder: Path) -> None:
    found = sorted(os.listdir(folder / "checkpoints"))
    for name in found:
        flip_bit(folder / "checkpoints" / name / "model.safetensors")
    before = log_of(folder)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*checksum of model\.safetensors"):
        resume_in(folder)
    assert log_of(folder) == before and sorted(os.listdir(folder / "checkpoints")) == found


@pytest.mark.parametrize("removed", [("last",), ("last", "best")])
def test_resume_without_links_takes_the_newest_checkpoint(folder: Path, whole: Path, removed: tuple[str, ...]) -> None:
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    assert "resuming from checkpoints/0-0000004, step 4" in resume_with_output(folder)
    assert_same_run(folder, whole)


def test_link_to_an_older_checkpoint_does_not_discard_the_newest(folder: Path, whole: Path) -> None:
    (folder / "last").unlink()
    (folder / "last").symlink_to("checkpoints/0-0000002")
    assert "resuming from checkpoints/0-0000004, step 4" in resume_with_output(folder)
    assert_same_run(folder, whole)


def test_later_damaged_checkpoint_does_not_take_the_place_of_a_whole_one(folder: Path, whole: Path) -> None:
    flip_bit(folder / "checkpoints" / "0-0000004" / "model.safetensors")
    with pytest.raises(Crash):
        resume(folder, display=CrashingDisplay(1))
    assert sorted(os.listdir(folder / "checkpoints")) == ["0-0000000", "0-0000002", "0-0000004.damaged"]
    resume_in(folder)
    assert_same_run(folder, whole)
    assert sorted(os.listdir(folder / "checkpoints")) == sorted(os.listdir(whole / "checkpoints"))


@pytest.fixture(scope="module")
def peaked(files: Files) -> Path:
    """A run that crashed in its second stage. Its best checkpoint is an earlier one."""
    folder = files.folder / "peaked"
    crash_after(folder, make_train_config(files, make_recipe(PEAK)), 9)
    assert (folder / "best").resolve() != (folder / "last").resolve()
    return folder


def test_damaged_best_checkpoint_is_not_loaded_and_announced_by_a_resume(peaked: Path, tmp_path: Path) -> None:
    run_folder = Path(shutil.copytree(peaked, tmp_path / "run", symlinks=True))
    load(run_folder)
    best = (run_folder / "best").resolve()
    flip_bit(best / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"best is damaged: the checksum of model\.safetensors is wrong"):
        load(run_folder)
    load(run_folder / "last")
    assert "the best checkpoint, that of step 4, is damaged: the checksum of" in resume_with_output(run_folder)


def test_lost_best_checkpoint_is_not_replaced_by_the_last_one_silently(peaked: Path, tmp_path: Path) -> None:
    run_folder = Path(shutil.copytree(peaked, tmp_path / "run", symlinks=True))
    shutil.rmtree((run_folder / "best").resolve())
    with pytest.raises(CheckpointError, match=r"best is not there: restore it, or give the last checkpoint"):
        load(run_folder)
    assert "the best checkpoint, that of step 4, is damaged: it is not there" in resume_with_output(run_folder)


# What a run with checkpoints never has in its progress.json, although its checksum is right.
WRONG_PROGRESS: dict[str, Any] = {
    "best": ["abc", {}, {"step": 4}, None],
    "validation": ["abc", [1], [{}], [], None],
    "base": [1, {"name": 1}],
    "seconds": ["abc", None, -1.0, float("nan"), float("inf")],
    "stage_seconds": ["abc", ["abc"], [], [0.0] * 3, [-1.0]],
    "stage": [-1, 1, 99, 0.0, True],
    "stage_step": [-5, 0, 3, 7, "4"],
    "step": [0, 3, 10**10, -4, None],
    "tokens": [0, -1, 10**300],
    "recipe": [{"speed": 1}, {"stages": 1}, "abc"],
    "data": ["abc", 1],
    "format": [0, 3, -1],
    "unknown": [1],
}


def edit_progress(checkpoint: Path, **changes: Any) -> None:
    """Change or, with `...`, leave out fields of progress.json, and make the manifest fit it."""
    path = checkpoint / "progress.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    write_manifest(checkpoint)


@pytest.mark.parametrize("field", WRONG_PROGRESS)
def test_wrong_progress_with_a_right_checksum_is_damage(crashed: Path, tmp_path: Path, field: str) -> None:
    for number, value in enumerate([..., *WRONG_PROGRESS[field]][field == "unknown" :]):
        checkpoint = Path(shutil.copytree(crashed / "checkpoints" / "0-0000004", tmp_path / str(number)))
        assert damage_of(checkpoint) is None
        edit_progress(checkpoint, **{field: value})
        damage = damage_of(checkpoint)
        assert damage is not None and "progress.json" in damage and "\n" not in damage, value


def test_progress_of_other_validations_is_damage(folder: Path) -> None:
    checkpoint = folder / "checkpoints" / "0-0000004"
    point = json.loads((checkpoint / "progress.json").read_text())["validation"][0]
    edits = [{"step": 5}, {"step": -1}, {"tokens": 7}, {"loss": float("nan")}, {"stage": 3}, {"loss": "abc"}]
    for changes in edits:
        edit_progress(checkpoint, validation=[point | changes], best=point | changes)
        assert "validation[0]." in str(damage_of(checkpoint)), changes
    worse = point | {"step": 2, "tokens": 2 * STEP, "loss": point["loss"] + 1}
    edit_progress(checkpoint, validation=[point, worse], best=worse)
    assert "best" in str(damage_of(checkpoint))
    edit_progress(checkpoint, validation=[worse, point], best=point)
    assert "validation[1].step" in str(damage_of(checkpoint))


def test_validation_before_the_first_step_need_not_be_the_best_in_earlier_versions(folder: Path) -> None:
    checkpoint = folder / "checkpoints" / "0-0000004"
    for version, accepted in ((1, True), (2, False)):
        edit_progress(checkpoint, best=None, format=version)
        assert (damage_of(checkpoint) is None) == accepted


def test_run_resumes_from_the_checkpoint_before_one_with_wrong_progress(folder: Path, whole: Path) -> None:
    edit_progress(folder / "checkpoints" / "0-0000004", best="abc")
    shown = resume_with_output(folder)
    assert "0-0000004 is damaged: " in shown and "progress.json is not valid: best must be" in shown
    assert_same_run(folder, whole)


def test_run_with_wrong_progress_only_is_refused_with_one_line(folder: Path) -> None:
    for checkpoint in (folder / "checkpoints").iterdir():
        edit_progress(checkpoint, stage=99)
    result = run("train", "--resume", folder)
    assert result.exit_code == 2 and "stage" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def test_steps_without_a_line_are_counted_without_a_list_of_all(folder: Path) -> None:
    assert read_log(folder, 10**15)[1] == 10**15 - 5


@pytest.mark.parametrize(
    "removed", [("checkpoints",), ("checkpoints", "last", "best"), ("checkpoints", "last", "best", "log.jsonl")]
)
def test_resume_of_a_run_that_lost_its_checkpoints_is_refused(folder: Path, removed: tuple[str, ...]) -> None:
    for name in removed:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    before = {path.name: path.is_symlink() or path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    with pytest.raises(FastWeightsError, match="no whole checkpoint to resume from"):
        resume_in(folder)
    after = {path.name: path.is_symlink() or path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    assert after == before


def test_run_that_does_not_say_whether_it_had_checkpoints_is_refused(folder: Path) -> None:
    """As one of an earlier version."""
    for name in ("checkpoints", "last", "best", "log.jsonl"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    values = json.loads((folder / "run.json").read_text())
    del values["checkpointed"]
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="no whole checkpoint to resume from"):
        resume_in(folder)


def test_run_stopped_before_its_first_checkpoint_starts_again_and_says_so(
    config: TrainConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr("fastweights.training.checkpoint.write_checkpoint", crash)
        train_in(tmp_path / "run", config)
    assert lines_in(tmp_path / "run") == 1  # the validation of step 0
    assert "the run starts at step 0" in resume_with_output(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_linked_checkpoints_folder_is_refused_and_its_target_unchanged(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (folder / "checkpoints").rename(target)
    (target / "photos").mkdir()
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    leftover = target / temporary_name(Path("precious"), ended.pid)
    leftover.mkdir()
    (leftover / "photo").write_text("x")
    (folder / "checkpoints").symlink_to(target)
    before = sorted(target.rglob("*"))
    with pytest.raises(CheckpointError, match=r"checkpoints is a link"):
        resume_in(folder)
    assert sorted(target.rglob("*")) == before


def test_foreign_folders_and_links_among_checkpoints_stay(folder: Path, whole: Path, tmp_path: Path) -> None:
    """Also one that is named like a checkpoint, and a link to a folder with one's content."""
    checkpoints = folder / "checkpoints"
    (checkpoints / "photos").mkdir()
    (checkpoints / "0-0000001").mkdir()
    (checkpoints / "0-0000001" / "photo").write_text("x")
    (tmp_path / "linked").mkdir()
    shutil.copytree(checkpoints / "0-0000002", tmp_path / "linked", dirs_exist_ok=True)
    (checkpoints / "0-0000003").symlink_to(tmp_path / "linked")
    resume_in(folder)
    assert_same_run(folder, whole)
    assert {"photos", "0-0000001", "0-0000003"} < set(os.listdir(checkpoints))
    assert (checkpoints / "0-0000001" / "photo").is_file() and (tmp_path / "linked" / "model.safetensors").is_file()
    assert not (checkpoints / "0-0000002").exists()


def test_damaged_log_lines_cost_only_these_lines(folder: Path, whole: Path) -> None:
    log = folder / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:20] + b"\xff\x00" + lines[2][22:]
    log.write_bytes(b"".join(lines))
    assert f"{log} cannot be read at 1 of 4 steps" in resume_with_output(folder)
    expected = log_of(whole).splitlines(keepends=True)
    assert log_of(folder) == "".join(expected[:2] + expected[3:])


def test_changed_digit_in_the_log_costs_its_line(folder: Path, whole: Path) -> None:
    lines = log_of(folder).splitlines(keepends=True)
    before = json.loads(lines[2])["loss"]
    lines[2] = lines[2].replace(repr(before), repr(before + 1))
    (folder / "log.jsonl").write_text("".join(lines))
    assert "log.jsonl cannot be read at 1 of 4 steps" in resume_with_output(folder)
    expected = log_of(whole).splitlines(keepends=True)
    assert log_of(folder) == "".join(expected[:2] + expected[3:])


def test_log_without_checksums_is_still_read(folder: Path) -> None:
    lines = [json.loads(line) for line in log_of(folder).splitlines()]
    text = "".join(json.dumps({k: v for k, v in line.items() if k != "crc32"}) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(text)
    found, missing = read_log(folder, 4)
    assert missing == 0 and [line["step"] for line in found] == [line["step"] for line in lines if line["step"] <= 4]


@pytest.mark.parametrize("field", ["model", "data", "teacher", "validation"])
def test_path_of_a_wrong_type_in_run_json_is_one_line(folder: Path, field: str) -> None:
    values = json.loads((folder / "run.json").read_text()) | {field: 5}
    (folder / "run.json").write_text(json.dumps(values))
    result = run("train", "--resume", folder)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, (result.output, result.exception)
    assert f"run.json: {field} must be a string, found 5" in result.stderr


def test_edited_recipe_is_refused(folder: Path) -> None:
    values = json.loads((folder / "run.json").read_text())
    values["recipe"]["seed"] = 7
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(TrainingError, match=r"run\.json has another recipe"):
        resume_in(folder)


def test_text_that_differs_in_one_token_is_refused(files: Files, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    many = "\n<|endoftext|>\n".join(["the cat sees a dog and then it rains."] * 9000)
    text.write_text(many)
    config = make_train_config(files, make_recipe(FINETUNE, checkpoint_every=2), data=str(text))
    crash_after(tmp_path / "run", config, 3)
    text.write_text(many[:100_001] + ("!" if many[100_001] != "!" else "?") + many[100_002:])
    with pytest.raises(TrainingError, match="is not the text"):
        resume_in(tmp_path / "run")


def test_damaged_token_cache_is_made_again(files: Files, whole: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    config = make_train_config(files, make_recipe(FINETUNE, checkpoint_every=2, validate_every=100))
    crash_after(tmp_path / "run", config, 3)
    for path in (tmp_path / "cache").glob("data/*/tokens.bin"):
        content = bytearray(path.read_bytes())
        content[-8] ^= 1
        path.write_bytes(content)
    resume_in(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_second_process_on_a_run_is_refused_with_the_first_ones_number(
    config: TrainConfig, folder: Path, tmp_path: Path
) -> None:
    before = log_of(folder)
    with FileLock(folder / ".lock") as lock:
        lock.acquire()
        with pytest.raises(LockedError, match=f"{folder} is in use by process {os.getpid()}"):
            resume_in(folder)
        result = run("train", "--resume", folder)
        assert result.exit_code == 2 and f"in use by process {os.getpid()}" in result.stderr
    assert log_of(folder) == before
    (tmp_path / "new").mkdir()
    with FileLock(tmp_path / "new" / ".lock") as lock:
        lock.acquire()
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            train_in(tmp_path / "new", config)
    train_in(tmp_path / "new", config)


def test_all_processes_of_a_second_run_end_with_the_message(folder: Path, tmp_path: Path) -> None:
    """Only the main process takes the lock; the others must not wait for it."""
    with FileLock(folder / ".lock") as lock:
        lock.acquire()
        programs = two_programs(tmp_path / "outputs", "train", "--resume", folder)
        assert [program.wait() for program in programs] == [2, 2]
        assert all(f"in use by process {os.getpid()}" in program.output for program in programs)


def test_run_started_by_another_process_meanwhile_is_refused(
    config: TrainConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found an empty folder; the other one has ended when this one would write."""
    started = tmp_path / "run"

    def finish_first(*_: Any) -> str:
        shutil.copytree(whole, started, symlinks=True)
        return "model"

    with monkeypatch.context() as patched:
        patched.setattr("fastweights.training.trainer.check_run", finish_first)
        with pytest.raises(TrainingError, match="holds a run already"):
            train_in(started, config)
    assert_same_run(started, whole)


def test_run_killed_before_its_config_was_written_can_be_started(
    config: TrainConfig, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    (folder / temporary_name(Path("run.json"), process.pid)).write_text('{"mod')
    (folder / ".lock").write_text("1")
    train_in(folder, config)
    assert_same_run(folder, whole)
    assert not list(folder.glob(".*.tmp"))


def test_checkpoints_of_the_run_are_readable_by_others(whole: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for path in (whole / "checkpoints").glob("*/*"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path
