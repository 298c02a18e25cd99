"""Progress on the terminal: bars, and what a training run shows. No other module builds one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SMOOTHING = 0.9
# Where there is no terminal to draw a bar on, a line is printed every so many steps.
LINE_EVERY = 50
Item = TypeVar("Item")


def progress_bar(
    *columns: str | ProgressColumn, enabled: bool = True, console: Console | None = None, transient: bool = True
) -> Progress:
    """A bar on stderr, shown on a terminal only: elsewhere it would leave an empty line.

    Args:
        columns: What to show; by default a description, the bar, the count, and the time elapsed and left.
        enabled: False shows nothing.
        console: Where to show it, instead of stderr.
        transient: Whether the bar disappears at the end.
    """
    console = console or Console(stderr=True)
    usual = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *_times())
    disable = not (enabled and console.is_terminal)
    return Progress(*columns or usual, console=console, transient=transient, disable=disable)


def track(items: Sequence[Item], description: str, enabled: bool = True) -> Iterable[Item]:
    """Yield the items, with a bar that counts them."""
    with progress_bar(enabled=enabled) as bar:
        yield from bar.track(items, description=description)


def _times() -> tuple[ProgressColumn, ...]:
    return TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()


class Display:
    """What a training run shows: a bar with loss, throughput and time left, and a line for each validation."""

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            *_times(),
            console=self.console,
            disable=not enabled,
        )
        self._task: Any = None
        self._loss: float | None = None

    @property
    def enabled(self) -> bool:
        return not self._bar.disable

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._bar.disable = not enabled

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str, steps: int, done: int) -> None:
        """Start the bar of a stage of which `done` steps are finished."""
        self._loss = None
        self._task = self._bar.add_task(name, total=steps, completed=done, loss="–", speed="–")

    def step(self, loss: float, tokens: int) -> None:
        """Show a finished step of `tokens` tokens."""
        self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        speed = self._bar.tasks[-1].speed
        throughput = "–" if not speed else f"{speed * tokens:,.0f}"
        self._bar.update(self._task, advance=1, loss=f"{self._loss:.4f}", speed=throughput)
        done = int(self._bar.tasks[-1].completed)
        if not self.console.is_terminal and done % LINE_EVERY == 0:
            self.print(f"  step {done}: loss {self._loss:.4f}, {throughput} tokens/s")

    def track(self, items: Sequence[Item], name: str) -> Iterator[Item]:
        """Yield the items, with a bar that counts them."""
        task = self._bar.add_task(name, total=len(items), loss="–", speed="–")
        for item in items:
            yield item
            self._bar.advance(task)
        self._bar.remove_task(task)

    def validation(self, tokens: int, perplexity: float, base: float | None) -> None:
        """Print a validation's perplexity, and its ratio to the base model's where that is known."""
        ratio = "" if base is None else f", {perplexity / base:.3f} × the base"
        self.print(f"  after {tokens:,} tokens: validation perplexity {perplexity:,.2f}{ratio}")

    def print(self, text: str) -> None:
        if self.enabled:
            self.console.print(text, highlight=False, markup=False)


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
        self._tasks[name] = self._bars.add_task(name, total=tokens, tokens="starting", perplexity="")
        if not self.console.is_terminal:
            self.print(f"{name}: started")

    def update(self, name: str, tokens: int | None, perplexity: float | None) -> None:
        task = self._tasks[name]
        if tokens is not None:
            total = self._bars.tasks[self._bars.task_ids.index(task)].total
            self._bars.update(task, completed=tokens, tokens=f"{tokens:,} of {total:,} tokens")
        if perplexity is not None:
            self._bars.update(task, perplexity=f"validation {perplexity:,.2f}")

    def end(self, name: str, how: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
            self._bars.refresh()
        self.print(f"{name}: {how}")

    def print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
