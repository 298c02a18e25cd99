"""What can be known to fail is refused before the first step."""

from __future__ import annotations

import importlib.util
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from fastweights.modeling.adaptive_input import AdaptiveSoftmax
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.modes import no_window_reason
from fastweights.modeling.positions import check_length
from fastweights.training.config import TrainConfig
from fastweights.training.optimizer import parameter_groups
from fastweights.training.recipe import Recipe, Stage
from fastweights.training.run_folder import TrainingError
from fastweights.utils.errors import Argument

TRACKER_PACKAGES = {"tensorboard": "'fastweights[tensorboard]'", "all": "'fastweights[tensorboard]'"}


def check_run(config: TrainConfig, student: Any, processes: int, sharded: bool) -> None:
    """Refuse a run that the model, the recipe or the number of processes rules out.

    Raises:
        TrainingError, PositionError: It names the argument to change.
    """
    check_positions(config, student)
    for stage in config.recipe.stages:
        _check_stage(config.model, config.recipe, stage, student)
        _check_processes(config.recipe, stage, processes)
    if config.recipe.lora:
        _check_lora(config.model, student, sharded)


def check_positions(config: TrainConfig, model: Any) -> None:
    """Refuse a run with sequences that are longer than the model's position table."""
    recipe = config.recipe
    lengths = [recipe.length_of(stage) for stage in recipe.stages]
    longest = max(lengths if config.validation is None else [*lengths, recipe.length])
    check_length(model, longest, Argument("length"))


def _check_stage(model: str, recipe: Recipe, stage: Stage, student: Any) -> None:
    if stage.teaches_layers and not isinstance(student, FastWeightsMixin):
        raise TrainingError(f"{model} is not converted: transfer and fit teach fast-weight layers only")
    if stage.top_k > student.config.vocab_size:
        most = student.config.vocab_size
        raise TrainingError(f"{stage.loss}.top_k={stage.top_k}: {model} has {most} tokens only")
    has_adaptive_softmax = isinstance(student.get_output_embeddings(), AdaptiveSoftmax)
    if has_adaptive_softmax and recipe.cuda_graphs:
        why = f"{model} has an adaptive softmax, whose tails have as many tokens as the text says"
        raise TrainingError(Argument("cuda_graphs"), f" cannot be used: {why}; leave it out")
    if stage.loss == "distill" and has_adaptive_softmax:
        for name, only in (("temperature", 1), ("top_k", 0)):
            if getattr(stage, name) != only:
                what = f"{stage.loss}.{name}={getattr(stage, name):g}: {model} has an adaptive softmax"
                raise TrainingError(f"{what}, which is distilled over all words at temperature 1: leave {name} out")
    reason = no_window_reason(student) if stage.window_dropout else None
    if reason is not None:
        what = f"{stage.loss}.window_dropout={stage.window_dropout:g}: {model} {reason}"
        raise TrainingError(f"{what}: convert it with a window and another rule than local, or leave the setting out")
    if not any(parameters and rate for parameters, rate in parameter_groups(student, stage)):
        raise TrainingError(f"the stage {stage.loss} trains nothing: its learning rates are 0")


def _check_processes(recipe: Recipe, stage: Stage, processes: int) -> None:
    rows = recipe.rows_of(stage)
    if rows % processes:
        found = f" {recipe.batch_tokens} makes {rows} sequences of {recipe.length_of(stage)} tokens"
        raise TrainingError(Argument("batch_tokens"), f"{found}, which {processes} processes cannot share equally")


def _check_lora(model: str, student: Any, sharded: bool) -> None:
    lora = Argument("lora")
    if not isinstance(student, FastWeightsMixin):
        raise TrainingError(f"{model} is not converted: ", lora, " is for the projections of new layers")
    if importlib.util.find_spec("peft") is None:
        raise TrainingError(lora, " needs peft, which is not installed: pip install 'fastweights[peft]'")
    if sharded:
        raise TrainingError(
            lora, " trains few parameters, which are not sharded: leave out ", lora, " or ", Argument("shard")
        )


def check_tracker(name: str) -> None:
    """Refuse a tracker that is unknown or not installed. accelerate itself would leave it out without an error."""
    trackers, available = LoggerType.list(), [str(tracker) for tracker in get_available_trackers()]
    known = sorted({*trackers, *LOGGER_TYPE_TO_CLASS})  # the second ones may be registered by the user
    if name not in known:
        raise TrainingError(Argument("report_to"), f" {name} is not known; choose one of {', '.join(known)}")
    if name in trackers and name not in available and not (name == "all" and available):
        package = TRACKER_PACKAGES.get(name, name)
        raise TrainingError(Argument("report_to"), f" {name}: its package is not installed: pip install {package}")
