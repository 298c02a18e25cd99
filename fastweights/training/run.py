"""A training run: what all of its stages share (student, teacher, data, log, signals), kept in one folder."""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import filter_trackers
from torch import Tensor

from fastweights.data.batches import PackedBatches, validation_rows
from fastweights.data.readers import given_by
from fastweights.data.token_files import TokenFile, check_vocabulary, prepare
from fastweights.loading import load, load_tokenizer, require_tokenizer
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.families import family_of
from fastweights.modeling.modes import autocast, is_low_precision
from fastweights.modeling.positions import position_limit
from fastweights.training import checkpoint as saved
from fastweights.training.chunked_loss import CHUNK_SHARE
from fastweights.training.losses import Batch, next_token_loss
from fastweights.training.optimizer import parameter_groups
from fastweights.training.recipe import Recipe, Stage
from fastweights.utils.errors import CheckpointError, FastWeightsError, Stopped
from fastweights.utils.files import write_json
from fastweights.utils.progress import Display

VALIDATION_BATCH_TOKENS = 8_192
# The size of a micro-batch, where the recipe does not say it, is an estimate from these.
# Bytes that the backward pass needs of a token: by layer and width; with recomputing only a block's ends are kept.
BYTES_KEPT, BYTES_OF_ENDS = 100, 16
# Bytes of a parameter: itself, the gradient, both of Adam's numbers and the teacher's copy.
BYTES_OF_PARAMETERS = 20
# What all of it may take: a share of a GPU's memory, or so many bytes.
MEMORY_SHARE, CPU_MEMORY = 0.8, 2**32


class TrainingError(FastWeightsError):
    """A run that cannot start or go on, with what to change."""


class Interrupted(Stopped):
    """A run that was asked to stop, and saved a checkpoint first."""

    def __init__(self, folder: Path, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}; go on with: {resume_command(folder)}")


def resume_command(folder: Path) -> str:
    return f"fastweights train --resume {folder}"


@dataclass(frozen=True)
class TrainConfig:
    """What to train on what. `teacher` is by default the model that `model` was converted from."""

    model: str
    data: str
    recipe: Recipe
    teacher: str | None = None
    validation: str | None = None
    text_field: str = "text"
    limit: int | None = None
    device: str | None = None
    shard: bool = False
    report_to: str | None = None
    memory_share: float = 1.0  # of a GPU's, where other runs have the rest

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"recipe": self.recipe.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        return cls(**values | {"recipe": Recipe.from_dict(values["recipe"])})


class Run:
    """A task in its folder: what all of its stages share."""

    def __init__(self, task: TrainConfig, folder: Path, display: Display) -> None:
        self.task, self.recipe, self.folder, self.display = task, task.recipe, folder, display
        self.accelerator = _accelerator(task, folder)
        self.device, self.main = self.accelerator.device, self.accelerator.is_main_process
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.display.enabled = display.enabled and self.main
        self.stop_signal = 0
        self.low_precision = is_low_precision(self.device, task.recipe.precision)
        self.tokenizer = load_tokenizer(saved.linked(folder, saved.LAST) or task.model)
        self.progress = self._last_progress()
        with self.writing(folder / saved.LOG):
            self.log = saved.read_log(folder, self.progress.step, write=self.main)
        self.student = self.load_student()
        self._check()
        self.teacher = self._load_teacher()
        self.tokens = self._prepare(task.data)
        self.progress.data = self._same_text(self.tokens, self.progress.data, f"--data {task.data}")
        self.batches = [self._batches(number) for number in range(len(self.recipe.stages))]
        self.validation = self._prepare_validation()
        self.began = time.perf_counter() - self.progress.seconds

    def _last_progress(self) -> saved.Progress:
        last = saved.linked(self.folder, saved.LAST)
        return saved.Progress() if last is None else saved.read_progress(last)

    def load_student(self) -> Any:
        return load(saved.linked(self.folder, saved.LAST) or self.task.model, dtype=torch.float32)

    def _check(self) -> None:
        """What can be known to fail is refused before the first step."""
        require_tokenizer(self.tokenizer, self.task.model)
        if self.task.shard and self.world == 1 and not (self.folder / saved.RUN).is_file():
            raise TrainingError("--shard: there is one process only: start several with torchrun (docs/training.md)")
        self._check_lengths()
        converted = isinstance(self.student, FastWeightsMixin)
        for stage in self.recipe.stages:
            if stage.teaches_layers and not converted:
                raise TrainingError(
                    f"{self.task.model} is not converted: transfer and fit teach fast-weight layers only"
                )
            if stage.top_k > self.student.config.vocab_size:
                most = self.student.config.vocab_size
                raise TrainingError(f"{stage.loss}.top_k={stage.top_k}: {self.task.model} has {most} tokens only")
            if not any(parameters and rate for parameters, rate in parameter_groups(self.student, stage)):
                raise TrainingError(f"the stage {stage.loss} trains nothing: its learning rates are 0")
            self.rows_at_once(stage)
        if self.recipe.lora and not converted:
            raise TrainingError(f"{self.task.model} is not converted: --lora is for the projections of new layers")
        if self.recipe.lora and importlib.util.find_spec("peft") is None:
            raise TrainingError("--lora is done by peft, which is not installed: pip install 'fastweights[peft]'")
        if self.recipe.lora and self.sharded:
            raise TrainingError("--lora trains few parameters, which are not sharded: leave one of the two out")

    def _check_lengths(self) -> None:
        limit = position_limit(self.student)
        lengths = [self.recipe.length_of(stage) for stage in self.recipe.stages]
        longest = max(lengths if self.task.validation is None else [*lengths, self.recipe.length])
        if limit is not None and longest > limit:
            raise TrainingError(f"--length {longest}: {self.task.model} has positions for {limit} tokens only")

    def rows_at_once(self, stage: Stage) -> int:
        """Sequences that a process takes through the model at once."""
        rows = self.recipe.rows_of(stage)
        if rows % self.world:
            raise TrainingError(
                f"--batch-tokens {self.recipe.batch_tokens} are {rows} sequences of {self.recipe.length_of(stage)} "
                f"tokens, which {self.world} processes cannot share equally"
            )
        at_once = self.recipe.micro_batch or self._memory() // (self.recipe.length_of(stage) * self._bytes_kept())
        return max(1, min(at_once, rows // self.world))

    def _memory(self) -> int:
        if self.device.type == "cpu":
            return CPU_MEMORY
        total = self.task.memory_share * torch.cuda.get_device_properties(self.device).total_memory
        fixed = BYTES_OF_PARAMETERS * sum(p.numel() for p in self.student.parameters())
        return max(0, int((MEMORY_SHARE - CHUNK_SHARE) * total) - fixed)

    def _bytes_kept(self) -> int:
        config, layers = self.student.config, len(family_of(self.student).blocks(self.student))
        recomputed = 2 * BYTES_KEPT + layers * BYTES_OF_ENDS
        return config.hidden_size * (recomputed if self.recipe.gradient_checkpointing else layers * BYTES_KEPT)

    def _load_teacher(self) -> Any:
        name = self.task.teacher or getattr(self.student.config, "fastweights_base", None)
        if not self.recipe.needs_teacher and self.task.teacher is None:
            return None
        if name is None:
            raise TrainingError("transfer, distill and fit learn from the unconverted model: name it with --teacher")
        try:
            teacher = load(name, dtype=torch.bfloat16 if self.low_precision else torch.float32)
        except CheckpointError as error:
            where = "--teacher" if self.task.teacher else f"the base of {self.task.model}, which --teacher can name:"
            raise TrainingError(f"{where} {error}") from error
        _check_teacher(name, teacher, self.student)
        if isinstance(teacher, FastWeightsMixin) and any(stage.teaches_layers for stage in self.recipe.stages):
            raise TrainingError(f"--teacher {name} is converted itself: transfer and fit learn from attention")
        teacher.config._name_or_path = str(name)
        return teacher.eval().requires_grad_(False).to(self.device)

    def _prepare(self, source: str) -> TokenFile:
        """Only one process tokenises; the others find its file."""
        with self.accelerator.main_process_first():
            tokens = prepare(
                source,
                self.tokenizer,
                text_field=self.task.text_field,
                limit=self.task.limit,
                progress=self.display.enabled,
            )
        check_vocabulary(tokens, self.tokenizer, self.student.config)
        return tokens

    def _same_text(self, tokens: TokenFile, before: list[int] | None, given: str) -> list[int]:
        """A resumed run must find the tokens that it began with."""
        found = [len(tokens), zlib.crc32(tokens.tokens[:: max(1, len(tokens) // 100_000)].tobytes())]
        if before not in (None, found):
            raise TrainingError(
                f"{given} is not the text that the run in {self.folder} was begun with: "
                "put that back, or begin a new run"
            )
        return found

    def _batches(self, number: int) -> PackedBatches:
        """The batches of a stage, each in an order of its own."""
        stage = self.recipe.stages[number]
        rows, length = self.recipe.rows_of(stage), self.recipe.length_of(stage)
        return PackedBatches(self.tokens, length, rows, self.recipe.seed + number)

    def _prepare_validation(self) -> Batch | None:
        if self.task.validation is None:
            return None
        with given_by("--validation"):
            tokens = self._prepare(self.task.validation)
        given, before = f"--validation {self.task.validation}", self.progress.validation_data
        self.progress.validation_data = self._same_text(tokens, before, given)
        return validation_rows(tokens, self.recipe.length, self.recipe.validation_tokens)

    @property
    def sharded(self) -> bool:
        asked = self.task.shard or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        return asked and self.world > 1

    def measure_base(self) -> None:
        if self.progress.base is not None or self.teacher is None or self.validation is None:
            return
        name = Path(self.teacher.config._name_or_path).name
        self.display.print(f"measuring {name}")
        loss = self.validation_loss(self._teacher_score)
        self.progress.base = {"name": name, "perplexity": perplexity(loss)}

    def _teacher_score(self, batch: Batch) -> Tensor:
        return next_token_loss(self.teacher, batch)

    @torch.no_grad()
    def validation_loss(self, score: Any) -> float:
        """Mean cross-entropy of the validation rows; every process takes its share and runs the model equally often."""
        assert self.validation is not None
        parts = split(self.validation, max(1, VALIDATION_BATCH_TOKENS // self.recipe.length))
        sums = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(parts), self.world):
            part = parts[min(first + self.rank, len(parts) - 1)]
            with self.autocast():
                loss = score(self.on_device(part))
            if first + self.rank < len(parts):
                sums += torch.tensor([float(loss), float((part["labels"][:, 1:] != -100).sum())], dtype=torch.float64)
        total, count = self.accelerator.reduce(sums.to(self.device), "sum").tolist()
        return total / count

    def on_device(self, batch: Batch) -> Batch:
        return {name: rows.to(self.device, non_blocking=True) for name, rows in batch.items()}

    def autocast(self) -> Any:
        return autocast(self.device, self.recipe.precision)

    def write_line(self, line: dict[str, Any]) -> None:
        """A line of the log, here and in the tracker."""
        self.log.append(line)
        if self.task.report_to:
            self.accelerator.log({k: v for k, v in line.items() if isinstance(v, float)}, step=line["step"])
        if not self.main:
            return
        path = self.folder / saved.LOG
        with self.writing(path), path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(f"{path}: {error.strerror or error}; {self.last_words()}") from error

    def last_words(self) -> str:
        """What a run that cannot write leaves behind, and how it goes on."""
        if not (self.folder / saved.RUN).is_file():
            return "choose another output folder"
        last = saved.linked(self.folder, saved.LAST)
        if last is None:
            return f"no checkpoint was written yet: make room, then {resume_command(self.folder)} starts it again"
        step = saved.read_progress(last).step
        return f"the checkpoint of step {step} is whole: make room, then {resume_command(self.folder)}"

    def begin(self) -> None:
        if self.main:
            with self.writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(self.folder / saved.RUN, self.task.to_dict())
        if self.task.report_to:
            self.accelerator.init_trackers("fastweights", config={"recipe": json.dumps(self.recipe.to_dict())})

    def end(self) -> None:
        for tracker in self.accelerator.trackers:
            tracker.finish()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and the first Ctrl-C end the run after the step it is in; a second Ctrl-C ends it at once. (A second
        SIGTERM does not: whoever ends a group of processes and their parent may both send one.)"""

        def stop(number: int, _frame: Any) -> None:
            self.stop_signal = number
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            self.display.print("stopping after this step")

        try:
            before: dict[int, Any] = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us has the signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _accelerator(task: TrainConfig, folder: Path) -> Accelerator:
    """Precision is the recipe's, whatever `accelerate launch` was told."""
    if task.report_to:
        _check_tracker(task.report_to, folder)
    cpu = task.device == "cpu" or (task.device is None and not torch.cuda.is_available())
    # others wait while the first process tokenises
    patience = InitProcessGroupKwargs(timeout=datetime.timedelta(hours=12))
    trackers = {"log_with": task.report_to, "project_dir": str(folder)}
    accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[patience], **trackers)
    found = accelerator.device.type
    if task.device not in (None, found):
        raise TrainingError(f"--device {task.device} cannot be used here; there is {found}")
    return accelerator


def _check_tracker(name: str, folder: Path) -> None:
    """accelerate itself leaves out what is not installed."""
    try:
        found = filter_trackers([name], str(folder))
    except ValueError as error:
        raise TrainingError(f"--report-to {name}: {error}") from error
    if not found:
        raise TrainingError(f"--report-to {name}: install its package first, pip install {name}")


def perplexity(loss: float) -> float:
    """exp, as far as it goes."""
    return math.exp(min(loss, 700.0))


def _check_teacher(name: str, teacher: Any, student: Any) -> None:
    found, wanted = (
        (model.config.vocab_size, len(family_of(model).blocks(model)), model.config.hidden_size)
        for model in (teacher, student)
    )
    if found != wanted:
        described = "vocabulary {}, {} layers, width {}"
        raise TrainingError(
            f"--teacher {name} ({described.format(*found)}) is not the model that was converted "
            f"({described.format(*wanted)})"
        )


def split(batch: Batch, rows: int) -> list[Batch]:
    count = len(batch["input_ids"])
    return [{name: x[start : start + rows] for name, x in batch.items()} for start in range(0, count, rows)]
