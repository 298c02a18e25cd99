"""One run of a comparison, in a process of its own: begun, gone on with or only measured, as the disk says.

A comparison's folder:  runs/NAME/ (begun.json: what it was begun with, swapped/: the converted base, training/: the
training run, log.txt: what its processes printed) and results/NAME.json, which is there when a run is done.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.data.readers import read_text
from fastweights.evaluation.perplexity import EvaluationError, perplexity
from fastweights.experiments.grid import GridError, Variant
from fastweights.loading import load, load_tokenizer, save
from fastweights.modeling.classes import autocast
from fastweights.training import checkpoint as saved
from fastweights.training.recipe import Recipe
from fastweights.training.run import VALIDATION_BATCH_TOKENS
from fastweights.training.trainer import Diverged, Interrupted, TrainConfig, resume, train
from fastweights.utils.errors import CheckpointError
from fastweights.utils.files import write_json
from fastweights.utils.progress import Display
from fastweights.utils.provenance import write_result

MOST_CHANGES = 4


@dataclass(frozen=True)
class Setup:
    """What the runs of a comparison share. `tests` are texts by their names."""

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
    setup: Setup
    variant: Variant

    @property
    def folder(self) -> Path:
        return self.setup.folder / "runs" / self.variant.name

    @property
    def training(self) -> Path:
        return self.folder / "training"

    @property
    def swapped(self) -> Path:
        return self.folder / "swapped"

    @property
    def begun(self) -> Path:
        return self.folder / "begun.json"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def lock(self) -> Path:
        """Held by the process that has the run, whose number it says."""
        return self.folder / "process"

    @property
    def result(self) -> Path:
        return self.setup.folder / "results" / f"{self.variant.name}.json"

    def settings(self) -> dict[str, Any]:
        """All that a run's outcome depends on."""
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
        """What is there must have been made as it would be made now. A run without a checkpoint has nothing to lose
        and begins anew: so one that failed at its start is put right."""
        before = self._before()
        if before is None:
            return
        now, then = _flat({name: value for name, value in self.settings().items() if name in before}), _flat(before)
        changed = [name for name in {**then, **now} if now.get(name) != then.get(name)]
        if changed:
            said = [f"{name} is {now.get(name)!r} and was {then.get(name)!r}" for name in changed[:MOST_CHANGES]]
            more = f", and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
            anew = " and ".join(str(path) for path in (self.folder, self.result) if path.exists())
            raise GridError(
                f"run {self.variant.name} was begun with other settings: {', '.join(said)}{more}; put them back, give "
                f"the run another name, choose another folder (-o), or delete {anew} to begin it anew"
            )

    def _before(self) -> dict[str, Any] | None:
        trained = saved.linked(self.training, saved.LAST) or (self.training / saved.RESULT).is_file()
        if not trained and not self.result.is_file():
            return None
        if trained or self.begun.is_file():
            found = saved.read_json(self.begun)
        else:
            result = read_result(self)
            found = {"settings": result["model"]["settings"], "recipe": result["recipe"]}
        # what an older version did not know has its default
        config = None if found["settings"] is None else FastWeightsConfig.from_dict(found["settings"]).to_dict()
        return found | {"settings": config, "recipe": Recipe.from_dict(found["recipe"]).to_dict()}


def read_result(job: Job) -> dict[str, Any]:
    """Of a run that is done."""
    try:
        return saved.read_json(job.result)
    except CheckpointError as error:
        raise GridError(f"{str(error).split('; ')[0]}; delete it, and the run is done again") from error


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Settings within settings, by dotted names."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {place: value}
    inner = (_flat(part, f"{place}.{name}" if place else str(name)) for name, part in value.items())
    return {name: leaf for part in inner for name, leaf in part.items()}


def work(job: Job, at_once: int) -> None:
    """What a run's process does; its exit code says how it ended. `at_once` processes share this machine's cores."""
    job.folder.mkdir(parents=True, exist_ok=True)
    _print_to(job.log)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handler
    _end_with_parent()
    logging.disable_progress_bar()
    torch.set_num_threads(max(1, torch.get_num_threads() // at_once))
    with _alone(job):
        if job.result.is_file():  # another comparison had the run until now
            return
        try:
            result = _train(job, 1 / at_once)
        except Interrupted as error:
            print(error, flush=True)
            sys.exit(error.exit_code)
        own = {"name": job.variant.name, "run": job.variant.name, "cell": job.variant.cell}
        write_result(job.result, result | own | {"tests": _test(job, result)})
        if not job.setup.keep:
            _remove_models(job)


def _print_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _end_with_parent() -> None:
    """A run whose comparison was killed must not go on: the same command, given again, would begin it beside this."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _alone(job: Job) -> Iterator[None]:
    """Of two processes with one run the second waits for the first."""
    with job.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for process {job.lock.read_text()}, which has this run", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _train(job: Job, memory_share: float) -> dict[str, Any]:
    """The result as it is on the disk, with where it comes from; a run that diverged has one, too."""
    if not (job.training / saved.RESULT).is_file():
        quiet = Display(enabled=False)
        try:
            if (job.training / saved.RUN).is_file() and _goes_on(job):
                print("goes on", flush=True)
                resume(job.training, display=quiet, memory_share=memory_share)
            else:
                print("begins", flush=True)
                train(_begin(job, memory_share), job.training, display=quiet)
        except Diverged as error:
            print(error, flush=True)
    return saved.read_json(job.training / saved.RESULT)


def _goes_on(job: Job) -> bool:
    """Whether a run is still what it was; where there is a checkpoint, that was checked before the process began."""
    return saved.linked(job.training, saved.LAST) is not None or saved.read_json(job.begun) == job.settings()


def _begin(job: Job, memory_share: float) -> TrainConfig:
    """The model to train, made anew."""
    setup, variant = job.setup, job.variant
    for folder in (job.training, job.swapped):
        shutil.rmtree(folder, ignore_errors=True)
    write_json(job.begun, job.settings())
    if variant.config is not None:
        model = convert(load(setup.model, dtype=torch.float32), variant.config)
        model.config.fastweights_base = setup.model
        save(model, job.swapped, load_tokenizer(setup.model))
    return TrainConfig(
        model=setup.model if variant.config is None else str(job.swapped),
        data=setup.data,
        recipe=variant.recipe,
        validation=setup.validation,
        limit=setup.limit,
        device=setup.device,
        memory_share=memory_share,
    )


def _test(job: Job, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The best model's perplexity of every test. One that diverged may have no model, or one without finite losses."""
    best = saved.linked(job.training, saved.BEST) or saved.linked(job.training, saved.LAST)
    if best is None or not job.setup.tests:
        return []
    device = job.setup.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load(best, dtype=torch.float32).to(device), load_tokenizer(best)
    recipe, found = job.variant.recipe, []
    windows: dict[str, Any] = {
        "length": recipe.length,
        "batch_size": max(1, VALIDATION_BATCH_TOKENS // recipe.length),
        "progress": False,
    }
    try:
        for name, source in job.setup.tests.items():
            with autocast(model.device, recipe.precision):
                measured = perplexity(model, tokenizer, read_text(source), **windows)
            found.append({"data": name} | measured.to_dict())
    except EvaluationError as error:
        if result["diverged"] is None:
            raise
        print(error, flush=True)
        return []
    return found


def _remove_models(job: Job) -> None:
    """The log of the steps stays; without run.json it is no run to go on with."""
    for path in (*job.training.iterdir(), job.swapped):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != saved.LOG:
            path.unlink(missing_ok=True)
