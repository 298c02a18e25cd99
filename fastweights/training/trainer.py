"""Training: one loop over the stages of a recipe. A stage's loss is in losses.py, its settings are in recipe.py.

A run is a function of its recipe, model and data: the batches and the random numbers of a step depend on seed and step
alone. So a run that was killed and resumed equals the run that was not. Every stage starts from a checkpoint, as a
resumed run does.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import signal
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fastweights.conversion import lora_modules
from fastweights.data.batches import PackedBatches, count_targets, validation_rows
from fastweights.data.prefetch import prefetch
from fastweights.data.recall_rows import FEWEST_PLACES
from fastweights.data.token_files import TokenFile, check_vocabulary, prepare
from fastweights.loading import load, load_tokenizer, require_tokenizer
from fastweights.model_paths import display_name
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.document_attention import use_document_kernels
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import converted_layers
from fastweights.modeling.modes import autocast, is_low_precision
from fastweights.results import (
    BaseModel,
    Data,
    Divergence,
    TrainedModel,
    TrainingResult,
    ValidationPoint,
)
from fastweights.tokenization import unknown_words
from fastweights.training import checkpoint as saved
from fastweights.training.checks import check_run, check_tracker
from fastweights.training.config import TrainConfig
from fastweights.training.log import log_text, read_log, truncate_log
from fastweights.training.losses import Batch, StageLoss, next_token_loss, without_plain_positions
from fastweights.training.micro_batch import micro_batch_size, split
from fastweights.training.optimizer import (
    Diverged,
    DivergenceWatch,
    compile_blocks,
    learning_rate_share,
    make_optimizer,
    set_mode,
    uncompile_blocks,
)
from fastweights.training.outcome import training_result
from fastweights.training.output_fit import awaits_memory_lengths, fit_outputs
from fastweights.training.readback import Readback
from fastweights.training.recipe import Recipe, Stage
from fastweights.training.run_folder import TrainingError, check_new_run, check_no_run, check_resumes, resume_call
from fastweights.training.step import StepRunner
from fastweights.training.teacher import load_teacher
from fastweights.utils.errors import Argument, CheckpointError, FastWeightsError, Stopped, error_context
from fastweights.utils.files import FileLock, append_text, make_folder, remove_leftovers
from fastweights.utils.progress import LINE_EVERY, Display, duration_text
from fastweights.utils.signals import StopNow, stop_signals

__all__ = ["Diverged", "Interrupted", "TrainConfig", "Trainer", "TrainingError", "resume", "train"]

VALIDATION_BATCH_TOKENS = 8_192
# Tokens that output projections are fitted on before a stage.
FIT_TOKENS = 16_384
# Tokens of a text that are looked at for unknown words.
UNKNOWN_SAMPLE = 100_000
# Steps of a stage after which the duration of the run is estimated.
ESTIMATE_AFTER = 3
# Steps of which the host has not read the loss yet when it starts the next one, for each type of device. A GPU that
# works on a step has the next one waiting.
UNREAD_STEPS = {"cuda": 1}


class Interrupted(Stopped):
    """A run that received a signal. It saved a checkpoint before it ended, unless it had not made a step yet."""

    def __init__(self, folder: Path, number: int) -> None:
        stopped, exit_code = f"stopped by {signal.Signals(number).name}", 128 + number
        if (folder / saved.RUN).is_file():
            super().__init__(f"{stopped}; resume with: ", resume_call(folder), exit_code=exit_code)
        else:
            super().__init__(f"{stopped} before anything was written: start it again", exit_code=exit_code)


def train(config: TrainConfig, folder: str | os.PathLike, *, display: Display | None = None) -> TrainingResult:
    """Train a model into a new folder.

    Args:
        config: What is trained on what.
        folder: The run's folder; it must not exist, or be empty.
        display: What to show meanwhile; by default a bar on stderr.

    Returns:
        The result, which is also written to result.json in `folder`.

    Raises:
        TrainingError: The run cannot start, or cannot be written.
        Diverged: The loss diverged. The result is written nevertheless.
        Interrupted: The process received SIGINT or SIGTERM. If the run had made a step, a checkpoint was saved.
    """
    folder = Path(folder)
    check_new_run(folder)
    return _run(config.with_absolute_paths(), folder, display or Display())


def _run(config: TrainConfig, folder: Path, display: Display) -> TrainingResult:
    with FileLock(folder / saved.LOCK) as lock, display:
        try:
            return Trainer(config, folder, display, lock).run()
        except StopNow as stop:
            raise Interrupted(folder, stop.number) from None


def resume(
    folder: str | os.PathLike, *, display: Display | None = None, memory_share: float | None = None
) -> TrainingResult:
    """Resume a run from its newest whole checkpoint.

    A run that was stopped before its first checkpoint starts again.

    Args:
        folder: The run's folder.
        display: What to show meanwhile; by default a bar on stderr.
        memory_share: Another share of the GPU's memory than the run was started with.

    Returns:
        The result, as `train` returns it.

    Raises:
        TrainingError: There is no run in `folder`, or it cannot continue.
        Diverged, Interrupted: As in `train`.
    """
    folder = Path(folder)
    check_resumes(folder)
    try:
        values = saved.read_run(folder)
        with error_context(f"{folder / saved.RUN}: ", plain=True):
            config = TrainConfig.from_dict(values)
    except (KeyError, TypeError) as error:
        raise TrainingError(f"{folder / saved.RUN} is not of this version of fastweights: {error}") from error
    if memory_share is not None:
        config = replace(config, memory_share=memory_share)
    return _run(config, folder, display or Display())


class _UnreadStep(NamedTuple):
    """A step that the device may still be working on.

    number: Its number in the stage, from 1.
    values: Its loss, the number of processes that received a signal, and the norm of its gradient.
    """

    number: int
    learning_rate: float
    values: Readback


@dataclass
class _ActiveStage:
    """What exists only while a stage is trained.

    runner: What makes its steps.
    started: When it started, or would have if it had not been interrupted.
    unread: Steps that were made and are not in the log and the progress yet.
    """

    runner: StepRunner
    watch: DivergenceWatch
    lora: Any
    started: float = 0.0
    unread: deque[_UnreadStep] = field(default_factory=deque)


class Trainer:
    """A training run in its folder.

    Attributes:
        student, teacher: The models; `teacher` is None where no stage needs one and none is named.
        last: The newest whole checkpoint; None before the first one.
        progress: How far the run has come.
        log: The lines of log.jsonl.
        validation: The rows to validate on, each tensor [rows,length]; None for no validation.
        stop_signal: Number of a signal that this process received, 0 for none.
    """

    def __init__(self, config: TrainConfig, folder: Path, display: Display, lock: FileLock) -> None:
        self.config, self.recipe, self.folder, self.display = config, config.recipe, folder, display
        self._lock = lock
        self.accelerator = _make_accelerator(config, folder)
        self.device, self.is_main = self.accelerator.device, self.accelerator.is_main_process
        self.world_size, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.display.enabled = display.enabled and self.is_main
        self.stop_signal, self._stops_at_once = 0, False
        self.last: Path | None = None
        self.progress = saved.Progress()
        self.log: list[dict[str, Any]] = []
        self._validation_seconds: float | None = None
        with self.signals(), self._stoppable(always=True):
            self._load()
        self._start_time = time.perf_counter() - self.progress.seconds

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded, as the config or `accelerate launch` asks for it."""
        requested = self.config.shard or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        return requested and self.world_size > 1

    def run(self) -> TrainingResult:
        """Train all stages that are left, and write the result."""
        self._start()
        diverged = None
        try:
            with self.signals():
                self._measure_base()
                while self.progress.stage < len(self.recipe.stages):
                    with self._stoppable():
                        active = self._start_stage()
                    self._train_stage(active)
                    self.accelerator.free_memory()  # it references what it prepared
                    if self.progress.stage < len(self.recipe.stages):
                        with self._stoppable():
                            self.student = self._load_student()
        except Diverged as error:
            diverged = Divergence(step=self.progress.step, stage=self.progress.stage, reason=str(error))
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                *("out of memory: take fewer sequences at once (", Argument("micro_batch"), "), or "),
                *(Argument("gradient_checkpointing"), f", in a new run; {str(error).splitlines()[0]}"),
            ) from error
        finally:
            for tracker in self.accelerator.trackers:
                tracker.finish()
        data = Data(name=Path(self.config.data).name, tokens=len(self.tokens))
        result = training_result(
            self.folder.name, self.config, self.progress, self.log, self._model, data, self.world_size, diverged
        )
        if result.warning:
            self.display.print(result.warning)
        if self.is_main:
            with self._write_errors(self.folder / saved.RESULT):
                result.write(self.folder / saved.RESULT)
        if diverged is not None:
            raise Diverged(f"{diverged.reason}; recorded in {self.folder / saved.RESULT}")
        return result

    # Set-up

    def _load(self) -> None:
        """Load the models and the texts."""
        config, resumes = self.config, (self.folder / saved.RUN).is_file()
        if resumes:
            self.last, self.progress, self.log = self._in_main_process(self._restore)
        self.tokenizer = load_tokenizer(self.last or config.model)
        require_tokenizer(self.tokenizer, config.model)
        self.student = self._load_student()
        # Before a stage adds low-rank updates.
        self._model = TrainedModel(
            name=display_name(config.model),
            parameters=sum(p.numel() for p in self.student.parameters()),
            settings=getattr(self.student.config, "fastweights", None),
        )
        if config.shard and self.world_size == 1 and not resumes:
            raise TrainingError(Argument("shard"), ": there is one process only: start several with torchrun")
        check_run(config, self.student, self.world_size, self.sharded)
        if self.recipe.stages[0].fit == "none" and awaits_memory_lengths(self.student):
            self.display.print(
                "gate_init='teacher' takes effect in a fit, and the first stage has none: memory lengths stay spread "
                "from one token to train_length (give that stage fit=full or fit=scale)"
            )
        self.teacher = self._load_teacher()
        self.tokens = self._prepare(config.data, self.progress.data)
        self.progress.data = self._check_same_text("data", self.tokens, self.progress.data)
        self.batches = [self._make_batches(number) for number in range(len(self.recipe.stages))]
        for stage, batches in zip(self.recipe.stages, self.batches, strict=True):
            if stage.recall and not batches.can_need_recall():
                self.display.print(
                    f"{stage.loss}.recall={stage.recall:g} changes nothing in the first step: no document there has "
                    f"{FEWEST_PLACES} predicted tokens in a row"
                )
        self.validation = self._prepare_validation()

    def _load_student(self) -> Any:
        what = f"loading the model {display_name(self.config.model)}" if self.last is None else "loading the checkpoint"
        with self.display.phase(what):
            return load(self.last or self.config.model, dtype=torch.float32)

    def _in_main_process(self, call: Callable[[], Any]) -> Any:
        """What a call returns in the main process, in all of them. If it fails there, all fail."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = call()
            except FastWeightsError as error:
                outcome[1] = error
        broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _restore(self) -> tuple[Path | None, saved.Progress, list[dict[str, Any]]]:
        """Find the checkpoint to resume from, and make folder and log as they were then."""
        folder = self.folder
        with self._write_errors(folder):
            self._lock.acquire()
            with self.display.phase("checking the checkpoints"):
                self.last = last = saved.newest_whole(folder, self.recipe, self.display.print)
        if last is None:
            self.display.print(f"no checkpoint was written yet in {folder}: the run starts at step 0")
        progress = saved.Progress() if last is None else saved.read_progress(last, self.recipe)
        self._check_same_recipe(progress)
        with self._write_errors(folder):
            log, missing = read_log(folder, None if last is None else progress.step)
            truncate_log(folder, log)
            if last is not None:
                saved.return_to(folder, last, progress, self.display.print)
                self.display.print(f"resuming from {last.relative_to(folder)}, step {progress.step}")
        if missing:
            self.display.print(f"{folder / saved.LOG} cannot be read at {missing} of {progress.step} steps")
        return last, progress, log

    def _check_same_recipe(self, progress: saved.Progress) -> None:
        before = progress.recipe
        if before is not None and Recipe.from_dict(before) != self.recipe:
            raise TrainingError(
                f"{self.folder / saved.RUN} has another recipe than the run was started with: restore it, or start a "
                "new run"
            )

    def _load_teacher(self) -> Any:
        """The teacher, where a stage needs one or one is named."""
        if not self.recipe.needs_teacher and self.config.teacher is None:
            return None
        dtype = torch.bfloat16 if is_low_precision(self.device, self.recipe.precision) else torch.float32
        with self.display.phase("loading the teacher, the model before conversion"):
            teacher = load_teacher(
                self.student, self.config.model, self.config.teacher, dtype=dtype, announce=self.display.print
            )
        if isinstance(teacher, FastWeightsMixin) and any(stage.teaches_layers for stage in self.recipe.stages):
            name = teacher.config._name_or_path
            raise TrainingError(Argument("teacher"), f" {name} is converted itself: transfer and fit need attention")
        teacher = teacher.eval().requires_grad_(False).to(self.device)
        use_document_kernels(teacher)
        return teacher

    def _prepare(self, source: str, before: list[Any] | None) -> TokenFile:
        """The tokens of a text. One process tokenizes; the others find its file.

        A run of a version that put no bos before its rows goes on without: what is known of its text, `before`, has no
        bos token.
        """
        with self.display.line(f"tokenizing {source}"), self.accelerator.main_process_first():
            tokens = prepare(
                source,
                self.tokenizer,
                text_field=self.config.text_field,
                limit=self.config.limit,
                progress=self.display.enabled,
            )
        check_vocabulary(tokens, self.tokenizer, self.student.config)
        note = unknown_words(self.tokenizer, tokens.tokens[:UNKNOWN_SAMPLE].tolist())
        if note is not None:
            self.display.print(f"{source}: {note}")
        if tokens.bos is not None and self.last is not None and len(before or ()) < 3:
            self.display.print(f"{self.folder} was started without bos before every row, and goes on so")
            return replace(tokens, bos=None)
        return tokens

    def _prepare_validation(self) -> Batch | None:
        if self.config.validation is None:
            return None
        with error_context(Argument("validation"), ": "):
            tokens = self._prepare(self.config.validation, self.progress.validation_data)
        before = self.progress.validation_data
        self.progress.validation_data = self._check_same_text("validation", tokens, before)
        return validation_rows(tokens, self.recipe.length, self.recipe.validation_tokens)

    def _check_same_text(self, argument: str, tokens: TokenFile, before: list[Any] | None) -> list[Any]:
        """The length and checksum of a text. A resumed run must find those that it started with."""
        found = tokens.identity
        # runs of earlier versions have a checksum of some of the tokens
        sample = [len(tokens), zlib.crc32(tokens.tokens[:: max(1, len(tokens) // 100_000)].tobytes())]
        if before not in (None, found, sample):
            raise TrainingError(
                *(Argument(argument), f" {getattr(self.config, argument)} is not the text that the run in "),
                f"{self.folder} was started with: restore that text, or start a new run",
            )
        return found

    def _make_batches(self, number: int) -> PackedBatches:
        """The batches of a stage. Each stage has an order of its own."""
        stage = self.recipe.stages[number]
        rows, length = self.recipe.rows_of(stage), self.recipe.length_of(stage)
        return PackedBatches(self.tokens, length, rows, self.recipe.seed + number, stage.recall)

    def _start(self) -> None:
        """Create the folder, and the tracker's run."""
        self.progress.recipe = self.recipe.to_dict()
        self._in_main_process(self._write_config)
        if self.config.report_to:
            self.accelerator.init_trackers("fastweights", config={"recipe": json.dumps(self.recipe.to_dict())})

    def _write_config(self) -> None:
        with self._write_errors(self.folder):
            make_folder(self.folder)
            if not self._lock.held:
                self._lock.acquire()
                check_no_run(self.folder)  # another process may have trained here in the meantime
                remove_leftovers(self.folder)
            self._write_run()

    def _write_run(self) -> None:
        saved.write_run(self.folder, self.config.to_dict(), checkpointed=self.last is not None)

    # A stage

    def _start_stage(self) -> _ActiveStage:
        """Prepare the student for the loss of the current stage, and restore the optimizer where the run resumes."""
        number, resumed = self.progress.stage, self.progress.stage_step > 0
        stage, batches, student = self.recipe.stages[number], self.batches[number], self.student.to(self.device)
        if not self.recipe.dropout:
            use_document_kernels(student)
        if self.teacher is not None:  # an earlier stage may have compiled it
            uncompile_blocks(self.teacher)
        fitted = resumed or (self.progress.step == 0 and self.last is not None)  # the checkpoint of step 0 has the fit
        if stage.fit != "none" and not fitted:
            self._fit_outputs(stage, batches)
        lora = self._add_lora(resumed) if self.recipe.lora else None
        set_mode(student, self.recipe, stage)
        compiled = self.recipe.compile and self.device.type == "cuda"
        if compiled:
            compile_blocks(student, self.teacher, stage)
        recompute, share = self.recipe.gradient_checkpointing, self.config.memory_share
        module = self._distribute(StageLoss(student, self.teacher, stage, recompute, compiled, share).to(self.device))
        optimizer = make_optimizer(student, stage)
        if resumed:
            assert self.last is not None
            saved.restore_optimizer(self.last, student, optimizer)
        watch = DivergenceWatch(self.recipe.diverged_above, self.recipe.diverged_for)
        for line in self.log:
            if line["stage"] == number and "loss" in line:
                watch.update(line["loss"])
        runner = StepRunner(
            self.recipe,
            stage,
            batches,
            student,
            module,
            optimizer,
            self.accelerator,
            self._rows_at_once(stage),
            steps_before=self.progress.step - self.progress.stage_step,
            announce=self.display.print,
        )
        return _ActiveStage(runner, watch, lora)

    def _fit_outputs(self, stage: Stage, batches: PackedBatches) -> None:
        """Fit the new layers on the first batches: all of their rows in every process, for equal results."""
        rows = max(1, FIT_TOKENS // self.recipe.length_of(stage))
        count = max(1, FIT_TOKENS // self.recipe.batch_tokens)
        first = ({name: x[:rows] for name, x in batches.batch(step).items()} for step in range(count))
        parts = [without_plain_positions(part) for b in first for part in split(b, self._rows_at_once(stage))]
        what = "fitting the new layers to the teacher"
        with self._autocast(), self.display.phase(what, len(parts)) as advance:
            fit_outputs(self.student, self.teacher, map(self._on_device, parts), stage.fit, advance)

    def _add_lora(self, resumed: bool) -> Any:
        """Insert low-rank updates into the student. What is returned can merge them."""
        from peft import LoraConfig, get_peft_model

        rank = self.recipe.lora
        torch.manual_seed(self.recipe.seed + self.progress.stage)
        lora = get_peft_model(self.student, LoraConfig(r=rank, lora_alpha=2 * rank, **lora_modules(self.student)))
        if resumed:
            assert self.last is not None
            saved.restore_unmerged(self.last, self.student)
        return lora

    def _distribute(self, loss: StageLoss) -> nn.Module:
        """DDP through accelerate, or FSDP2 with every fast-weight layer as a unit, because transfer calls it alone."""
        if not self.sharded:
            return self.accelerator.prepare(loss) if self.world_size > 1 else loss
        # a layer's output may be a view; no family changes it in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        for layer in converted_layers(loss).values():
            fully_shard(layer)
        for block in family_of(self.student).blocks(self.student):
            fully_shard(block)
        fully_shard(loss)
        return loss

    def _train_stage(self, active: _ActiveStage) -> None:
        recipe, progress, stage = self.recipe, self.progress, active.runner.stage
        steps, first = recipe.steps_of(stage), progress.stage_step
        spent = progress.stage_seconds[progress.stage] if progress.stage < len(progress.stage_seconds) else 0.0
        active.started = time.perf_counter() - spent
        if progress.step == 0 and not progress.validation and self._validate(active.runner.module):
            self._checkpoint(active)  # training may only make it worse: then this is the best model
        self.display.stage(f"{progress.stage + 1}/{len(recipe.stages)} {stage.loss}", steps, first)
        if self._validation_is_due(steps):  # a signal stopped it
            self._finish_step(active, steps)
        seconds: list[float] = []
        numbers = range(first, steps)
        with closing(prefetch(active.runner.prepare, numbers)) as prepared:
            for step, data in zip(numbers, prepared, strict=True):
                started = time.perf_counter()
                share = learning_rate_share(step, steps, stage)
                values = active.runner.run(data, step, share, lambda: self.stop_signal)
                active.unread.append(_UnreadStep(step + 1, share * stage.learning_rate, values))
                stop = self._read_steps(active, steps)
                seconds.append(time.perf_counter() - started)
                if len(seconds) == min(ESTIMATE_AFTER, steps - first):
                    self._print_estimate(seconds, step)
                if not active.unread:  # else it is time for nothing
                    self._finish_step(active, steps, stop)
        self.display.end_stage()

    def _finish_step(self, active: _ActiveStage, steps: int, stop: int = 0) -> None:
        """Validate and save where it is time for it. Raises Interrupted after a signal.

        Args:
            active: The stage.
            steps: Its number of steps.
            stop: The signal to stop for, 0 for none. Then a validation is left to the run that resumes.
        """
        recipe, progress = self.recipe, self.progress
        improved, ends = False, progress.stage_step == steps
        if self._validation_is_due(steps) and not stop:
            try:
                improved = self._validate(active.runner.module)
            except StopNow as received:
                stop = received.number
        self._count_seconds(active)
        if ends and not self._validation_is_due(steps):
            progress.stage, progress.stage_step = progress.stage + 1, 0
        if ends or improved or stop or progress.stage_step % recipe.checkpoint_every == 0:
            self._checkpoint(active)
            stop = stop or self._own_signal  # it came in the meantime
        if stop:
            raise Interrupted(self.folder, stop)

    def _count_seconds(self, active: _ActiveStage) -> None:
        progress = self.progress
        progress.seconds = time.perf_counter() - self._start_time
        progress.stage_seconds[progress.stage :] = [time.perf_counter() - active.started]

    def _validation_is_due(self, steps: int) -> bool:
        """Whether to validate after the current step of a stage of `steps` steps. False where that was done."""
        progress = self.progress
        due = progress.stage_step == steps or progress.stage_step % self.recipe.validate_every == 0
        done = bool(progress.validation) and progress.validation[-1].step == progress.step
        return self.validation is not None and progress.stage_step > 0 and due and not done

    def _print_estimate(self, seconds: list[float], step: int) -> None:
        """Print how long the run takes, from the seconds of its first steps in this stage and of the last validation.

        Other stages are taken to be as fast as this one, so each stage has an estimate of its own.

        Args:
            seconds: Of each step so far.
            step: Number of the last one in the stage, from 0. Its validation is still to come.
        """
        recipe, progress = self.recipe, self.progress
        begun = [step, *[0] * len(recipe.stages)]
        left = list(zip(recipe.stages[progress.stage :], begun, strict=False))
        steps = sum(recipe.steps_of(stage) - done for stage, done in left) - 1
        validations = sum(recipe.validations_of(stage, done) for stage, done in left) if self.validation else 0
        usual = seconds[1:] or seconds  # the first one may compile kernels
        still = steps * sum(usual) / len(usual) + validations * (self._validation_seconds or 0.0)
        whole = duration_text(time.perf_counter() - self._start_time + still)
        what = f"steps: {steps:,}" + (f", validations: {validations:,}" if validations else "")
        assumed = ", if later stages are as fast" if len(left) > 1 else ""
        self.display.print(f"  about {duration_text(still)} left of {whole} in all{assumed} ({what})")

    def _read_steps(self, active: _ActiveStage, steps: int) -> int:
        """Read the losses of steps that were made, and log them.

        The last ones may stay unread until the next call (`UNREAD_STEPS`), unless it is time to validate, to save or to
        stop. So nothing is saved after a step whose loss is not known to be finite.

        Returns:
            The signal to stop for, 0 for none; the same in all processes.
        """
        stop, unread = self._own_signal, UNREAD_STEPS.get(self.device.type, 0)
        if stop or self._is_due(active.unread[-1].number, steps):
            unread = 0
        while len(active.unread) > unread:
            if self._record_step(active, active.unread.popleft()):
                stop, unread = stop or self.stop_signal or signal.SIGTERM, 0
        return stop

    def _is_due(self, done: int, steps: int) -> bool:
        """Whether it is time to validate or to save when `done` of a stage's steps are made."""
        recipe = self.recipe
        validates = self.validation is not None and done % recipe.validate_every == 0
        return done == steps or validates or done % recipe.checkpoint_every == 0

    def _record_step(self, active: _ActiveStage, unread: _UnreadStep) -> bool:
        """Enter a step into the log and the progress. Returns whether a process received a signal before its end.

        Raises:
            Diverged: The step or the run has diverged. The progress then ends before, or with, this step; the model may
                be a step further, and is not saved.
        """
        progress = self.progress
        loss, signalled, norm = unread.values.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(f"step {progress.step + 1}: the loss is {loss}, the norm of its gradient {norm}")
        progress.stage_step, progress.step = unread.number, active.runner.steps_before + unread.number
        progress.tokens += self.recipe.batch_tokens
        self._count_seconds(active)
        line = {"step": progress.step, "stage": progress.stage, "tokens": progress.tokens, "loss": loss}
        line |= {"gradient_norm": norm, "learning_rate": unread.learning_rate}
        self._write_log(line, sync=progress.stage_step % LINE_EVERY == 0)
        self.display.step(loss, self.recipe.batch_tokens)
        active.watch.update(loss)
        return signalled > 0

    def _rows_at_once(self, stage: Stage) -> int:
        """Sequences that a process takes through the model at once."""
        fitting = micro_batch_size(self.recipe, stage, self.student, self.device, self.config.memory_share)
        return min(fitting, self.recipe.rows_of(stage) // self.world_size)

    # Validation

    def _measure_base(self) -> None:
        """Measure the teacher's validation perplexity, once in a run."""
        if self.progress.base is not None or self.teacher is None or self.validation is None:
            return
        name = display_name(self.teacher.config._name_or_path)
        what = "measuring the base model on the validation text"
        loss = self.validation_loss(lambda batch: next_token_loss(self.teacher, batch), what)
        self.progress.base = BaseModel(name=name, perplexity=perplexity_from_loss(loss))
        self.display.print(f"base model {name}: validation perplexity {self.progress.base.perplexity:,.2f}")

    def _validate(self, module: nn.Module) -> bool:
        """Validate and log it. Returns whether it is the best so far."""
        progress = self.progress
        if self.validation is None:
            return False
        module.eval()
        with torch.compiler.set_stance("force_eager"):  # compiling for it would take longer than running it
            loss = self.validation_loss(lambda batch: module(batch, score=True), "validating")
        module.train()
        if not math.isfinite(loss):
            if progress.step:
                raise Diverged(f"step {progress.step}: the validation loss is {loss}")
            return False  # right after conversion; training may repair it
        place: dict[str, Any] = dict(step=progress.step, tokens=progress.tokens, stage=progress.stage)
        point = ValidationPoint(loss=loss, perplexity=perplexity_from_loss(loss), **place)
        progress.validation.append(point)
        self._write_log({"step": progress.step, "stage": progress.stage, "validation_loss": loss}, sync=True)
        base = None if progress.base is None else progress.base.perplexity
        self.display.validation(progress.tokens, point.perplexity, base)
        improved = progress.best is None or loss <= progress.best.loss
        if improved:
            progress.best = point
        return improved

    @torch.no_grad()
    def validation_loss(self, score: Any, what: str) -> float:
        """Mean cross-entropy of the validation rows.

        Each process takes its share. All run the model equally often, because a sharded model needs all of them.

        Args:
            score: Maps a batch to the sum of its cross-entropies.
            what: What this is, for the display.
        """
        assert self.validation is not None
        parts = split(self.validation, max(1, VALIDATION_BATCH_TOKENS // self.recipe.length))
        sums, started = torch.zeros(2, dtype=torch.float64), time.perf_counter()
        turns = range(0, len(parts), self.world_size)
        with self._stoppable(), self.display.phase(what, len(turns), announce=self.progress.step == 0) as advance:
            for first in turns:
                part = parts[min(first + self.rank, len(parts) - 1)]
                with self._autocast():
                    loss = score(self._on_device(without_plain_positions(part)))
                if first + self.rank < len(parts):
                    sums += torch.tensor([float(loss), count_targets(part)], dtype=torch.float64)
                advance()
        total, count = self.accelerator.reduce(sums.to(self.device), "sum").tolist()
        self._validation_seconds = time.perf_counter() - started
        return total / count

    def _on_device(self, batch: Batch) -> Batch:
        return {name: rows.to(self.device, non_blocking=True) for name, rows in batch.items()}

    def _autocast(self) -> Any:
        return autocast(self.device, self.recipe.precision)

    # What a run writes

    def _write_log(self, line: dict[str, Any], sync: bool) -> None:
        """Append a line to the log, and send it to the tracker. With `sync`, a power cut does not lose it."""
        self.log.append(line)
        if self.is_main:
            path = self.folder / saved.LOG
            with self._write_errors(path):
                append_text(path, log_text(line), sync)
        if self.config.report_to:
            self.accelerator.log({k: v for k, v in line.items() if isinstance(v, float)}, step=line["step"])

    def _checkpoint(self, active: _ActiveStage) -> None:
        with self.display.phase("saving a checkpoint", announce=False):
            self._write_checkpoint(active)

    def _write_checkpoint(self, active: _ActiveStage) -> None:
        model = self.student if active.lora is None else copy.deepcopy(active.lora).merge_and_unload()
        weights = saved.model_weights(model)
        training: dict[str, Tensor] = {}
        if self.progress.stage_step:  # a stage starts from the model alone
            training = saved.training_tensors(self.student, active.runner.optimizer, unmerged=active.lora is not None)
        if self.is_main:
            with self._write_errors(self.folder / saved.LOG):
                append_text(self.folder / saved.LOG, "", sync=True)
            try:
                saved.write_checkpoint(self.folder, model, weights, self.tokenizer, training, self.progress)
            except CheckpointError as error:
                raise TrainingError(*error.parts, "; ", *self._recovery_hint()) from error
        self.accelerator.wait_for_everyone()
        is_first, self.last = self.last is None, saved.checkpoint_folder(self.folder, self.progress)
        if is_first and self.is_main:
            with self._write_errors(self.folder / saved.RUN):
                self._write_run()

    @contextmanager
    def _write_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(f"{path}: {error.strerror or error}; ", *self._recovery_hint()) from error

    def _recovery_hint(self) -> tuple[str, ...]:
        """What a run that cannot write has saved, and how to resume it."""
        if not (self.folder / saved.RUN).is_file():
            return ("choose another output folder",)
        call = resume_call(self.folder)
        if self.last is None:
            return "no checkpoint was written yet: free disk space, then ", call, " starts it again"
        step = saved.read_progress(self.last).step
        return f"the checkpoint of step {step} is complete: free disk space, then ", call

    # Signals

    def signals(self) -> AbstractContextManager[None]:
        """In its block, a signal that asks the program to stop ends the run after the current step, or earlier where
        there is nothing to save."""
        return stop_signals(self._stop, self._acknowledge)

    def _stop(self, number: int) -> None:
        self.stop_signal = number
        if self._stops_at_once:
            raise StopNow(number)

    def _acknowledge(self, number: int) -> None:
        if self._stops_at_once:
            self.display.print("stopping")
        else:
            again = "; press Ctrl-C again to stop without saving" if number == signal.SIGINT else ""
            self.display.print(f"stopping after this step, which is then saved{again}")

    @property
    def _own_signal(self) -> int:
        """The signal that this process received, 0 for none or where several processes have to agree to stop."""
        return self.stop_signal if self.world_size == 1 else 0

    @contextmanager
    def _stoppable(self, always: bool = False) -> Iterator[None]:
        """In its block, a signal raises StopNow: there is nothing to save.

        Of several processes one must not stop alone while the others wait for it, so it waits for the next step, unless
        `always` is set.
        """
        if self._own_signal:
            raise StopNow(self._own_signal)
        self._stops_at_once = always or self.world_size == 1
        try:
            yield
        finally:
            self._stops_at_once = False


def _make_accelerator(config: TrainConfig, folder: Path) -> Accelerator:
    """The processes and the device. Precision is the recipe's, whatever `accelerate launch` was given."""
    if config.report_to:
        check_tracker(config.report_to)
    cpu = config.device == "cpu" or (config.device is None and not torch.cuda.is_available())
    # the other processes wait while the first one tokenizes
    timeout = InitProcessGroupKwargs(timeout=datetime.timedelta(hours=12))
    trackers = {"log_with": config.report_to, "project_dir": str(folder)}
    accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[timeout], **trackers)
    found = accelerator.device.type
    if config.device not in (None, found):
        raise TrainingError(Argument("device"), f" {config.device} cannot be used here; there is {found}")
    return accelerator


def perplexity_from_loss(loss: float) -> float:
    """exp(loss), without an overflow."""
    return math.exp(min(loss, 700.0))
