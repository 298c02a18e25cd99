"""Progress on the terminal: bars, and what a training run shows. No other module builds one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SMOOTHING = 0.9
# Where there is no terminal to draw a bar on, a line is printed every so many steps.
LINE_EVERY = 50
# There, a line says what is being done if that takes more than so many seconds.
LINE_AFTER = 2.0
# The speed is averaged over so many seconds: on a CPU a step may take minutes.
SPEED_SECONDS = 600
Item = TypeVar("Item")


def progress_bar(
    *columns: str | ProgressColumn,
    enabled: bool = True,
    console: Console | None = None,
    transient: bool = True,
    speed_seconds: float = 30.0,
) -> Progress:
    """A bar on stderr, shown on a terminal only: elsewhere it would leave an empty line.

    Args:
        columns: What to show; by default a description, the bar, the count, and the time elapsed and left.
        enabled: False shows nothing.
        console: Where to show it, instead of stderr.
        transient: Whether the bar disappears at the end.
        speed_seconds: The speed, and so the time left, is averaged over this time.
    """
    console = console or Console(stderr=True)
    usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *_times())
    bar = Progress(*columns or usual, console=console, transient=transient, speed_estimate_period=speed_seconds)
    _enable(bar, enabled)
    return bar


def _enable(bar: Progress, enabled: bool) -> None:
    """Show a bar, or nothing. Without a terminal there is nothing to show."""
    bar.disable = not (enabled and bar.console.is_terminal)


def track(items: Sequence[Item], description: str, enabled: bool = True) -> Iterable[Item]:
    """Yield the items, with a bar that counts them."""
    with progress_bar(enabled=enabled) as bar:
        yield from bar.track(items, description=description)


def _times() -> tuple[ProgressColumn, ...]:
    return TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()


def duration_text(seconds: float) -> str:
    """A duration in two digits or so, such as "45 s" or "3.5 hours"."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.{0 if seconds >= 10 * length else 1}f} {unit}"
    return f"{seconds:.0f} s"


class _Count(MofNCompleteColumn):
    """Nothing where it is not known how much there is to do."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class _TimeLeft(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        return Text() if task.total is None else Text("left ") + super().render(task)


class Display:
    """What a training run shows: what it is doing, a stage's loss, throughput and time left, and its results as lines.

    On a terminal bars show what is under way, and disappear when it is done. Elsewhere there are a few lines.
    """

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar = progress_bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Count(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            _TimeLeft(),
            console=self.console,
            speed_seconds=SPEED_SECONDS,
        )
        self.enabled = enabled
        self._stage: Any = None
        self._loss: float | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is shown."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        _enable(self._bar, enabled)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextmanager
    def phase(self, name: str, total: int | None = None, announce: bool = True) -> Iterator[Callable[[], None]]:
        """Show in its block what the run is doing.

        Args:
            name: What it is doing.
            total: How many parts that has; None where it is not known. The block calls what it gets after each.
            announce: Whether to print a line where there is no terminal. False for what is done often.
        """
        task = self._add(name, total)
        with self.line(name) if announce else nullcontext():
            try:
                yield lambda: self._bar.advance(task)
            finally:
                self._remove(task)

    @contextmanager
    def line(self, name: str) -> Iterator[None]:
        """Where there is no terminal to draw a bar on, print what the run is doing if its block takes some time."""
        timer = threading.Timer(LINE_AFTER, self.print, [name])
        timer.daemon = True
        if not self.console.is_terminal:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def stage(self, name: str, steps: int, done: int) -> None:
        """Start the bar of a stage of which `done` steps are finished."""
        self._loss = None
        self._stage = self._add(name, steps, done)

    def step(self, loss: float, tokens: int) -> None:
        """Show a finished step of `tokens` tokens."""
        self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        self._bar.update(self._stage, advance=1)
        task = self._stage_task()
        throughput = f", {task.speed * tokens:,.0f} tokens/s" if task.speed else ""
        shown = f"loss {self._loss:.4f}{throughput}"
        self._bar.update(self._stage, shown=shown)
        if not self.console.is_terminal and int(task.completed) % LINE_EVERY == 0:
            self.print(f"  step {int(task.completed)}: {shown}")

    def end_stage(self) -> None:
        """Print a line in place of the bar of a stage."""
        task = self._stage_task()
        parts = (f"{int(task.completed)}/{int(task.total or 0)} steps", task.fields["shown"])
        self.print(f"{task.description}: {', '.join(filter(None, (*parts, duration_text(task.elapsed or 0.0))))}")
        self._remove(self._stage)

    def validation(self, tokens: int, perplexity: float, base: float | None) -> None:
        """Print a validation's perplexity, and its ratio to the base model's where that is known."""
        ratio = "" if base is None else f", {perplexity / base:.3f} × the base"
        self.print(f"  after {tokens:,} tokens: validation perplexity {perplexity:,.2f}{ratio}")

    def print(self, text: str) -> None:
        """Print a line, where the display is enabled."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _stage_task(self) -> Task:
        return self._bar.tasks[self._bar.task_ids.index(self._stage)]

    def _add(self, name: str, total: int | None, done: int = 0) -> Any:
        """Add a bar. The display is live only while there is one, so that others can show theirs in between."""
        task = self._bar.add_task(escape(name), total=total, completed=done, shown="")
        self._bar.start()
        return task

    def _remove(self, task: Any) -> None:
        if len(self._bar.tasks) == 1:
            self._bar.stop()
        self._bar.remove_task(task)


class RunsDisplay:
    """A bar for each of several training runs, or lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._tasks: dict[str, Any] = {}
        self._bars = progress_bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[tokens]}"),
            TextColumn("{task.fields[perplexity]}"),
            TimeElapsedColumn(),
            console=console,
            transient=False,
        )

    def __enter__(self) -> RunsDisplay:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, name: str, tokens: int) -> None:
        """Show a run that will see this many tokens."""
        self._tasks[name] = self._bars.add_task(name, total=tokens, tokens="starting", perplexity="")
        if not self.console.is_terminal:
            self.print(f"{name}: started")

    def update(self, name: str, tokens: int | None, perplexity: float | None) -> None:
        """Show how far a run has come, as far as that is known."""
        task = self._tasks[name]
        if tokens is not None:
            total = self._bars.tasks[self._bars.task_ids.index(task)].total
            self._bars.update(task, completed=tokens, tokens=f"{tokens:,} of {total:,} tokens")
        if perplexity is not None:
            self._bars.update(task, perplexity=f"validation {perplexity:,.2f}")

    def end(self, name: str, how: str) -> None:
        """Replace the bar of a run by a line that says how it ended."""
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
            self._bars.refresh()
        self.print(f"{name}: {how}")

    def print(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
