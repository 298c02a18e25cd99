"""Checkpoints of a training run.

A run's folder holds checkpoints/STAGE-STEP/ (a saved model, training.safetensors, progress.json), `best` and `last`
(links to two of them), run.json (the TrainConfig), log.jsonl (a line for each step) and, at the end, result.json.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fastweights.utils.errors import CheckpointError
from fastweights.utils.files import atomic_folder, write_json, write_tensors, write_text

CHECKPOINTS, LAST, BEST = "checkpoints", "last", "best"
TRAINING, PROGRESS, RUN, LOG, RESULT = "training.safetensors", "progress.json", "run.json", "log.jsonl", "result.json"
STUDENT = "student."  # prefix of unmerged weights in training.safetensors
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Progress:
    """How far a run has come. `stage_step` counts the steps finished in stage number `stage`, `step` all of them.

    data, validation_data: Number of tokens and checksum of the texts, to recognize them when the run is resumed.
    """

    stage: int = 0
    stage_step: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    validation: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    base: dict[str, Any] | None = None
    data: list[int] | None = None
    validation_data: list[int] | None = None
    stage_seconds: list[float] = field(default_factory=list)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore it, or start a new run") from error


def link(folder: Path, name: str, checkpoint: Path) -> None:
    """Point `best` or `last` at a checkpoint, in one step."""
    temporary = folder / f".{name}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path(CHECKPOINTS) / checkpoint.name)
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        shutil.rmtree(folder / name)  # a run that was copied may have folders in place of its links
    temporary.replace(folder / name)


def linked(folder: Path, name: str) -> Path | None:
    """The checkpoint that `best` or `last` points at; None where there is none yet."""
    checkpoint = folder / name
    return checkpoint.resolve() if (checkpoint / PROGRESS).is_file() else None


def read_progress(checkpoint: Path) -> Progress:
    return Progress(**read_json(checkpoint / PROGRESS))


def write_checkpoint(
    folder: Path,
    model: Any,
    weights: dict[str, Tensor],
    tokenizer: Any,
    training: dict[str, Tensor],
    progress: Progress,
) -> None:
    """Write a checkpoint and delete those that are no longer needed.

    Args:
        folder: The run's folder.
        model: The model to save, with LoRA merged.
        weights: Its weights, from `model_weights`.
        tokenizer: Saved beside the model.
        training: What to resume from, from `training_tensors`.
        progress: How far the run has come.

    Raises:
        CheckpointError: It cannot be written. What was there before is unchanged.
    """
    target = folder / CHECKPOINTS / f"{progress.stage}-{progress.step:07d}"
    try:
        if not (target / TRAINING).is_file():  # the best checkpoint is there without it
            with atomic_folder(target) as temporary:
                model.save_pretrained(temporary, state_dict=weights)
                _save_tokenizer(tokenizer, temporary)
                write_tensors(temporary / TRAINING, training)
                write_json(temporary / PROGRESS, asdict(progress))
        # best before last: a run that is killed in between writes this checkpoint again
        if progress.best is not None and progress.best["step"] == progress.step:
            link(folder, BEST, target)
        link(folder, LAST, target)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error.strerror or error}") from error
    remove_others(folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises a plain Exception where the disk is full
        raise OSError(str(error)) from error


def remove_others(folder: Path) -> None:
    """Delete the checkpoints that are neither the best nor the last, and what a killed run left half-written."""
    retained = {linked(folder, LAST), linked(folder, BEST)}
    if len(retained) == 2:
        (folder / BEST / TRAINING).unlink(missing_ok=True)  # a run resumes from `last` only
    for checkpoint in (folder / CHECKPOINTS).iterdir():
        if checkpoint.resolve() not in retained:
            shutil.rmtree(checkpoint, ignore_errors=True)


def model_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU. Every process must call this; of several, only the first gets them.

    Parameters that are tied in the model are one tensor here, so that `save_pretrained` saves them once.
    """
    weights: dict[str, Any] = get_model_state_dict(model, options=FULL_ON_CPU)
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.setdefault(tensor, name)
        if name in weights:
            weights[name] = weights[first]
    return weights


def training_tensors(student: nn.Module, optimizer: torch.optim.Optimizer, unmerged: bool) -> dict[str, Tensor]:
    """What a run needs to resume beside its model. Every process must call this; of several, only the first gets it.

    Args:
        student: The model that the optimizer updates.
        optimizer: Its state is named PARAMETER:QUANTITY, for example `lm_head.weight:exp_avg`.
        unmerged: Also return the student's own weights, named student.PARAMETER: with LoRA they are merged in the model
            that is saved.
    """
    states: Any = get_optimizer_state_dict(student, optimizer, options=FULL_ON_CPU).get("state", {})
    tensors: dict[str, Tensor] = {
        f"{name}:{quantity}": value for name, state in states.items() for quantity, value in state.items()
    }
    if unmerged:  # cloned, because a safetensors file has no tied tensors
        weights: dict[str, Any] = get_model_state_dict(student, options=FULL_ON_CPU)
        tensors |= {f"{STUDENT}{name}": tensor.clone() for name, tensor in weights.items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def restore_optimizer(checkpoint: Path, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer the state in a checkpoint, sharded as its parameters are."""
    current = get_optimizer_state_dict(student, optimizer)
    state: dict[str, Any] = {}
    for key, value in read_training(checkpoint).items():
        name, _, quantity = key.rpartition(":")
        if name in current["state"]:
            state.setdefault(name, {})[quantity] = value
    options = StateDictOptions(full_state_dict=True, strict=False)  # a parameter without gradients has no state
    set_optimizer_state_dict(student, optimizer, current | {"state": state}, options=options)


def restore_unmerged(checkpoint: Path, student: nn.Module) -> None:
    """Give a student with LoRA the weights that it had before they were merged into the saved model."""
    tensors = read_training(checkpoint)
    own = {name.removeprefix(STUDENT): tensor for name, tensor in tensors.items() if name.startswith(STUDENT)}
    student.load_state_dict(own)


def read_training(checkpoint: Path) -> dict[str, Tensor]:
    """What `training_tensors` returned when the checkpoint was written."""
    try:
        with safe_open(checkpoint / TRAINING, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint / TRAINING} cannot be read: {error}; restore it, or start a new run"
        ) from error


def read_log(folder: Path, until: int, write: bool) -> list[dict[str, Any]]:
    """The log's lines up to step `until`.

    With `write`, later lines and a line that a kill cut off are removed from the file: the run writes them again.
    """
    lines = []
    path = folder / LOG
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if line["step"] <= until and until:
            lines.append(line)
    if write and path.is_file():
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    return lines
