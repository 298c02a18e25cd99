"""Checkpoints of a training run: written to a temporary folder and renamed, so that what is there is whole.

A run's folder:  checkpoints/STEP/ (a saved model, training.safetensors, progress.json), best and last (links to
two of them), run.json (what was asked for), log.jsonl (a line for each step), result.json (at the end).
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
from torch.distributed.tensor import DTensor, distribute_tensor

from fastweights.utils.errors import CheckpointError
from fastweights.utils.files import atomic_folder, write_json, write_tensors, write_text

CHECKPOINTS, LAST, BEST = "checkpoints", "last", "best"
TRAINING, PROGRESS, RUN, LOG, RESULT = "training.safetensors", "progress.json", "run.json", "log.jsonl", "result.json"


@dataclass
class Progress:
    """How far a run has come. `stage_step` counts the steps finished in stage number `stage`, `step` all of them."""

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
        raise CheckpointError(f"{path} cannot be read: {error}; put it back, or begin a new run") from error


def link(folder: Path, name: str, checkpoint: Path) -> None:
    """Point `best` or `last` at a checkpoint, in one step."""
    temporary = folder / f".{name}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(Path(CHECKPOINTS) / checkpoint.name)
    if (folder / name).is_dir() and not (folder / name).is_symlink():
        shutil.rmtree(folder / name)  # a run that was copied may have folders for its links
    temporary.replace(folder / name)


def linked(folder: Path, name: str) -> Path | None:
    """The checkpoint that `best` or `last` stands for; None where there is none yet."""
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
    """Save everything that a run needs to go on, and let go of what it no longer needs. On any failure what was there
    before is untouched."""
    target = folder / CHECKPOINTS / f"{progress.stage}-{progress.step:07d}"
    try:
        if not (target / TRAINING).is_file():  # the best checkpoint is there without it
            with atomic_folder(target) as temporary:
                model.save_pretrained(temporary, state_dict=weights)
                _save_tokenizer(tokenizer, temporary)
                write_tensors(temporary / TRAINING, training)
                write_json(temporary / PROGRESS, asdict(progress))
        # best before last: a run killed in between comes here again
        if progress.best is not None and progress.best["step"] == progress.step:
            link(folder, BEST, target)
        link(folder, LAST, target)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error.strerror or error}") from error
    remove_others(folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library has no kind of its own for a full disk
        raise OSError(str(error)) from error


def remove_others(folder: Path) -> None:
    """Delete the checkpoints that are neither the best nor the last, and what a killed run left half-written."""
    kept = {linked(folder, LAST), linked(folder, BEST)}
    if len(kept) == 2:
        (folder / BEST / TRAINING).unlink(missing_ok=True)  # nothing goes on from there
    for checkpoint in (folder / CHECKPOINTS).iterdir():
        if checkpoint.resolve() not in kept:
            shutil.rmtree(checkpoint, ignore_errors=True)


def whole(tensor: Tensor) -> Tensor:
    """A tensor on the CPU; of a sharded one, all of it (every process must ask)."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().clone().contiguous()


def model_weights(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are one in the model (tied embeddings) are one here: save_pretrained then saves them once."""
    weights: dict[str, Tensor] = {}
    copies: dict[Tensor, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor not in copies:
            copies[tensor] = whole(tensor)
        weights[name] = copies[tensor]
    return weights


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """The optimizer's state, by parameter name and quantity."""
    return {
        f"{names[parameter]}:{quantity}": whole(value)
        for group in optimizer.param_groups
        for parameter in group["params"]
        for quantity, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
    parameters = {name: parameter for parameter, name in names.items()}
    for key, value in read_training(checkpoint).items():
        name, _, quantity = key.rpartition(":")
        if name in parameters:
            optimizer.state[parameters[name]][quantity] = _like(parameters[name], value)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """A quantity on its parameter's device and in its sharding; Adam's step count stays on the CPU unless fused."""
    if value.ndim == 0:
        return value.to(parameter.device) if parameter.is_cuda else value
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)


def read_training(checkpoint: Path) -> dict[str, Tensor]:
    try:
        with safe_open(checkpoint / TRAINING, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint / TRAINING} cannot be read: {error}; put it back, or begin a new run"
        ) from error


def read_log(folder: Path, until: int, write: bool) -> list[dict[str, Any]]:
    """The log's lines up to a step; later ones, and a line cut off by a kill, are removed (`write`): they will be
    written again."""
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
