"""Checkpoints of a training run.

A run's folder holds checkpoints/STAGE-STEP/ (a saved model, training.safetensors, progress.json and, written last,
manifest.json with the checksums of the others), `best` and `last` (links to two of them), run.json (the TrainConfig,
and whether a checkpoint was reported), log.jsonl (see `log`), .lock (the process that trains) and, at the end,
result.json.

The last two checkpoints stay, so that a run can resume if the last one is damaged, and the best one of either. A run
with a validation text starts with a checkpoint of step 0, after the fit of the first stage: that model may stay the
best one. Nothing is read or deleted through a link.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
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

from fastweights.model_paths import BEST, LAST, PROGRESS, TRAINING, damage_of_model
from fastweights.model_paths import RUN as RUN
from fastweights.results import BaseModel, ValidationPoint, parse_fields, plain
from fastweights.training.recipe import Recipe
from fastweights.training.run_folder import CHECKPOINTS, is_unused
from fastweights.training.run_folder import LOCK as LOCK
from fastweights.training.run_folder import LOG as LOG
from fastweights.training.run_folder import RESULT as RESULT
from fastweights.utils.errors import CheckpointError, FastWeightsError, error_context
from fastweights.utils.files import (
    atomic_folder,
    atomic_link,
    is_temporary,
    remove_leftovers,
    write_json,
    write_tensors,
)
from fastweights.utils.manifest import MANIFEST, find_damage, write_manifest
from fastweights.utils.parsing import ParseError, read_json

# Version of the checkpoints that are written. Those of version 0 have no manifest. Before version 2, the validation
# before the first step was not always counted as the best one.
FORMAT = 2
RETAINED = 2
# Names of checkpoints, and what is added to those of damaged ones that a run will write again.
_NAME, DAMAGED = re.compile(r"\d{1,9}-\d{7,12}"), ".damaged"
# In run.json: whether the run has reported a checkpoint. Without one it starts again at step 0.
CHECKPOINTED = "checkpointed"
STUDENT = "student."  # prefix of unmerged weights in training.safetensors
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Progress:
    """How far a run has come. `stage_step` counts the steps finished in stage number `stage`, `step` all of them.

    data, validation_data: Number of tokens and checksum of the texts, to recognize them when the run is resumed.
    recipe: The recipe that the run was started with, for the same reason.
    format: Version of the checkpoint.
    """

    stage: int = 0
    stage_step: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    validation: list[ValidationPoint] = field(default_factory=list)
    best: ValidationPoint | None = None
    base: BaseModel | None = None
    data: list[Any] | None = None
    validation_data: list[Any] | None = None
    stage_seconds: list[float] = field(default_factory=list)
    recipe: dict[str, Any] | None = None
    format: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, body: Any, recipe: Recipe | None = None) -> Progress:
        """The progress that a JSON object describes.

        Args:
            body: The object, as `json.loads` returns it.
            recipe: That of the run, for a checkpoint of an earlier version, which does not have it.

        Raises:
            FastWeightsError: A field is not known, not of its type, or has a value that no run of the recipe reaches.
        """
        values, unknown = parse_fields(cls, body)
        progress = cls(**values)
        missing = [item.name for item in fields(cls) if item.name not in values] if progress.format else []
        if missing or unknown:
            raise CheckpointError(f"{', '.join(missing or unknown)} is {'missing' if missing else 'not known'}")
        if progress.recipe is not None:
            with error_context("recipe: ", plain=True):
                recipe = Recipe.from_dict(progress.recipe)
        progress._check_numbers()
        if recipe is not None:
            progress._check_reached(recipe)
        progress._check_validation()
        return progress

    def _check_numbers(self) -> None:
        for name in ("stage", "stage_step", "step", "tokens", "seconds"):
            _check(name, getattr(self, name), 0)
        for number, seconds in enumerate(self.stage_seconds):
            _check(f"stage_seconds[{number}]", seconds, 0)
        begun = self.stage + (self.stage_step > 0)
        _check("the number of stage_seconds", len(self.stage_seconds), begun, begun)
        _check("format", self.format, 0, FORMAT)

    def _check_reached(self, recipe: Recipe) -> None:
        """Whatever a run does, stage and stage_step determine the number of all steps and of their tokens."""
        steps = [recipe.steps_of(stage) for stage in recipe.stages]
        _check("stage", self.stage, 0, len(steps))
        _check("stage_step", self.stage_step, 0, [*steps, 0][self.stage])
        done = sum(steps[: self.stage]) + self.stage_step
        _check("step", self.step, done, done)
        _check("tokens", self.tokens, done * recipe.batch_tokens, done * recipe.batch_tokens)
        for number, point in enumerate(self.validation):
            tokens = point.step * recipe.batch_tokens
            _check(f"validation[{number}].tokens", point.tokens, tokens, tokens)

    def _check_validation(self) -> None:
        """The best validation is one of all, and each came after the one before."""
        first = 0
        for number, point in enumerate(self.validation):
            _check(f"validation[{number}].step", point.step, first, self.step)
            _check(f"validation[{number}].stage", point.stage, 0, self.stage)
            if not math.isfinite(point.loss):
                raise CheckpointError(f"validation[{number}].loss is {point.loss}")
            first = point.step + 1
        later = [point for point in self.validation if point.step > 0]
        if not (self._is_best_of(self.validation) or (self.format < 2 and self._is_best_of(later))):
            raise CheckpointError("best is not the validation with the lowest loss")

    def _is_best_of(self, points: list[ValidationPoint]) -> bool:
        if self.best is None:
            return not points
        return self.best in points and self.best.loss == min(point.loss for point in points)


def _check(place: str, value: float, least: float, most: float = math.inf) -> None:
    """Refuse a number that is out of range, infinite or NaN."""
    if not (least <= value <= most and math.isfinite(value)):
        expected = f"finite and at least {least:,}" if most == math.inf else f"between {least:,} and {most:,}"
        raise CheckpointError(f"{place} must be {f'{least:,}' if least == most else expected}, found {value:,}")


def read_run_file(path: Path) -> Any:
    """Read a JSON file that a run wrote, such as run.json or progress.json.

    Raises:
        CheckpointError: It cannot be read, or is not JSON.
    """
    try:
        return read_json(path)
    except (OSError, ParseError) as error:
        reason = f"it {error}" if isinstance(error, ParseError) else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}; restore it, or start a new run") from error


def read_progress(checkpoint: Path, recipe: Recipe | None = None) -> Progress:
    """How far the run had come when a checkpoint was written; `recipe` as in `Progress.from_dict`.

    Raises:
        CheckpointError: Its file cannot be read, or has values that no run reaches.
    """
    path = checkpoint / PROGRESS
    body = read_run_file(path)
    try:
        return Progress.from_dict(body, recipe)
    except FastWeightsError as error:
        raise CheckpointError(f"{path} is not valid: {error.message()}") from error


# Where checkpoints are


def checkpoint_folder(folder: Path, progress: Progress) -> Path:
    """The folder of the checkpoint that a run in `folder` writes when it has come this far."""
    return folder / CHECKPOINTS / f"{progress.stage}-{progress.step:07d}"


def linked(folder: Path, name: str) -> Path | None:
    """The checkpoint that `best` or `last` points at; None where there is none yet."""
    checkpoint = folder / name
    return checkpoint.resolve() if (checkpoint / PROGRESS).is_file() else None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the newest first, damaged or not.

    A run that was copied may have folders in place of its links: then `last` counts, too.

    Raises:
        CheckpointError: checkpoints/ is a link.
    """
    parent, last = _checked_parent(folder), folder / LAST
    found = {_order(path): path for path in (parent.iterdir() if parent.is_dir() else ()) if _is_checkpoint(path)}
    if _is_folder(last) and (last / PROGRESS).is_file():
        found.setdefault(_order_of_copy(last), last)
    return [found[key] for key in sorted(found, reverse=True)]


def _checked_parent(folder: Path) -> Path:
    """The folder of a run's checkpoints, which is no link."""
    parent = folder / CHECKPOINTS
    if parent.is_symlink():
        raise CheckpointError(f"{parent} is a link, which is not followed: put the folder itself in its place")
    return parent


def newest_whole(folder: Path, recipe: Recipe, announce: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that a run can resume from; None where no checkpoint was written yet.

    Args:
        folder: The run's folder.
        recipe: That of the run.
        announce: Gets a line for each damaged checkpoint that is passed over.

    Raises:
        CheckpointError: All checkpoints are damaged, or the run had some, and none is there.
    """
    remove_leftovers(_checked_parent(folder))
    if was_never_saved(folder):
        return None
    damages = []
    for checkpoint in checkpoints(folder):
        damage = damage_of(checkpoint, recipe)
        if damage is None:
            return checkpoint
        damages.append(f"the checkpoint {checkpoint} is damaged: {damage}")
        announce(damages[-1])
    reason = "; ".join(damages) or f"none is there, and {RUN} does not say that none was written"
    raise CheckpointError(
        f"the run in {folder} has no whole checkpoint to resume from ({reason}): restore {folder / CHECKPOINTS}, or "
        f"delete {folder} to start the run anew"
    )


def was_never_saved(folder: Path) -> bool:
    """Whether it is certain that a run has reported no checkpoint, so that nothing is lost if it starts at step 0.

    The run.json of an earlier version does not say so.
    """
    if not folder.exists() or is_unused(folder):
        return True
    linked_folder = (folder / CHECKPOINTS).is_symlink()
    if linked_folder or checkpoints(folder) or any(os.path.lexists(folder / name) for name in (LAST, BEST)):
        return False
    try:
        run = read_run_file(folder / RUN)
    except CheckpointError:
        return False
    return isinstance(run, dict) and run.get(CHECKPOINTED) is False


def damage_of(checkpoint: Path, recipe: Recipe | None = None) -> str | None:
    """Why a run cannot resume from a checkpoint; None where it can. Those of version 0 have no checksums to compare."""
    has_manifest = (checkpoint / MANIFEST).is_file()
    damage = find_damage(checkpoint) if has_manifest else None
    if damage is not None:
        return damage
    if not (checkpoint / TRAINING).is_file():
        return f"{TRAINING} is missing"
    try:
        version = read_progress(checkpoint, recipe).format
        if (version > 0) != has_manifest:
            return f"{PROGRESS} has format {version}, and {MANIFEST} is {'there' if has_manifest else 'missing'}"
        with open_training(checkpoint):
            return None
    except CheckpointError as error:
        return str(error).split("; ")[0]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_checkpoint(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and _is_folder(path)


def _order(checkpoint: Path) -> tuple[int, int]:
    """Step and stage in a checkpoint's name."""
    stage, step = checkpoint.name.split("-")
    return int(step), int(stage)


def _order_of_copy(last: Path) -> tuple[int, int]:
    try:
        progress = read_progress(last)
        return progress.step, progress.stage
    except CheckpointError:
        return -1, -1


# Writing


def write_run(folder: Path, config: dict[str, Any], checkpointed: bool) -> None:
    """Write run.json: the settings of the run, and whether it has reported a checkpoint."""
    write_json(folder / RUN, config | {CHECKPOINTED: checkpointed})


def read_run(folder: Path) -> dict[str, Any]:
    """The settings in run.json."""
    values = read_run_file(folder / RUN)
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder / RUN} must hold an object, found a {type(values).__name__}: restore it")
    return {name: value for name, value in values.items() if name != CHECKPOINTED}


def link(folder: Path, name: str, checkpoint: Path) -> None:
    """Point `best` or `last` at a checkpoint, in one step."""
    path = folder / name
    if _is_folder(path) and not (path / PROGRESS).is_file():
        raise CheckpointError(f"{path} is a folder and not a checkpoint: move it away")
    atomic_link(path, Path(CHECKPOINTS) / checkpoint.name)


def return_to(folder: Path, checkpoint: Path, progress: Progress, announce: Callable[[str], None]) -> None:
    """Make a run's folder as it was when the checkpoint that it resumes from was written.

    `best` and `last` point at what they did. Later checkpoints, which are damaged, get another name: the run writes
    them again, and would otherwise retain them in place of whole ones. `remove_others` deletes them once it has.

    Args:
        folder: The run's folder.
        checkpoint: The one that the run resumes from.
        progress: That of the checkpoint.
        announce: Gets a line for each checkpoint that is renamed, and one if the best checkpoint is damaged or gone.
            The run can go on without it.
    """
    if checkpoint.parent.name != CHECKPOINTS:  # a copy without links, which is complete
        return
    if linked(folder, LAST) != checkpoint.resolve():
        link(folder, LAST, checkpoint)
    for path in checkpoints(folder):
        if path.name != LAST and _order(path) > _order(checkpoint):
            aside = path.with_name(f"{path.name}{DAMAGED}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            announce(f"{path} is renamed to {aside.name} until the run has written it again")
    if progress.best is None:
        return
    best = _checkpoint_of_step(folder, progress.best.step)
    if best is not None and linked(folder, BEST) != best.resolve():
        link(folder, BEST, best)
    damage = "it is not there" if best is None else damage_of_model(best)
    if damage is not None:
        lost = f"the best checkpoint, that of step {progress.best.step}, is damaged: {damage}"
        announce(f"{lost}; the run goes on, and its best model is lost unless a later one is better")


def _checkpoint_of_step(folder: Path, step: int) -> Path | None:
    return next((path for path in checkpoints(folder) if path.name != LAST and _order(path)[0] == step), None)


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
    target = checkpoint_folder(folder, progress)
    progress.format = FORMAT
    try:
        others = checkpoints(folder)
        if target not in others or damage_of(target) is not None:  # the best checkpoint may be there for its model
            with atomic_folder(target) as temporary:
                model.save_pretrained(temporary, state_dict=weights)
                _save_tokenizer(tokenizer, temporary)
                write_tensors(temporary / TRAINING, training)
                write_json(temporary / PROGRESS, progress.to_dict())
                write_manifest(temporary)
        if progress.best is not None and progress.best.step == progress.step:
            link(folder, BEST, target)
        link(folder, LAST, target)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error.strerror or error}") from error
    remove_others(folder, target)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the tokenizers library raises a plain Exception where the disk is full
        raise OSError(str(error)) from error


def remove_others(folder: Path, newest: Path) -> None:
    """Delete the checkpoints that are neither among the last two nor the best of one of these.

    The best ones keep the model only.

    Args:
        folder: The run's folder.
        newest: The checkpoint that was just written.
    """
    found = [path for path in checkpoints(folder) if path.name != LAST]
    recent = [path for path in found if _order(path) <= _order(newest)][:RETAINED]  # a copied `last` may be newer
    best = [_best_at(folder, path) for path in recent]
    for path in found:
        if path in recent:
            continue
        if path in best:
            with suppress(OSError):
                (path / TRAINING).unlink(missing_ok=True)
        elif (path / MANIFEST).is_file() or (path / PROGRESS).is_file():
            shutil.rmtree(path, ignore_errors=True)
    for path in (folder / CHECKPOINTS).glob(f"*{DAMAGED}"):
        original = path.with_name(path.name.removesuffix(DAMAGED))
        if _is_folder(path) and _NAME.fullmatch(original.name) and _order(original) <= _order(newest):
            shutil.rmtree(path, ignore_errors=True)
    for path in (folder / CHECKPOINTS).glob(".*.tmp"):  # of a killed process, maybe on another machine
        if is_temporary(path.name) and _is_folder(path):
            shutil.rmtree(path, ignore_errors=True)


def _best_at(folder: Path, checkpoint: Path) -> Path | None:
    """The best checkpoint when `checkpoint` was written; None where there was none or that cannot be read."""
    try:
        best = read_progress(checkpoint).best
    except CheckpointError:
        return None
    return None if best is None else _checkpoint_of_step(folder, best.step)


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
    with open_training(checkpoint) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)


@contextmanager
def open_training(checkpoint: Path) -> Iterator[Any]:
    """Open the file of `training_tensors` in a checkpoint.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        with safe_open(checkpoint / TRAINING, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{checkpoint / TRAINING} cannot be read: {error}; restore it, or start a new run"
        ) from error
