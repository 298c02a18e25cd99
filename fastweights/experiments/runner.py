"""A comparison: the runs of a grid, several at once. Each is trained by `fastweights train --resume` and measured by
`fastweights measure-run`, in processes of their own. Runs that are done are skipped and started ones are resumed, so
the same command resumes a comparison."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console

from fastweights.conversion import check_layers
from fastweights.data.batches import validation_rows
from fastweights.data.encoding import usable_cores
from fastweights.data.readers import DataError, read_text
from fastweights.data.token_files import check_vocabulary, prepare
from fastweights.experiments.base_model import ComparisonBase
from fastweights.experiments.gpu_sharing import shared_gpu
from fastweights.experiments.grid import GridError, Variant
from fastweights.experiments.job import Job, Setup
from fastweights.experiments.measure import measure_run
from fastweights.loading import require_tokenizer
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.families import family_of
from fastweights.results import TrainingResult
from fastweights.training import checkpoint as saved
from fastweights.training.checks import check_positions
from fastweights.training.log import last_logged
from fastweights.training.trainer import perplexity_from_loss
from fastweights.utils.errors import Argument, Stopped, error_context
from fastweights.utils.files import FileLock, make_folder
from fastweights.utils.progress import RunsDisplay
from fastweights.utils.signals import StopNow, alarm, stop_signals

POLL_SECONDS = 0.2
# Exit code of a comparison whose time was over before its runs were done.
TIME_IS_OVER = 4
# PyTorch's variable for it, and as many as PyTorch starts at most.
COMPILE_THREADS, MOST_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS", 32


class Unfinished(Stopped):
    """A comparison some of whose runs failed or were stopped."""


@dataclass(frozen=True)
class Outcome:
    """`results` of the runs that are done, in the grid's order; for each run that failed, why; the number of runs."""

    results: list[TrainingResult]
    failed: dict[str, str]
    count: int
    stop_signal: int = 0

    def check(self) -> None:
        """Raise Unfinished unless all runs are done."""
        done = f"{len(self.results)} of {self.count} runs are done; the same command resumes"
        failed = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
        if self.stop_signal == signal.SIGALRM and len(self.results) < self.count:
            more = f"; {len(self.failed)} failed: {failed}" if failed else ""
            raise Unfinished(f"the time is over: {done}{more}", exit_code=TIME_IS_OVER)
        if self.stop_signal not in (0, signal.SIGALRM):
            name = signal.Signals(self.stop_signal).name
            raise Unfinished(f"stopped by {name}: {done}", exit_code=128 + self.stop_signal)
        if failed:
            raise Unfinished(f"{len(self.failed)} of {self.count} runs failed, the same command tries again: {failed}")


def name_tests(sources: Sequence[str]) -> dict[str, str]:
    """Data sources by their names: that of the file, unless several have it."""
    names = [Path(source).name for source in sources]
    return {name if names.count(name) == 1 else source: source for name, source in zip(names, sources, strict=True)}


def launch(
    arguments: Sequence[str], log: TextIO, lock: FileLock, threads: int, environment: Mapping[str, str]
) -> subprocess.Popen:
    """Start `fastweights ARGUMENTS`. It does not get the terminal's Ctrl-C, and it inherits the lock of its run."""
    return subprocess.Popen(
        [sys.executable, "-m", "fastweights", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), **environment},
        pass_fds=(lock.fileno(),),
        start_new_session=True,
    )


def _compile_threads(processes: int) -> dict[str, str]:
    """What limits the workers of torch.compile: every process would start one for each core."""
    if processes == 1 or COMPILE_THREADS in os.environ:
        return {}
    return {COMPILE_THREADS: str(max(1, min(MOST_COMPILE_THREADS, usable_cores() // processes)))}


def compare(variants: Sequence[Variant], setup: Setup, at_once: int = 1, minutes: float | None = None) -> Outcome:
    """Run the variants that are not done yet. Progress is shown on standard error.

    Args:
        variants: the runs of a grid.
        setup: what they share.
        at_once: how many are trained at the same time. They share the cores and the memory of the device.
        minutes: when to stop, counted from this call: the runs finish their steps and save. None: when all are done.

    Raises:
        FastWeightsError: what can be known to be wrong before the first process starts.
    """
    started, setup = time.monotonic(), setup.with_absolute_paths()
    jobs = [Job(setup, variant) for variant in variants]
    for job in jobs:
        job.check_unchanged()
    waiting = [job for job in jobs if not job.result.is_file()]
    _make_folders(setup.folder)
    display = RunsDisplay(Console(stderr=True))
    with ComparisonBase(setup.model, setup.folder) as base:
        if waiting:
            _prepare(setup, base, waiting)
        if len(waiting) < len(jobs):
            display.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
        runner = _Runner(waiting, base, at_once, setup.device, display)
        runner.run(None if minutes is None else 60 * minutes - (time.monotonic() - started))
        results = [job.read_result() for job in jobs if job.result.is_file()]
        if len(results) == len(jobs) and not setup.keep:
            base.delete_copy()
    return Outcome(results, runner.failed, len(jobs), runner.stop_signal)


def _make_folders(folder: Path) -> None:
    try:
        for name in ("runs", "results"):
            make_folder(folder / name)
    except OSError as error:
        reason = f" {folder} cannot be written: {error.strerror}; choose another folder"
        raise GridError(Argument("output"), reason) from error


def _prepare(setup: Setup, base: ComparisonBase, jobs: Sequence[Job]) -> None:
    """Check what the processes will be given, and tokenize it once for all of them."""
    tokenizer = require_tokenizer(base.tokenizer, setup.model)
    if isinstance(base.model, FastWeightsMixin):
        reason = f" {setup.model} is converted already: give the model that it was converted from"
        raise GridError(Argument("model"), reason)
    for job in jobs:
        with error_context(f"run {job.name}: ", plain=True):
            _check_model(job, base.model)
    check_vocabulary(prepare(setup.data, tokenizer, limit=setup.limit), tokenizer, base.model.config)
    with error_context(Argument("validation"), ": "):
        validation = prepare(setup.validation, tokenizer, limit=setup.limit)
        check_vocabulary(validation, tokenizer, base.model.config)
        for length in {job.variant.recipe.length for job in jobs}:
            validation_rows(validation, length, length)
    for name, source in setup.tests.items():
        with error_context(Argument("test"), f" {name}: "):
            if not read_text(source).strip():
                raise DataError("it has no text in it")


def _check_model(job: Job, base: Any) -> None:
    config = job.variant.config
    if config is not None:
        check_layers(config, len(family_of(base).blocks(base)))
    if config is None or config.positions != "clamp":
        check_positions(job.config, base)


class _Runner:
    """Starts processes, a few at once, until all jobs have had one or a signal comes."""

    def __init__(
        self, jobs: Sequence[Job], base: ComparisonBase, at_once: int, device: str | None, display: RunsDisplay
    ) -> None:
        self.device = device
        self.waiting, self.at_once, self.display = list(jobs), max(1, min(at_once, len(jobs))), display
        self.base = base
        self.environment: dict[str, str] = {}  # variables of the processes, besides this one's
        self.running: dict[Job, Any] = {}  # and their processes
        self.next: Job | None = None  # what starts when one of them has ended
        self.prepared: dict[Job, str] = {}  # why preparing a run failed, or nothing
        self.measured: set[Job] = set()  # those whose process measures
        self.locked_elsewhere: set[str] = set()
        self.failed: dict[str, str] = {}
        self.stop_signal, self._stops_at_once = 0, False

    def run(self, seconds: float | None) -> None:
        """Run the jobs, for so many seconds at most and the time that stopping takes."""
        with (
            stop_signals(self.stop, self._acknowledge),
            alarm(seconds, self.stop),
            self.display,
            shared_gpu(self.at_once, self.device, self.display.print) as environment,
        ):
            self.environment = environment | _compile_threads(self.at_once)
            try:
                while self.running or ((self.next or self.waiting) and not self.stop_signal):
                    self._start_waiting()
                    self._prepare_next()
                    if not any(job.needs_base() for job in self.waiting):
                        self.base.release()
                    time.sleep(POLL_SECONDS)
                    for job in list(self.running):
                        self._poll(job)
            finally:
                for process in self.running.values():
                    process.kill()
                if self.next is not None:
                    self.next.lock.release()

    def stop(self, number: int) -> None:
        """Ask all runs to save and to stop. What can be done again, preparing and testing a run, ends at once."""
        if not self.stop_signal:
            for process in self.running.values():
                process.terminate()
        self.stop_signal = self.stop_signal or number
        if self._stops_at_once:
            raise StopNow(number)

    def _acknowledge(self, number: int) -> None:
        again = "; press Ctrl-C again to stop without saving" if number == signal.SIGINT else ""
        self.display.print(f"stopping: the runs finish their steps and save{again}")

    def _attempt(self, job: Job, step: Callable[[], None]) -> str:
        """Do a step of a run; returns why it failed, or nothing. A signal ends it."""
        self._stops_at_once = True
        try:
            return _failure(job, step)
        except StopNow:
            return "stopped"
        finally:
            self._stops_at_once = False

    def _start_waiting(self) -> None:
        while len(self.running) < self.at_once and not self.stop_signal:
            job, self.next = self.next or self._acquire_waiting(), None
            if job is None:
                return
            self._start(job)

    def _prepare_next(self) -> None:
        """Prepare a run while the others run, so that it starts as soon as one of them has ended."""
        if self.next is None and len(self.running) == self.at_once and not self.stop_signal:
            self.next = job = self._acquire_waiting()
            if job is not None and not job.is_trained():
                self.prepared[job] = self._prepare(job)

    def _acquire_waiting(self) -> Job | None:
        """The first waiting run that no other process has."""
        for job in self.waiting:
            if job.acquire():
                self.waiting.remove(job)
                return job
            if job.name not in self.locked_elsewhere:
                self.locked_elsewhere.add(job.name)
                self.display.print(f"{job.name}: waits for another process, which has this run")
        return None

    def _prepare(self, job: Job) -> str:
        """Prepare a run, unless that was done; returns why it failed, or nothing."""
        if job in self.prepared:
            return self.prepared.pop(job)
        return self._attempt(job, lambda: job.prepare(self.base, 1 / self.at_once, self.display.print))

    def _start(self, job: Job) -> None:
        self.display.start(job.name, job.variant.tokens)
        if job.result.is_file():  # another comparison was faster
            self._end(job, "")
        elif job.is_trained():
            self._measure(job)
        elif reason := self._prepare(job):
            self._end(job, reason)
        else:
            self._launch(job, ["train", "--resume", str(job.training), "--parent", str(os.getpid())])

    def _launch(self, job: Job, arguments: Sequence[str]) -> None:
        with job.log.open("a") as log:
            threads = max(1, torch.get_num_threads() // self.at_once)
            process = launch(arguments, log, job.lock, threads, self.environment)
        job.lock.name_holder(process.pid)
        self.running[job] = process
        if self.stop_signal:  # it came in the meantime
            process.terminate()

    def _poll(self, job: Job) -> None:
        exit_code, logged = self.running[job].poll(), last_logged(job.training / saved.LOG)
        loss = logged.get("validation_loss")
        self.display.update(job.name, logged.get("tokens"), None if loss is None else perplexity_from_loss(loss))
        if exit_code is not None:
            del self.running[job]
            if job in self.measured:
                self._end(job, _reason(job, exit_code) if exit_code else "")
            elif job.is_trained():  # a run that diverged has a result, too, whatever its exit code is
                self._measure(job)
            else:
                self._end(job, _reason(job, exit_code))

    def _measure(self, job: Job) -> None:
        """Start the process that measures a trained run, unless it is time to stop or there is nothing to measure."""
        if self.stop_signal:
            self._end(job, "stopped")
        elif not job.setup.measures:
            self._end(job, self._attempt(job, lambda: measure_run(job.training, job.result, job.name, {})))
        else:
            self.display.print(f"{job.name}: trained, measuring it on {', '.join(job.setup.measures)}")
            self.measured.add(job)
            self._launch(job, job.measure_arguments())

    def _end(self, job: Job, reason: str) -> None:
        reason = reason or self._attempt(job, job.finish)
        job.lock.release()
        if not reason:
            self.display.end(job.name, outcome_text(job.read_result()))
        elif self.stop_signal:
            self.display.end(job.name, "stopped")
        else:
            self.failed[job.name] = f"{reason} (see {job.log})"
            self.display.end(job.name, f"failed, {self.failed[job.name]}")


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
    lines = job.log.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "").strip().rpartition("rror: ")[2]


def outcome_text(result: TrainingResult) -> str:
    """How a run ended, in words."""
    reached = "" if result.best is None else f", validation perplexity {result.best.perplexity:,.2f}"
    worse = "" if result.warning is None else ", worse at the end than before the first step"
    return f"{'done' if result.diverged is None else 'diverged'} after {result.tokens:,} tokens{reached}{worse}"
