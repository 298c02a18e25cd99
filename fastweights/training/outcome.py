"""The result of a training run, from its progress and its log."""

from __future__ import annotations

from typing import Any

from fastweights.results import Data, Divergence, LossPoint, StageSummary, TrainedModel, TrainingResult
from fastweights.training.checkpoint import Progress
from fastweights.training.config import TrainConfig
from fastweights.training.recipe import Recipe

# Points of the loss curve in the result, at most twice this.
CURVE_POINTS = 1_000


def training_result(
    name: str,
    config: TrainConfig,
    progress: Progress,
    log: list[dict[str, Any]],
    model: TrainedModel,
    data: Data,
    processes: int,
    diverged: Divergence | None,
) -> TrainingResult:
    """The result of a run that has ended.

    Args:
        name: Of the run.
        config: What was trained on what.
        progress: How far the run came.
        log: The lines of its log.
        model: The model that was trained.
        data: The text that it was trained on.
        processes: How many trained it.
        diverged: How it diverged. None: it did not.
    """
    recipe = config.recipe
    losses = [line for line in log if "loss" in line]
    curve = losses[:: max(1, len(losses) // CURVE_POINTS)]
    seconds: list[float | None] = [*progress.stage_seconds, *[None] * len(recipe.stages)]
    stages = [
        StageSummary(
            name=stage.loss,
            loss=stage.loss,
            steps=recipe.steps_of(stage),
            tokens=recipe.steps_of(stage) * recipe.batch_tokens,
            seconds=seconds[number],
        )
        for number, stage in enumerate(recipe.stages)
    ]
    return TrainingResult(
        name=name,
        seed=recipe.seed,
        tokens=progress.tokens,
        recipe=recipe.to_dict(),
        model=model,
        data=data,
        base=progress.base,
        processes=processes,
        stages=stages,
        curve=[LossPoint(**{name: line[name] for name in ("step", "tokens", "stage", "loss")}) for line in curve],
        validation=progress.validation,
        best=progress.best,
        last=progress.validation[-1] if progress.validation else None,
        diverged=diverged,
        seconds=progress.seconds,
        finished=diverged is None,
        warning=_warning(recipe, progress),
    )


def _warning(recipe: Recipe, progress: Progress) -> str | None:
    """How much worse the run ended than it began, and what to change; None where it did not."""
    points, best = progress.validation, progress.best
    if not points or points[0].step or best is None or points[-1].loss <= points[0].loss:
        return None
    start, end = (f"{point.perplexity:,.2f}" for point in (points[0], points[-1]))
    model = f"that of step {best.step:,}" if best.step else "the one before the first step"
    rates = ", ".join(
        f"{stage.loss}.{name}={getattr(stage, name):g}"
        for stage in recipe.stages
        for name in ("learning_rate", "body_learning_rate")
        if getattr(stage, name)
    )
    return (
        f"This run ended worse than it began: its validation perplexity was {start} before the first step and is "
        f"{end} at the end. The best model is {model}. Try lower learning rates than now "
        f"({rates}), or more tokens."
    )
