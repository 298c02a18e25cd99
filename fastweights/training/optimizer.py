"""How a stage's loss is brought down: which parameters learn how fast, and when a run has diverged."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastweights.modeling.families import family_of
from fastweights.modeling.layer import HeadNorm, converted_layers
from fastweights.training.recipe import Recipe, Stage
from fastweights.utils.errors import Argument, FastWeightsError, Stopped

# The loss is smoothed over this many steps before it is compared with its best.
WATCHED_STEPS = 20


class Diverged(Stopped):
    """A run whose loss diverged."""

    exit_code = 3


class DivergenceWatch:
    """Raises when the loss, smoothed, has been more than `margin` above its best for `patience` steps in a row."""

    def __init__(self, margin: float, patience: int) -> None:
        self.margin, self.patience = margin, patience
        self.recent: list[float] = []
        self.best = math.inf
        self.above = 0

    def update(self, loss: float) -> None:
        """Take the loss of a step into account.

        Raises:
            Diverged: The loss has been too high for too long.
        """
        self.recent = [*self.recent[-(WATCHED_STEPS - 1) :], loss]
        mean = sum(self.recent) / len(self.recent)
        self.best = min(self.best, mean)
        self.above = self.above + 1 if mean > self.best + self.margin else 0
        if self.above >= self.patience:
            raise Diverged(
                f"the loss has been more than {self.margin} above its best, {self.best:.3f}, for {self.above} steps: "
                f"it is at {mean:.3f}; try a lower learning rate or a longer warm-up"
            )


def learning_rate_share(step: int, steps: int, stage: Stage) -> float:
    """Share of the highest learning rate at a step (from 0): a linear rise, then half a cosine down to `final`."""
    rise = round(stage.warmup * steps)
    if step < rise:
        return (step + 1) / (rise + 1)
    gone = (step - rise) / max(1, steps - 1 - rise)
    return stage.final + (1 - stage.final) * 0.5 * (1 + math.cos(math.pi * gone))


def parameter_groups(student: Any, stage: Stage) -> list[tuple[list[nn.Parameter], float]]:
    """Parameters of the new attention, and of the body, with their highest learning rates."""
    attention = [p for layer in converted_layers(student).values() for p in layer.parameters()]
    known = set(attention)
    body = [p for p in student.parameters() if p not in known]
    body_rate = stage.learning_rate if stage.body_learning_rate is None else stage.body_learning_rate
    return [(attention, stage.learning_rate), (body, 0.0 if stage.loss == "transfer" else body_rate)]


def _disable_dropout(student: Any) -> None:
    """Set dropout to 0, in modules and in the floats that some families use for functional dropout."""
    for module in student.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def set_mode(student: Any, recipe: Recipe, stage: Stage) -> None:
    """Training mode, what is trained, and what is left out or recomputed."""
    student.train()
    if not recipe.dropout:
        _disable_dropout(student)
    if recipe.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    for parameters, peak in parameter_groups(student, stage):
        for parameter in parameters:
            parameter.requires_grad_(peak > 0 and (not recipe.lora or parameter.requires_grad))


def uncompile_blocks(model: Any) -> None:
    """Undo compile_blocks: hooks inside of a compiled block are not called."""
    for block in family_of(model).blocks(model):
        vars(block).pop("forward", None)


def compile_blocks(student: Any, teacher: Any, stage: Stage) -> None:
    """Block by block: the first one's code serves all. Their forward alone, so that hooks on blocks are still called; a
    teacher whose attention is captured (transfer) stays uncompiled."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    parts: list[Any] = list(converted_layers(student).values())
    if stage.loss != "transfer":
        models = [model for model in (student, teacher) if model is not None]
        parts = [block for model in models for block in family_of(model).blocks(model)]
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False)


def make_optimizer(student: Any, stage: Stage) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    norms = {p for module in student.modules() if isinstance(module, HeadNorm) for p in module.parameters()}
    groups = []
    for parameters, peak in parameter_groups(student, stage):
        trained = [p for p in parameters if p.requires_grad]
        for decay, chosen in (
            (stage.weight_decay, [p for p in trained if p.ndim > 1 and p not in norms]),
            (0.0, [p for p in trained if p.ndim <= 1 or p in norms]),
        ):
            if chosen:
                groups.append({"params": chosen, "peak": peak, "weight_decay": decay})
    if not groups:
        raise FastWeightsError(
            f"the stage {stage.loss} trains nothing: with ", Argument("lora"), " only projections, and their rate is 0"
        )
    fused = groups[0]["params"][0].is_cuda  # type: ignore[index]
    return torch.optim.AdamW(groups, lr=0.0, betas=(stage.beta1, stage.beta2), fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set the learning rate of each group of parameters to a share of its highest one."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak"]


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float) -> Tensor:
    """Scale the gradient down to a norm; returns the norm it had, a tensor [] that is not read from the device."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, largest)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
