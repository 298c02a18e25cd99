"""A comparison: the runs of a grid, each trained by `fastweights train --resume` in a process of its own, several at
once. Runs that are done are skipped and started ones are resumed, so the same command resumes a comparison."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from rich.console import Console

from fastweights.conversion import check_layers
from fastweights.data.batches import validation_rows
from fastweights.data.readers import DataError, read_text
from fastweights.data.token_files import check_vocabulary, prepare
from fastweights.experiments.grid import GridError, Variant
from fastweights.experiments.job import Job, Setup
from fastweights.loading import load, load_tokenizer, require_tokenizer
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.families import family_of
from fastweights.modeling.positions import position_limit
from fastweights.training import checkpoint as saved
from fastweights.training.trainer import perplexity_from_loss
from fastweights.utils.errors import Argument, Stopped, error_context
from fastweights.utils.files import absolute, write_json
from fastweights.utils.progress import RunsDisplay

POLL_SECONDS = 0.2
# As a rule, this much of a log's end holds a validation.
TAIL_BYTES = 2**16


class Unfinished(Stopped):
    """A comparison some of whose runs failed or were stopped."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


@dataclass
class Outcome:
    """`results` of the runs that are done, in the grid's order; for each run that failed, why."""

    results: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    waiting: int = 0
    stop_signal: int = 0

    def check(self) -> None:
        """Raise Unfinished unless all runs are done."""
        count = len(self.results) + len(self.failed) + self.waiting
        if self.stop_signal:
            done = f"stopped by {signal.Signals(self.stop_signal).name}: {len(self.results)} of {count} runs are done"
            raise Unfinished(f"{done}; the same command resumes", 128 + self.stop_signal)
        if self.failed:
            listed = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise Unfinished(f"{len(self.failed)} of {count} runs failed, the same command tries again: {listed}")


def make_setup(folder: Path, model: str, data: str, validation: str, tests: Sequence[str] = (), **more: Any) -> Setup:
    """Paths become absolute, because a comparison may be resumed from another folder. A test is named after its file,
    unless several have that name."""
    names = [Path(test).name for test in tests]
    named = {name if names.count(name) == 1 else test: test for name, test in zip(names, tests, strict=True)}
    return Setup(
        folder=folder.absolute(),
        model=absolute(model),
        data=absolute(data),
        validation=absolute(validation),
        tests={name: absolute(test) for name, test in named.items()},
        **more,
    )


def launch(arguments: Sequence[str], log: TextIO, lock: TextIO, threads: int) -> subprocess.Popen:
    """Start `fastweights ARGUMENTS`. It does not get the terminal's Ctrl-C, and it inherits the lock of its run."""
    return subprocess.Popen(
        [sys.executable, "-m", "fastweights", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        pass_fds=(lock.fileno(),),
        start_new_session=True,
    )


def compare(variants: Sequence[Variant], setup: Setup, at_once: int = 1, console: Console | None = None) -> Outcome:
    """Run the variants that are not done yet.

    Args:
        variants: the runs of a grid.
        setup: what they share.
        at_once: how many are trained at the same time. They share the cores and the memory of the device.
        console: where progress is shown; by default standard error.

    Raises:
        GridError, DataError, CheckpointError: what can be known to be wrong before the first process starts.
    """
    jobs = [Job(setup, variant) for variant in variants]
    for job in jobs:
        job.check_unchanged()
    display = RunsDisplay(console or Console(stderr=True))
    waiting = [job for job in jobs if not job.result.is_file()]
    _make_folders(setup.folder)
    if waiting:
        _prepare(setup, waiting)
    if len(waiting) < len(jobs):
        display.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
    outcome = _Runner(waiting, at_once, display).run()
    outcome.results = [_result(job) for job in jobs if job.result.is_file()]
    return outcome


def _make_folders(folder: Path) -> None:
    try:
        for name in ("runs", "results"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f" {folder} cannot be written: {error.strerror}; choose another folder"
        raise GridError(Argument("output"), reason) from error


def _prepare(setup: Setup, jobs: Sequence[Job]) -> None:
    """Check what the processes will be given, and tokenize it once for all of them."""
    tokenizer, base = load_tokenizer(setup.model), load(setup.model)
    require_tokenizer(tokenizer, setup.model)
    if isinstance(base, FastWeightsMixin):
        reason = f" {setup.model} is converted already: give the model that it was converted from"
        raise GridError(Argument("model"), reason)
    for job in jobs:
        _check_model(job, base)
    texts = [prepare(setup.data, tokenizer, limit=setup.limit)]
    with error_context(Argument("validation"), ": "):
        texts.append(prepare(setup.validation, tokenizer, limit=setup.limit))
    for tokens in texts:
        check_vocabulary(tokens, tokenizer, base.config)
    for length in {job.variant.recipe.length for job in jobs}:
        validation_rows(texts[1], length, length)
    for name, source in setup.tests.items():
        with error_context(Argument("test"), f" {name}: "):
            if not read_text(source).strip():
                raise DataError("it has no text in it")


def _check_model(job: Job, base: Any) -> None:
    config, recipe, limit = job.variant.config, job.variant.recipe, position_limit(base)
    longest = max(recipe.length, *(recipe.length_of(stage) for stage in recipe.stages))
    if limit is not None and longest > limit and (config is None or config.positions != "clamp"):
        raise GridError(f"run {job.name}: length {longest}: the base has positions for {limit} tokens only")
    if config is not None:
        try:
            check_layers(config, len(family_of(base).blocks(base)))
        except ValueError as error:
            raise GridError(f"run {job.name}: {error}") from error


def _result(job: Job) -> dict[str, Any]:
    """A run's result, with its cell as the grid has it now."""
    result = job.read_result()
    if result.get("cell") != job.variant.cell:
        result["cell"] = job.variant.cell
        write_json(job.result, result)
    return result


class _Training(NamedTuple):
    """`process` is None if the training had ended before."""

    job: Job
    process: Any
    lock: TextIO


class _Runner:
    """Starts processes, a few at once, until all jobs have had one or a signal comes."""

    def __init__(self, jobs: Sequence[Job], at_once: int, display: RunsDisplay) -> None:
        self.waiting, self.at_once, self.display = list(jobs), max(1, min(at_once, len(jobs))), display
        self.running: list[_Training] = []
        self.locked_elsewhere: set[str] = set()
        self.outcome = Outcome()

    def run(self) -> Outcome:
        with self._signals(), self.display:
            try:
                while self.running or (self.waiting and not self.outcome.stop_signal):
                    self._start_waiting()
                    time.sleep(POLL_SECONDS)
                    self._poll()
            finally:
                for training in self.running:
                    if training.process is not None:
                        training.process.kill()
        self.outcome.waiting += len(self.waiting)
        return self.outcome

    def _start_waiting(self) -> None:
        for job in list(self.waiting):
            if len(self.running) == self.at_once or self.outcome.stop_signal:
                return
            lock = job.acquire()
            if lock is not None:
                self.waiting.remove(job)
                self._start(job, lock)
            elif job.name not in self.locked_elsewhere:
                self.locked_elsewhere.add(job.name)
                self.display.print(f"{job.name}: waits for another process, which has this run")

    def _start(self, job: Job, lock: TextIO) -> None:
        self.display.start(job.name, job.variant.tokens)
        process = None
        if not job.is_trained():
            reason = _failure(job, lambda: job.prepare(1 / self.at_once))
            if reason:
                self._end(job, lock, reason)
                return
            process = self._launch(job, lock)
        self.running.append(_Training(job, process, lock))
        if self.outcome.stop_signal:  # it came in the meantime
            self._terminate()

    def _launch(self, job: Job, lock: TextIO) -> Any:
        arguments = ["train", "--resume", str(job.training), "--parent", str(os.getpid())]
        with job.log.open("a") as log:
            process = launch(arguments, log, lock, threads=max(1, torch.get_num_threads() // self.at_once))
        lock.truncate(0)
        print(process.pid, end="", file=lock, flush=True)
        return process

    def _terminate(self) -> None:
        for training in self.running:
            if training.process is not None:
                training.process.terminate()

    def _poll(self) -> None:
        for training in list(self.running):
            job, exit_code = training.job, 0 if training.process is None else training.process.poll()
            logged = last_logged(job.training / saved.LOG)
            loss = logged.get("validation_loss")
            self.display.update(job.name, logged.get("tokens"), None if loss is None else perplexity_from_loss(loss))
            if exit_code is not None:
                self.running.remove(training)
                # a run that diverged has a result, too, whatever its exit code is
                reason = _failure(job, job.finish) if job.is_trained() else _reason(job, exit_code)
                torch.cuda.empty_cache()  # the next run may need what the tests took
                self._end(job, training.lock, reason)

    def _end(self, job: Job, lock: TextIO, reason: str = "") -> None:
        lock.close()
        if not reason:
            self.display.end(job.name, describe(job.read_result()))
        elif self.outcome.stop_signal:
            self.outcome.waiting += 1
            self.display.end(job.name, "stopped")
        else:
            self.outcome.failed[job.name] = f"{reason} (see {job.log})"
            self.display.end(job.name, f"failed, {self.outcome.failed[job.name]}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """At the first Ctrl-C or SIGTERM all runs are asked to stop; a second Ctrl-C ends them at once."""

        def stop(number: int, _frame: Any) -> None:
            if not self.outcome.stop_signal:
                self.display.print("stopping: the runs finish their steps and save")
                self._terminate()
            self.outcome.stop_signal = number
            signal.signal(signal.SIGINT, before[signal.SIGINT])

        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # in another thread, the caller has the signals
            before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _failure(job: Job, step: Callable[[], None]) -> str:
    """Do a step of a run; returns why it failed, or nothing. Others continue, so the traceback goes to its log."""
    try:
        step()
    except Exception as error:
        with job.log.open("a") as log:
            traceback.print_exc(file=log)
        return str(error) or type(error).__name__
    return ""


def _reason(job: Job, exit_code: int) -> str:
    """Why a process failed: the last line that it printed, or the signal that ended it."""
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    lines = [line.strip() for line in job.log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].rpartition("rror: ")[2] if lines else f"exit code {exit_code}"


def describe(result: dict[str, Any]) -> str:
    """How a run ended, in words."""
    best, diverged = result["best"], result["diverged"]
    reached = "" if best is None else f", validation perplexity {best['perplexity']:,.2f}"
    return f"{'done' if diverged is None else 'diverged'} after {result['tokens']:,} tokens{reached}"


def last_logged(path: Path) -> dict[str, Any]:
    """The last number of tokens and the last validation loss near the end of a log."""
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            found |= json.loads(line)
        except ValueError:
            continue  # incomplete: the first line of the tail, or one that is being written
    return {name: found[name] for name in ("tokens", "validation_loss") if name in found}
