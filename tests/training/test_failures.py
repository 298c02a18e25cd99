"""Runs that end badly: divergence, a full disk. What was saved before stays whole, and the message says so."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from helpers.cli import run, tokenizer
from helpers.tiny import pretrained
from helpers.training import (
    CHAIN,
    FINETUNE,
    STEP,
    CrashingDisplay,
    Files,
    assert_same_run,
    command,
    crash_after,
    log_of,
    make_recipe,
    make_train_config,
    resume_in,
    save_converted,
    train_in,
    training_files,
    weights_of,
)
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from fastweights.results import ValidationPoint
from fastweights.training import checkpoint
from fastweights.training.trainer import Diverged, TrainConfig, Trainer, TrainingError, resume, train
from fastweights.utils.progress import Display


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("failures")) as made:
        yield made


@pytest.fixture(scope="module")
def task(files: Files) -> TrainConfig:
    """Checkpoints after steps 3, 6, 9 and 12, and nowhere else."""
    return make_train_config(files, make_recipe(validate_every=100))


@pytest.fixture(scope="module")
def chain(files: Files, task: TrainConfig) -> Path:
    """The run that nothing happened to."""
    train_in(files.folder / "chain", task)
    return files.folder / "chain"


def diverged(folder: Path, task: Any) -> dict[str, Any]:
    with pytest.raises(Diverged, match=r"recorded in .*result\.json"):
        train_in(folder, task)
    result = json.loads((folder / "result.json").read_text())
    assert result["finished"] is False and set(result["diverged"]) == {"step", "stage", "reason"}
    return result


def test_divergence_leaves_a_finite_checkpoint_and_a_result(files: Files, tmp_path: Path) -> None:
    """The checkpoint from before is still there, and finite."""
    wild = dict(loss="finetune", tokens=50 * STEP, learning_rate=1e6, warmup=0)
    result = diverged(tmp_path / "run", make_train_config(files, make_recipe((CHAIN[0], wild))))
    assert result["diverged"]["stage"] == 1 and result["diverged"]["step"] >= 6
    assert "loss" in result["diverged"]["reason"]
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(tmp_path / "run" / "last").values())
    assert int((tmp_path / "run" / "best").readlink().name.split("-")[1]) == result["best"]["step"] <= 6


def test_diverged_run_exits_with_code_3(files: Files, tmp_path: Path) -> None:
    wild = make_recipe((dict(loss="finetune", tokens=9 * STEP, learning_rate=1e6, warmup=0),))
    result = run(*command(files, tmp_path / "run", wild))
    assert result.exit_code == 3 and "result.json" in result.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["diverged"]


def test_nan_weights_are_reported_as_divergence_at_step_1(files: Files, tmp_path: Path) -> None:
    student = save_converted(tmp_path / "student", files.base)
    model = AutoModelForCausalLM.from_pretrained(student)
    model.transformer.ln_f.weight.data[3] = float("nan")
    model.save_pretrained(student)
    result = diverged(tmp_path / "run", make_train_config(files, make_recipe(CHAIN[1:]), model=str(student)))
    assert result["diverged"] == {
        "step": 0,
        "stage": 0,
        "reason": "step 1: the loss is nan, the norm of its gradient nan",
    }
    assert result["validation"] == [] and result["best"] is None


def test_infinite_validation_loss_is_reported_as_divergence(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastweights.training.trainer.Trainer.validation_loss", lambda *_: float("inf"))
    result = diverged(tmp_path / "run", make_train_config(files, make_recipe(FINETUNE)))
    assert result["diverged"]["reason"] == "step 4: the validation loss is inf"
    assert (tmp_path / "run" / "last").readlink().name == "0-0000003"


def test_loss_far_above_its_best_ends_the_run(files: Files, tmp_path: Path) -> None:
    """Steps as long as the learning rate soon leave the loss far above where it started."""
    wild = dict(loss="finetune", tokens=50 * STEP, learning_rate=0.3, warmup=0)
    task = make_train_config(files, make_recipe((wild,), diverged_above=0.5, diverged_for=5))
    result = diverged(tmp_path / "run", task)
    assert "for 5 steps" in result["diverged"]["reason"] and result["diverged"]["step"] < 20
    with pytest.raises(Diverged, match="for 5 steps"):
        resume_in(tmp_path / "run")


def no_room(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room_for_half(write: Callable[..., Any]) -> Callable[..., Any]:
    """A file that was started, and an error as the safetensors library words it."""

    def fail(tensors: Any, path: Any, *_: Any, **__: Any) -> None:
        write(tensors, path)
        os.truncate(path, os.path.getsize(path) // 2)
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    return fail


def no_room_for_tokenizer(*_: Any, **__: Any) -> None:
    raise Exception("No space left on device (os error 28)")


FULL: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "model": lambda patch: patch.setattr(
        transformers.modeling_utils, "safe_save_file", no_room_for_half(transformers.modeling_utils.safe_save_file)
    ),
    "tokenizer": lambda patch: patch.setattr(
        transformers.PreTrainedTokenizerFast, "save_pretrained", no_room_for_tokenizer
    ),
    "optimizer": lambda patch: patch.setattr(
        safetensors.torch, "save_file", no_room_for_half(safetensors.torch.save_file)
    ),
    "progress": lambda patch: patch.setattr(checkpoint, "write_json", no_room),
}


@pytest.mark.parametrize("what", FULL)
def test_full_disk_loses_one_checkpoint_and_the_run_resumes_to_the_bit(
    task: TrainConfig, chain: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is that of step 3; there is no room for the one of step 6, a stage's last."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patched, pytest.raises(TrainingError) as failure:
        train(task, folder, display=CrashingDisplay(4, then=lambda: FULL[what](patched)))
    message = str(failure.value)
    assert message.startswith(f"cannot write the checkpoint {folder / 'checkpoints' / '1-0000006'}: ")
    assert "No space left on device" in message
    assert message.endswith(f"the checkpoint of step 3 is complete: free disk space, then resume({str(folder)!r})")
    assert sorted(os.listdir(folder / "checkpoints")) == ["0-0000000", "0-0000003"]
    assert (folder / "last").readlink().name == "0-0000003"
    assert AutoModelForCausalLM.from_pretrained(folder / "last")
    resume_in(folder)
    assert_same_run(folder, chain)


@pytest.mark.parametrize("after", [1, 4])
def test_full_disk_while_logging_resumes_to_the_bit(task: TrainConfig, chain: Path, tmp_path: Path, after: int) -> None:
    """/dev/full has no room for anything."""
    folder = tmp_path / "run"
    log, moved = folder / "log.jsonl", folder / "moved"

    def fill() -> None:
        log.rename(moved)
        log.symlink_to("/dev/full")

    with pytest.raises(TrainingError) as failure:
        train(task, folder, display=CrashingDisplay(after, then=fill))
    whole = f"the checkpoint of step {3 if after == 4 else 0} is complete"
    assert re.match(rf"{re.escape(str(log))}: No space left on device; {whole}: free disk space", str(failure.value))
    assert f"resume({str(folder)!r})" in str(failure.value)
    moved.replace(log)
    resume_in(folder)
    assert_same_run(folder, chain)


def test_full_disk_while_writing_the_result_resumes_to_the_bit(
    task: TrainConfig, chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patched, pytest.raises(TrainingError, match=r"checkpoint of step 12 is complete"):
        patched.setattr("fastweights.results.write_result", no_room)
        train_in(folder, task)
    assert not (folder / "result.json").exists()
    resume_in(folder)
    assert_same_run(folder, chain)
    assert json.loads((folder / "result.json").read_text())["finished"]


def test_full_disk_at_start_or_resume_is_reported(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    task = make_train_config(files, make_recipe(FINETUNE))
    with monkeypatch.context() as patched, pytest.raises(TrainingError, match="choose another output folder"):
        patched.setattr(Path, "replace", no_room)
        train_in(folder, task)
    assert os.listdir(folder) == [".lock"]
    crash_after(folder, task, 4)
    with monkeypatch.context() as patched, pytest.raises(TrainingError, match="step 3 is complete: free disk space"):
        patched.setattr(Path, "replace", no_room)
        resume_in(folder)
    resume_in(folder)


def test_resume_with_another_text_is_refused(files: Files, task: TrainConfig, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(files.data.read_text())
    crash_after(tmp_path / "run", make_train_config(files, make_recipe(), data=str(text)), 5)
    text.write_text(files.data.read_text().replace("cat", "cow"))
    with pytest.raises(TrainingError, match=r"data .*text\.txt is not the text that the run in .*run was started with"):
        resume_in(tmp_path / "run")
    text.write_text(files.validation.read_text())
    crash_after(tmp_path / "again", make_train_config(files, make_recipe(), validation=str(text)), 5)
    text.write_text(files.validation.read_text().replace("cat", "cow"))
    with pytest.raises(TrainingError, match=r"validation .*text\.txt is not the text that the run in .*again was"):
        resume_in(tmp_path / "again")


def test_best_checkpoint_that_becomes_the_last_gets_its_optimizer_state(tmp_path: Path) -> None:
    """Killed between its links and removed because no run resumes from it: it is written once more."""
    model, run_folder = pretrained("gpt2"), tmp_path / "run"
    weights, training = checkpoint.model_weights(model), {"moment": torch.ones(3)}
    points = [ValidationPoint(step=step, tokens=step, stage=0, loss=1.0, perplexity=2.7) for step in (6, 5, 6)]
    saved = [checkpoint.Progress(step=point.step, validation=[point], best=point) for point in points]
    for progress in saved[:2]:
        checkpoint.write_checkpoint(run_folder, model, weights, tokenizer(), training, progress)
    target = run_folder / "checkpoints" / "0-0000006"
    shutil.copytree(run_folder / "checkpoints" / "0-0000005", target)
    (target / checkpoint.TRAINING).unlink()
    checkpoint.write_checkpoint(run_folder, model, weights, tokenizer(), training, saved[2])
    assert (run_folder / "last").resolve() == target
    assert checkpoint.read_training(run_folder / "last").keys() == training.keys()


def test_lora_without_a_learning_rate_is_refused(files: Files, tmp_path: Path) -> None:
    stages = (dict(loss="distill", tokens=STEP, learning_rate=0.0, body_learning_rate=1e-3),)
    task = make_train_config(files, make_recipe(stages, lora=2))
    with pytest.raises(ValueError, match="the stage distill trains nothing: with lora"):
        train_in(tmp_path / "run", task)


def test_resume_takes_another_memory_share(files: Files, tmp_path: Path) -> None:
    task, shares = make_train_config(files, make_recipe(FINETUNE), memory_share=1.0), []
    crash_after(tmp_path / "run", task, 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "run", lambda trainer: shares.append(trainer.config.memory_share))
        for share in (None, 0.25):
            resume(tmp_path / "run", display=Display(enabled=False), memory_share=share)
    assert shares == [1.0, 0.25]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(memory_share=0), "memory_share must be above 0 and at most 1, found 0"),
        (dict(limit=0), "limit must be at least 1, found 0"),
        (dict(limit="many"), "limit must be a whole number or empty, found 'many'"),
        (dict(shard="yes"), "shard must be true or false, found 'yes'"),
    ],
)
def test_invalid_train_config_names_field_and_value(files: Files, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(TrainingError, match=named):
        make_train_config(files, **settings)


def test_losses_get_the_memory_share(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(trainee: Any, *_: Any) -> Any:
        assert trainee.text_config.memory_share == trainee.stage_config.memory_share == 0.25
        raise torch.OutOfMemoryError("seen")

    monkeypatch.setattr("fastweights.training.losses.StageLoss.forward", refuse)
    task = make_train_config(files, make_recipe(FINETUNE), validation=None, memory_share=0.25)
    with pytest.raises(TrainingError, match="seen"):
        train_in(tmp_path / "run", task)


def test_run_copied_without_links_resumes(files: Files, task: TrainConfig, chain: Path, tmp_path: Path) -> None:
    crash_after(tmp_path / "run", task, 8)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not (tmp_path / "copy" / "last").is_symlink()
    resume_in(tmp_path / "copy")
    assert log_of(tmp_path / "copy") == log_of(chain)
    assert (tmp_path / "copy" / "last").readlink() == (chain / "last").readlink()


def test_out_of_memory_names_the_argument_to_change(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("fastweights.training.losses.StageLoss.forward", refuse)
    with pytest.raises(TrainingError, match=r"out of memory: take fewer sequences at once \(micro_batch\)"):
        train_in(tmp_path / "run", make_train_config(files, make_recipe(FINETUNE), validation=None))
