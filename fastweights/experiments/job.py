"""One run of a comparison on disk: how it is prepared, which settings it was started with, how it is finished.

A comparison's folder:
    runs/NAME/begun.json   the settings that the run was started with
    runs/NAME/converted/   the base with this variant's layers
    runs/NAME/training/    the training run, which `fastweights train --resume` starts and resumes
    runs/NAME/log.txt      what its processes printed
    runs/NAME/process      the lock of the run, with the process that holds it
    results/NAME.json      the result; where it exists, the run is done
"""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.data.readers import read_text
from fastweights.evaluation.perplexity import EvaluationError, perplexity
from fastweights.experiments.grid import GridError, Variant
from fastweights.loading import load, load_tokenizer, save
from fastweights.modeling.modes import autocast
from fastweights.results import PerplexityRow, TrainingResult
from fastweights.training import checkpoint as saved
from fastweights.training.recipe import Recipe
from fastweights.training.trainer import VALIDATION_BATCH_TOKENS, TrainConfig
from fastweights.utils.errors import Argument, CheckpointError
from fastweights.utils.files import write_json

MOST_CHANGES = 4


@dataclass(frozen=True)
class Setup:
    """What the runs of a comparison share. `tests` are data sources by their names."""

    folder: Path
    model: str
    data: str
    validation: str
    tests: dict[str, str] = field(default_factory=dict)
    limit: int | None = None
    device: str | None = None
    keep: bool = False


@dataclass(frozen=True)
class Job:
    """A variant in the folder of its comparison."""

    setup: Setup
    variant: Variant

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def folder(self) -> Path:
        return self.setup.folder / "runs" / self.name

    @property
    def training(self) -> Path:
        return self.folder / "training"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def result(self) -> Path:
        return self.setup.folder / "results" / f"{self.name}.json"

    def acquire(self) -> TextIO | None:
        """Lock the run; None if another process holds it. A training process inherits the lock, so that nobody resumes
        the run beside it after the comparison was killed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / "process").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock

    def settings(self) -> dict[str, Any]:
        """Everything that the outcome of the run depends on."""
        setup, config = self.setup, self.variant.config
        return {
            "settings": None if config is None else config.to_dict(),
            "recipe": self.variant.recipe.to_dict(),
            "model": setup.model,
            "data": setup.data,
            "validation": setup.validation,
            "limit": setup.limit,
            "tests": dict(sorted(setup.tests.items())),
        }

    def check_unchanged(self) -> None:
        """Refuse to resume or to reuse a run that was started with other settings.

        A run without a checkpoint starts anew: so one that failed at its start can be corrected.

        Raises:
            GridError: which settings differ, and what to do.
        """
        before = self._settings_before()
        if before is None:
            return
        now, then = _flat({name: value for name, value in self.settings().items() if name in before}), _flat(before)
        changed = [name for name in {**then, **now} if now.get(name) != then.get(name)]
        if changed:
            shown = [f"{name} is {now.get(name)!r} and was {then.get(name)!r}" for name in changed[:MOST_CHANGES]]
            more = f", and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
            paths = " and ".join(str(path) for path in (self.folder, self.result) if path.exists())
            raise GridError(
                f"run {self.name} was started with other settings: {', '.join(shown)}{more}; restore them, give the "
                "run another name, choose another folder (",
                Argument("output"),
                f"), or delete {paths} to start it anew",
            )

    def _settings_before(self) -> dict[str, Any] | None:
        trained = self._has_checkpoint() or (self.training / saved.RESULT).is_file()
        if not trained and not self.result.is_file():
            return None
        if trained or self._started.is_file():
            found = saved.read_json(self._started)
        else:
            result = self.read_result()
            found = {"settings": result["model"]["settings"], "recipe": result["recipe"]}
        # a setting that an older version did not have gets its default
        config = None if found["settings"] is None else FastWeightsConfig.from_dict(found["settings"]).to_dict()
        return found | {"settings": config, "recipe": Recipe.from_dict(found["recipe"]).to_dict()}

    @property
    def _started(self) -> Path:
        return self.folder / "begun.json"

    def is_trained(self) -> bool:
        return self.result.is_file() or (self.training / saved.RESULT).is_file()

    def _has_checkpoint(self) -> bool:
        return saved.linked(self.training, saved.LAST) is not None

    def read_result(self) -> dict[str, Any]:
        try:
            return saved.read_json(self.result)
        except CheckpointError as error:
            raise GridError(f"{str(error).split('; ')[0]}; delete it, and the run is done again") from error

    def prepare(self, memory_share: float) -> None:
        """Make `training` ready for `fastweights train --resume`, which starts the run or resumes it."""
        run = self.training / saved.RUN
        # a run with a checkpoint was compared with its settings before the first process started
        resumes = run.is_file() and (self._has_checkpoint() or saved.read_json(self._started) == self.settings())
        with self.log.open("a") as log:
            print("resumed" if resumes else "started", file=log)
        config = saved.read_json(run) if resumes else self._start_over().to_dict()
        write_json(run, config | {"memory_share": memory_share})

    def _start_over(self) -> TrainConfig:
        setup, config, converted = self.setup, self.variant.config, self.folder / "converted"
        for folder in (self.training, converted):
            shutil.rmtree(folder, ignore_errors=True)
        write_json(self._started, self.settings())
        if config is not None:
            model = convert(load(setup.model, dtype=torch.float32), config)
            model.config.fastweights_base = setup.model
            save(model, converted, load_tokenizer(setup.model))
        return TrainConfig(
            model=setup.model if config is None else str(converted),
            data=setup.data,
            recipe=self.variant.recipe,
            validation=setup.validation,
            limit=setup.limit,
            device=setup.device,
        )

    def finish(self) -> None:
        """Measure the best model on the tests and write the result, unless another process did so."""
        if self.result.is_file():
            return
        result = TrainingResult.read(self.training / saved.RESULT)
        tests = self._measure(result.diverged is not None)
        replace(result, name=self.name, run=self.name, cell=self.variant.cell, tests=tests).write(self.result)
        if not self.setup.keep:
            self._remove_models()

    def _measure(self, diverged: bool) -> list[PerplexityRow]:
        """The best model's perplexity of every test. A run that diverged may have no model, or no finite losses."""
        best = saved.linked(self.training, saved.BEST) or saved.linked(self.training, saved.LAST)
        if best is None or not self.setup.tests:
            return []
        device = self.setup.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = load(best, dtype=torch.float32).to(device), load_tokenizer(best)
        length = self.variant.recipe.length
        windows: dict[str, Any] = dict(length=length, batch_size=max(1, VALIDATION_BATCH_TOKENS // length))
        found = []
        try:
            for name, source in self.setup.tests.items():
                with autocast(model.device, self.variant.recipe.precision):
                    measured = perplexity(model, tokenizer, read_text(source), progress=False, **windows)
                found.append(measured.row(name))
        except EvaluationError:
            if not diverged:
                raise
            return []
        return found

    def _remove_models(self) -> None:
        """The log of the steps stays. Without run.json there is no run to resume."""
        for path in (*self.training.iterdir(), self.folder / "converted"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != saved.LOG:
                path.unlink(missing_ok=True)


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {place: value}
    inner = (_flat(part, f"{place}.{name}" if place else str(name)) for name, part in value.items())
    return {name: leaf for part in inner for name, leaf in part.items()}
