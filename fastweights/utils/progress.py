"""What a person sees of a training run: a bar with loss, speed and time left, and a line for each validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SMOOTHING = 0.9
# Where there is no terminal to draw a bar on, a line every so many steps.
LINE_EVERY = 50
Item = TypeVar("Item")


class Display:
    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
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
        self._loss = None
        self._task = self._bar.add_task(name, total=steps, completed=done, loss="–", speed="–")

    def step(self, loss: float, tokens: int) -> None:
        self._loss = loss if self._loss is None else SMOOTHING * self._loss + (1 - SMOOTHING) * loss
        speed = self._bar.tasks[-1].speed
        shown = "–" if not speed else f"{speed * tokens:,.0f}"
        self._bar.update(self._task, advance=1, loss=f"{self._loss:.4f}", speed=shown)
        done = int(self._bar.tasks[-1].completed)
        if not self.console.is_terminal and done % LINE_EVERY == 0:
            self.say(f"  step {done}: loss {self._loss:.4f}, {shown} tokens/s")

    def track(self, items: Sequence[Item], name: str) -> Iterator[Item]:
        """The items, with a bar while they last."""
        task = self._bar.add_task(name, total=len(items), loss="–", speed="–")
        for item in items:
            yield item
            self._bar.advance(task)
        self._bar.remove_task(task)

    def validation(self, tokens: int, perplexity: float, base: float | None) -> None:
        ratio = "" if base is None else f", {perplexity / base:.3f} × the base"
        self.say(f"  after {tokens:,} tokens: validation perplexity {perplexity:,.2f}{ratio}")

    def say(self, text: str) -> None:
        if self.enabled:
            self.console.print(text, highlight=False, markup=False)
