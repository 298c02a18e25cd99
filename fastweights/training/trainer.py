"""Training: one loop. What is minimised is a stage's loss (losses.py), how is its recipe (recipe.py).

A run is a function of its recipe, model and data: the batches and the random numbers of a step depend on seed and step
alone, so a run that was killed and resumed is the run that was not. Every stage begins from a checkpoint, as a resumed
run does.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from fastweights.conversion import lora_modules
from fastweights.modeling.families import family_of
from fastweights.training import checkpoint as saved
from fastweights.training.losses import StageLoss, converted_layers
from fastweights.training.optimizer import (
    Diverged,
    DivergenceWatch,
    clip_gradients,
    compile_blocks,
    learning_rate_share,
    leave_uncompiled,
    make_optimizer,
    set_learning_rate,
    set_mode,
)
from fastweights.training.output_fit import fit_outputs
from fastweights.training.recipe import Stage
from fastweights.training.run import Interrupted, Run, TrainConfig, TrainingError, perplexity, resume_command, split
from fastweights.utils.errors import CheckpointError
from fastweights.utils.progress import Display
from fastweights.utils.provenance import write_result

__all__ = ["Diverged", "Interrupted", "TrainConfig", "TrainingError", "resume", "train"]

# Tokens that output projections are fitted on before transfer.
FIT_TOKENS = 16_384
CURVE_POINTS = 1_000


def train(task: TrainConfig, folder: str | os.PathLike, *, display: Display | None = None) -> dict[str, Any]:
    """Train a model into a new folder; returns the result that is also written there."""
    folder = Path(folder)
    if (folder / saved.RUN).is_file():
        raise TrainingError(f"{folder} holds a run already: {resume_command(folder)}, or choose another output folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainingError(f"{folder} exists and is not an empty folder: choose another output folder")
    sources: dict[str, Any] = {n: _absolute(getattr(task, n)) for n in ("model", "data", "teacher", "validation")}
    task = replace(task, **sources)
    return _go(Run(task, folder, display or Display()))


def _absolute(source: str | None) -> str | None:
    """A run may be resumed from another folder."""
    return str(Path(source).absolute()) if source is not None and Path(source).exists() else source


def resume(
    folder: str | os.PathLike, *, display: Display | None = None, memory_share: float | None = None
) -> dict[str, Any]:
    """Go on with a run from its last checkpoint, with another share of the GPU's memory if one is given."""
    folder = Path(folder)
    if not (folder / saved.RUN).is_file():
        raise TrainingError(f"--resume {folder}: there is no run to go on with (no {saved.RUN} there)")
    try:
        task = TrainConfig.from_dict(saved.read_json(folder / saved.RUN))
    except (KeyError, TypeError) as error:
        raise TrainingError(f"{folder / saved.RUN} is not of this version of fastweights: {error}") from error
    if memory_share is not None:
        task = replace(task, memory_share=memory_share)
    return _go(Run(task, folder, display or Display()))


def _go(run: Run) -> dict[str, Any]:
    run.begin()
    diverged = None
    try:
        with run.signals(), run.display:
            _run_stages(run)
    except Diverged as error:
        diverged = {"step": run.progress.step, "stage": run.progress.stage, "reason": str(error)}
    except torch.OutOfMemoryError as error:
        less = "take fewer sequences at once (--micro-batch), or --gradient-checkpointing"
        raise TrainingError(f"out of memory: {less}, in a new run; {str(error).splitlines()[0]}") from error
    finally:
        run.end()
    result = _result(run, diverged)
    if run.main:
        with run.writing(run.folder / saved.RESULT):
            write_result(run.folder / saved.RESULT, result)
    if diverged is not None:
        raise Diverged(f"{diverged['reason']}; recorded in {run.folder / saved.RESULT}")
    return result


def _run_stages(run: Run) -> None:
    run.measure_base()
    while run.progress.stage < len(run.recipe.stages):
        _StageRun(run, run.recipe.stages[run.progress.stage]).go()
        run.accelerator.free_memory()  # it holds on to what it prepared
        run.student = run.load_student()


class _StageRun:
    """One stage of a run: the student made ready for its loss, and the loop."""

    def __init__(self, run: Run, stage: Stage) -> None:
        self.run, self.stage, self.recipe, self.progress = run, stage, run.recipe, run.progress
        self.batches = run.batches[self.progress.stage]
        self.stop = 0
        self.student = run.student.to(run.device)
        if run.teacher is not None:  # it may come from an earlier stage
            leave_uncompiled(run.teacher)
        if self.progress.stage_step == 0 and stage.fit != "none":
            self._fit()
        self.lora = self._add_lora() if self.recipe.lora else None
        set_mode(self.student, self.recipe, stage)
        compiled = self.recipe.compile and run.device.type == "cuda"
        if compiled:
            compile_blocks(self.student, run.teacher, stage)
        recompute, share = self.recipe.gradient_checkpointing, run.task.memory_share
        trainee = StageLoss(self.student, run.teacher, stage, recompute, compiled, share)
        self.module = self._distribute(trainee.to(run.device))
        self.names = {parameter: name for name, parameter in self.student.named_parameters()}
        self.optimizer = make_optimizer(self.student, stage)
        if self.progress.stage_step:
            saved.restore_optimizer(run.folder / saved.LAST, self.optimizer, self.names)
        self.watch = DivergenceWatch(self.recipe.diverged_above, self.recipe.diverged_for)
        for line in run.log:
            if line["stage"] == self.progress.stage and "loss" in line:
                self.watch.see(line["loss"])

    def _fit(self) -> None:
        """On the first batches, whole in every process: all must come to the same."""
        rows = max(1, FIT_TOKENS // self.recipe.length_of(self.stage))
        count = max(1, FIT_TOKENS // self.recipe.batch_tokens)
        firsts = ({name: x[:rows] for name, x in self.batches.batch(step).items()} for step in range(count))
        parts = [part for first in firsts for part in split(first, self.run.rows_at_once(self.stage))]
        with self.run.autocast():
            shown = self.run.display.track(parts, "fitting the output projections")
            fit_outputs(self.student, self.run.teacher, map(self.run.on_device, shown), self.stage.fit)

    def _add_lora(self) -> Any:
        """Low-rank updates, put into the student itself; what comes back can merge them."""
        from peft import LoraConfig, get_peft_model

        rank = self.recipe.lora
        torch.manual_seed(self.recipe.seed + self.progress.stage)
        lora = get_peft_model(self.student, LoraConfig(r=rank, lora_alpha=2 * rank, **lora_modules(self.student)))
        if self.progress.stage_step:
            found = saved.read_training(self.run.folder / saved.LAST)
            own = {name: value for name, value in found.items() if name.startswith("student.")}
            self.student.load_state_dict({name.removeprefix("student."): value for name, value in own.items()})
        return lora

    def _distribute(self, trainee: StageLoss) -> nn.Module:
        """DDP through accelerate. Sharded (FSDP2), every fast-weight layer is a unit: transfer calls it alone."""
        if not self.run.sharded:
            return self.run.accelerator.prepare(trainee) if self.run.world > 1 else trainee
        # a layer's output may be a view; no family adds to it in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        for layer in converted_layers(trainee).values():
            fully_shard(layer)
        for block in family_of(self.student).blocks(self.student):
            fully_shard(block)
        fully_shard(trainee)
        return trainee

    def go(self) -> None:
        run, recipe, progress = self.run, self.recipe, self.progress
        steps = recipe.steps_of(self.stage)
        spent = progress.stage_seconds[progress.stage] if progress.stage < len(progress.stage_seconds) else 0.0
        began = time.perf_counter() - spent
        if progress.step == 0 and not progress.validation:
            self._validate()
        run.display.stage(f"{progress.stage + 1}/{len(recipe.stages)} {self.stage.loss}", steps, progress.stage_step)
        for step in range(progress.stage_step, steps):
            self._step(step, learning_rate_share(step, steps, self.stage))
            ends = step + 1 == steps
            improved = (ends or progress.stage_step % recipe.validate_every == 0) and self._validate()
            progress.seconds = time.perf_counter() - run.began
            progress.stage_seconds[progress.stage :] = [time.perf_counter() - began]
            if ends:
                progress.stage, progress.stage_step = progress.stage + 1, 0
            if ends or improved or progress.stage_step % recipe.checkpoint_every == 0 or self.stop:
                self._checkpoint()
            if self.stop:
                raise Interrupted(run.folder, self.stop)

    def _step(self, step: int, share: float) -> None:
        """One update, recorded."""
        run, progress = self.run, self.progress
        torch.manual_seed((self.recipe.seed * 1_000_003 + progress.step) * run.world + run.rank)
        loss = self._gradients(step)
        norm = clip_gradients(self.optimizer, self.stage.clip)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"step {progress.step + 1}: the loss is {loss}, the norm of its gradient {norm}")
        set_learning_rate(self.optimizer, share)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.stage_step, progress.step = step + 1, progress.step + 1
        progress.tokens += self.recipe.batch_tokens
        line = {"step": progress.step, "stage": progress.stage, "tokens": progress.tokens, "loss": loss}
        run.write_line(line | {"gradient_norm": norm, "learning_rate": share * self.stage.learning_rate})
        run.display.step(loss, self.recipe.batch_tokens)
        self.watch.see(loss)

    def _gradients(self, step: int) -> float:
        """Back-propagate this process's rows; returns the loss of the whole batch."""
        run, batches = self.run, self.batches
        count = batches.rows if self.stage.loss == "transfer" else batches.targets(step)
        parts = split(batches.batch(step, run.rank, run.world), run.rows_at_once(self.stage))
        total = torch.zeros((), device=run.device)
        for number, part in enumerate(parts):
            with self._synchronized(number == len(parts) - 1):
                with run.autocast():
                    loss = self.module(run.on_device(part)) / count
                # DDP and FSDP take the mean over processes; the loss is a sum over them
                (loss * run.world).backward()
            total += loss.detach()
        shared = torch.stack([total, torch.tensor(float(run.stop_signal), device=run.device)])
        whole, stop = run.accelerator.reduce(shared, "sum").tolist()
        # what all processes know: a signal that comes after this waits for the next step
        self.stop = (run.stop_signal or signal.SIGTERM) if stop else 0
        return whole

    @contextmanager
    def _synchronized(self, wanted: bool) -> Iterator[None]:
        """Gradients are exchanged with the other processes after the last micro-batch only."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(wanted)
        alone = wanted or self.run.world == 1 or isinstance(self.module, FSDPModule)
        with nullcontext() if alone else self.run.accelerator.no_sync(self.module):
            yield

    def _validate(self) -> bool:
        """Whether the validation is the best so far; what was measured before the first step does not count."""
        run, progress = self.run, self.progress
        if run.validation is None:
            return False
        self.module.eval()
        with torch.compiler.set_stance("force_eager"):  # to compile for it would take longer than all of it
            loss = run.validation_loss(lambda batch: self.module(batch, score=True))
        self.module.train()
        if not math.isfinite(loss):
            if progress.step:
                raise Diverged(f"step {progress.step}: the validation loss is {loss}")
            return False  # right after the swap; transfer may mend it
        found = {"step": progress.step, "tokens": progress.tokens, "stage": progress.stage, "loss": loss}
        progress.validation.append(found | {"perplexity": perplexity(loss)})
        run.write_line({"step": progress.step, "stage": progress.stage, "validation_loss": loss})
        base = None if progress.base is None else progress.base["perplexity"]
        run.display.validation(progress.tokens, progress.validation[-1]["perplexity"], base)
        improved = progress.step > 0 and (progress.best is None or loss <= progress.best["loss"])
        if improved:
            progress.best = progress.validation[-1]
        return improved

    def _checkpoint(self) -> None:
        run, progress = self.run, self.progress
        model = self.student if self.lora is None else copy.deepcopy(self.lora).merge_and_unload()
        weights, training = saved.model_weights(model), self._training_tensors() if progress.stage_step else {}
        try:
            if run.main:
                saved.write_checkpoint(run.folder, model, weights, run.tokenizer, training, progress)
        except CheckpointError as error:
            raise TrainingError(f"{error}; {run.last_words()}") from error
        run.accelerator.wait_for_everyone()

    def _training_tensors(self) -> dict[str, Tensor]:
        """What to go on with beside the model; with LoRA also the student, which is merged in the model."""
        student = {} if self.lora is None else self.student.state_dict()
        unmerged = {f"student.{name}": saved.whole(tensor) for name, tensor in student.items()}
        return saved.optimizer_tensors(self.optimizer, self.names) | unmerged


def _result(run: Run, diverged: dict[str, Any] | None) -> dict[str, Any]:
    progress, recipe, model = run.progress, run.recipe, run.student
    losses = [line for line in run.log if "loss" in line]
    seconds: list[float | None] = [*progress.stage_seconds, *[None] * len(recipe.stages)]
    return {
        "kind": "training",
        "name": run.folder.name,
        "seed": recipe.seed,
        "tokens": progress.tokens,
        "recipe": recipe.to_dict(),
        "model": {
            "name": Path(run.task.model).name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "settings": getattr(model.config, "fastweights", None),
        },
        "data": {"name": Path(run.task.data).name, "tokens": len(run.tokens)},
        "base": progress.base,
        "processes": run.world,
        "stages": [
            {
                "name": stage.loss,
                "loss": stage.loss,
                "steps": recipe.steps_of(stage),
                "tokens": recipe.steps_of(stage) * recipe.batch_tokens,
                "seconds": seconds[number],
            }
            for number, stage in enumerate(recipe.stages)
        ],
        "curve": [
            {name: line[name] for name in ("step", "tokens", "stage", "loss")}
            for line in losses[:: max(1, len(losses) // CURVE_POINTS)]
        ],
        "validation": progress.validation,
        "best": progress.best,
        "last": progress.validation[-1] if progress.validation else None,
        "diverged": diverged,
        "seconds": progress.seconds,
        "finished": diverged is None,
    }
