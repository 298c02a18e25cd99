"""A comparison: the runs of a grid, each a process, several at once. What is done is skipped, what was begun
goes on: the same command resumes it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from fastweights.conversion import check_layers
from fastweights.data.batches import validation_rows
from fastweights.data.readers import DataError, given_by, read_text
from fastweights.data.token_files import check_vocabulary, prepare
from fastweights.experiments.grid import GridError, Variant
from fastweights.experiments.job import Job, Setup, read_result, work
from fastweights.loading import load, load_tokenizer, require_tokenizer
from fastweights.modeling.classes import FastWeightsMixin, position_limit
from fastweights.modeling.families import family_of
from fastweights.training import checkpoint as saved
from fastweights.utils.errors import Stopped
from fastweights.utils.files import write_json
from fastweights.utils.progress import progress_bar

# A forked process has no use of the GPU once its parent had.
PROCESSES: Any = multiprocessing.get_context("spawn")
POLL_SECONDS = 0.5
# Enough of a log's end to hold a validation, as a rule.
TAIL_BYTES = 2**16


class Unfinished(Stopped):
    """A comparison some of whose runs failed or were stopped."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        self.exit_code = exit_code
        super().__init__(message)


@dataclass
class Outcome:
    """`results` of the runs that are done, in the grid's order; of those that failed, why."""

    results: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    waiting: int = 0
    stop_signal: int = 0

    def check(self) -> None:
        """Raises unless all runs are done."""
        count = len(self.results) + len(self.failed) + self.waiting
        if self.stop_signal:
            done = f"stopped by {signal.Signals(self.stop_signal).name}: {len(self.results)} of {count} runs are done"
            raise Unfinished(f"{done}; go on with the same command", 128 + self.stop_signal)
        if self.failed:
            listed = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise Unfinished(f"{len(self.failed)} of {count} runs failed, the same command tries again: {listed}")


def make_setup(folder: Path, model: str, data: str, validation: str, tests: Sequence[str] = (), **more: Any) -> Setup:
    """Paths are absolute: a comparison may go on from another folder. A test has its file's name, if no other has."""
    names = [Path(test).name for test in tests]
    named = {name if names.count(name) == 1 else test: test for name, test in zip(names, tests, strict=True)}
    return Setup(
        folder=folder.absolute(),
        model=_absolute(model),
        data=_absolute(data),
        validation=_absolute(validation),
        tests={name: _absolute(test) for name, test in named.items()},
        **more,
    )


def _absolute(source: str) -> str:
    return str(Path(source).absolute()) if Path(source).exists() else source


def compare(variants: Sequence[Variant], setup: Setup, at_once: int = 1, console: Console | None = None) -> Outcome:
    """Run what is not done yet. What can be known to be wrong is refused before the first process starts."""
    jobs = [Job(setup, variant) for variant in variants]
    for job in jobs:
        job.check_unchanged()
    console = console or Console(stderr=True)
    waiting = [job for job in jobs if not job.result.is_file()]
    _make_folders(setup.folder)
    if waiting:
        _prepare(setup, waiting)
    if len(waiting) < len(jobs):
        _say(console, f"{len(jobs) - len(waiting)} of {len(jobs)} runs are done already")
    outcome = _Runner(waiting, at_once, console).run()
    outcome.results = [_result(job) for job in jobs if job.result.is_file()]
    return outcome


def _make_folders(folder: Path) -> None:
    try:
        for name in ("runs", "results"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GridError(f"--output {folder} cannot be written: {error.strerror}; choose another folder") from error


def _prepare(setup: Setup, jobs: Sequence[Job]) -> None:
    """Check what the processes will be given, and tokenise it once, for all of them."""
    tokenizer, base = load_tokenizer(setup.model), load(setup.model)
    require_tokenizer(tokenizer, setup.model)
    if isinstance(base, FastWeightsMixin):
        raise GridError(f"--model {setup.model} is converted already: give the model that it was made from")
    for job in jobs:
        _check_model(job, base)
    texts = [prepare(setup.data, tokenizer, limit=setup.limit)]
    with given_by("--validation"):
        texts.append(prepare(setup.validation, tokenizer, limit=setup.limit))
    for tokens in texts:
        check_vocabulary(tokens, tokenizer, base.config)
    for length in {job.variant.recipe.length for job in jobs}:
        validation_rows(texts[1], length, length)
    for name, source in setup.tests.items():
        with given_by(f"--test {name}"):
            if not read_text(source).strip():
                raise DataError("it has no text in it")


def _check_model(job: Job, base: Any) -> None:
    config, recipe, limit = job.variant.config, job.variant.recipe, position_limit(base)
    longest = max(recipe.length, *(recipe.length_of(stage) for stage in recipe.stages))
    if limit is not None and longest > limit and (config is None or config.positions != "clamp"):
        raise GridError(f"run {job.variant.name}: length {longest}: the base has positions for {limit} tokens only")
    if config is not None:
        try:
            check_layers(config, len(family_of(base).blocks(base)))
        except ValueError as error:
            raise GridError(f"run {job.variant.name}: {error}") from error


def _result(job: Job) -> dict[str, Any]:
    """A run's result, its cell as the grid has it now."""
    result = read_result(job)
    if result.get("cell") != job.variant.cell:
        result["cell"] = job.variant.cell
        write_json(job.result, result)
    return result


class _Runner:
    """Processes, a few at once, until all jobs have had one or a signal comes."""

    def __init__(self, jobs: Sequence[Job], at_once: int, console: Console) -> None:
        self.waiting, self.at_once, self.console = deque(jobs), max(1, min(at_once, len(jobs))), console
        self.running: dict[Any, tuple[Job, Any]] = {}
        self.asked: set[Any] = set()
        self.outcome = Outcome()
        self.bars = progress_bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[tokens]}"),
            TextColumn("{task.fields[perplexity]}"),
            TimeElapsedColumn(),
            console=console,
            transient=False,
        )

    def run(self) -> Outcome:
        with self._signals(), self.bars:
            try:
                while self.running or (self.waiting and not self.outcome.stop_signal):
                    while self.waiting and len(self.running) < self.at_once and not self.outcome.stop_signal:
                        self._start(self.waiting.popleft())
                    self._ask_to_stop()  # one may have been starting when the signal came
                    wait([process.sentinel for process in self.running], POLL_SECONDS)
                    self._look()
            finally:
                for process in self.running:
                    process.kill()
        self.outcome.waiting += len(self.waiting)
        return self.outcome

    def _start(self, job: Job) -> None:
        process = PROCESSES.Process(target=work, args=(job, self.at_once))
        with _without_ctrl_c():
            process.start()
        bar = self.bars.add_task(job.variant.name, total=job.variant.tokens, tokens="starting", perplexity="")
        self.running[process] = job, bar
        if not self.console.is_terminal:
            _say(self.console, f"{job.variant.name}: started")

    def _ask_to_stop(self) -> None:
        for process in list(self.running):
            if self.outcome.stop_signal and process not in self.asked:
                self.asked.add(process)
                process.terminate()

    def _look(self) -> None:
        for process, (job, bar) in list(self.running.items()):
            self._show(job, bar)
            if process.exitcode is not None:
                del self.running[process]
                self.bars.remove_task(bar)
                self.bars.refresh()
                self._end(job, process.exitcode)
                process.close()

    def _show(self, job: Job, bar: Any) -> None:
        found = last_logged(job.training / saved.LOG)
        if "tokens" in found:
            tokens = f"{found['tokens']:,} of {job.variant.tokens:,} tokens"
            self.bars.update(bar, completed=found["tokens"], tokens=tokens)
        if "validation_loss" in found:
            self.bars.update(bar, perplexity=f"validation {_exp(found['validation_loss']):,.2f}")

    def _end(self, job: Job, exit_code: int) -> None:
        name = job.variant.name
        if job.result.is_file():
            _say(self.console, f"{name}: {describe(read_result(job))}")
        elif self.outcome.stop_signal:
            self.outcome.waiting += 1
            _say(self.console, f"{name}: stopped")
        else:
            self.outcome.failed[name] = f"{_reason(job, exit_code)} (see {job.log})"
            _say(self.console, f"{name}: failed, {self.outcome.failed[name]}")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """At the first Ctrl-C or SIGTERM all runs are asked to stop; a second Ctrl-C ends them at once."""

        def stop(number: int, _frame: Any) -> None:
            self.outcome.stop_signal = number
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            _say(self.console, "stopping: the runs finish their steps and save")
            self._ask_to_stop()

        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere, whoever runs us has the signals
            before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """A terminal's Ctrl-C reaches all its processes. Those started here ignore it: they are told to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _reason(job: Job, exit_code: int) -> str:
    """Why a process failed: the last line of its traceback, or the signal that ended it."""
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    lines = job.log.read_text(errors="replace").split("\n") if job.log.is_file() else []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return said.rpartition("Error: ")[2] or f"exit code {exit_code}"


def describe(result: dict[str, Any]) -> str:
    """How a run ended, in words."""
    best, diverged = result["best"], result["diverged"]
    reached = "" if best is None else f", validation perplexity {best['perplexity']:,.2f}"
    return f"{'done' if diverged is None else 'diverged'} after {result['tokens']:,} tokens{reached}"


def last_logged(path: Path) -> dict[str, Any]:
    """The last tokens and the last validation loss near the end of a log."""
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
            continue  # cut off, where we begin or where it is being written
    return {name: found[name] for name in ("tokens", "validation_loss") if name in found}


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))
