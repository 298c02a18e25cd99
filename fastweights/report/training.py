"""Training runs: how each went, stage by stage, and several runs in one plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastweights.report.page import Plot, Table
from fastweights.report.parts import is_wide, plot, table
from fastweights.report.plots import Line, Panel, Point
from fastweights.report.results import RunEntry
from fastweights.report.text import (
    axis_text,
    count_text,
    finite,
    perplexity_text,
    ratio,
    seconds_text,
    settings_text,
    times_text,
    whole,
)
from fastweights.results import BaseModel, TrainingResult, ValidationPoint

# A validation curve is cut off at so many times the worst of the runs' best perplexities.
CUT = 5


def outcomes(entries: Sequence[RunEntry]) -> list[str]:
    """In words: where each run ended."""
    return [words for entry in entries if (words := _outcome(entry))]


def _outcome(entry: RunEntry) -> str:
    run = entry.run
    if run.diverged:
        return f"{entry.label} {_divergence(run)}."
    if run.best is None or finite(run.best.perplexity) is None:
        return ""
    base = perplexity_of(run.base)
    times = ratio(run.best.perplexity, base)
    against = "" if times is None else f", {times_text(times)} the base model's {perplexity_text(base)}"
    perplexity = f"a validation perplexity of {perplexity_text(run.best.perplexity)}"
    reached = f"reached {perplexity} after {count_text(run.best.tokens)} tokens"
    words = reached if run.best.step else f"had its best validation before the first step, {perplexity}"
    notes = (None if run.finished else "The run is not finished.", run.warning)
    return " ".join([f"{entry.label} {words}{against}.", *filter(None, notes)])


def perplexity_of(point: ValidationPoint | BaseModel | None) -> float | None:
    """The perplexity of a point, None where there is no point."""
    return None if point is None else point.perplexity


def _divergence(run: TrainingResult) -> str:
    assert run.diverged is not None
    stage = f" (stage {_stage_name(run, run.diverged.stage)})"
    return f"diverged at step {whole(run.diverged.step)}{stage}: {run.diverged.reason}"


def _stage_name(run: TrainingResult, index: int) -> str:
    return run.stages[index].name if 0 <= index < len(run.stages) else str(index)


def training_tables(entries: Sequence[RunEntry]) -> list[Table]:
    """Tables of the runs and of their stages."""
    stages = [
        [
            entry.label,
            stage.name,
            stage.loss,
            whole(stage.steps),
            count_text(stage.tokens),
            seconds_text(stage.seconds),
        ]
        for entry in entries
        for stage in entry.run.stages
    ]
    note = "".join(f" {entry.label} {_divergence(entry.run)}." for entry in entries if entry.run.diverged)
    header = ["run", "settings", "tokens", "time", "best perplexity", "last", "base", "best × base"]
    return [
        *table("runs", header, [_run_cells(entry) for entry in entries], entries, names=2, note=note),
        *table("stages", ["run", "stage", "loss", "steps", "tokens", "time"], stages, entries, names=3),
    ]


def _run_cells(entry: RunEntry) -> list[str]:
    run = entry.run
    best, last, base = (perplexity_of(point) for point in (run.best, run.last, run.base))
    return [
        entry.label,
        settings_text(run.model.settings),
        count_text(run.tokens),
        seconds_text(run.seconds),
        perplexity_text(best),
        perplexity_text(last),
        perplexity_text(base),
        times_text(ratio(best, base)),
    ]


def training_plots(entries: Sequence[RunEntry]) -> list[Plot]:
    """Plots of training loss and of validation perplexity against tokens."""
    borders, stages = _stages([entry.run for entry in entries])
    x_label = f"tokens ({stages})" if stages else "tokens"
    losses = [line for i, entry in enumerate(entries) for line in _loss_lines(entry, i)]
    validations = [
        Line(entry.label, validation_of(entry.run), i, ends_badly=bool(entry.run.diverged))
        for i, entry in enumerate(entries)
    ]
    loss = Panel("Training loss", x_label, "loss", losses, log_y=is_wide(losses), borders=borders)
    validation = validation_panel(x_label, validations, bases_of([entry.run for entry in entries]), borders)
    return [*plot("loss", loss, entries), *plot("validation", validation, entries)]


def validation_of(run: TrainingResult) -> list[Point]:
    """Validation perplexity by tokens."""
    return [(point.tokens, point.perplexity) for point in run.validation]


def bases_of(runs: Sequence[TrainingResult]) -> list[float]:
    """The base model's perplexity: more than one where runs were validated differently."""
    return sorted({base for run in runs if (base := finite(perplexity_of(run.base)))})


def validation_panel(
    x_label: str,
    lines: Sequence[Line],
    bases: Sequence[float],
    borders: Sequence[tuple[float, str]] = (),
    title: str = "Validation perplexity",
) -> Panel:
    """A panel of validation perplexity, with the base models as horizontal lines."""
    levels = [(base, f"base model: {perplexity_text(base)}") for base in bases]
    shown = _shown_range(lines, bases)
    y_label = "perplexity" if shown is None else f"perplexity (cut off at {axis_text(shown[1])})"
    wide = is_wide(lines, levels)
    return Panel(title, x_label, y_label, lines, log_y=wide, y_range=shown, levels=levels, borders=borders)


def _shown_range(lines: Sequence[Line], bases: Sequence[float]) -> tuple[float, float] | None:
    """The range of the y axis, cut off far above the best of every run; None for all. A run may start at millions."""
    curves = [[y for _, y in line.points if (finite(y) or 0) > 0] for line in lines]
    best = [*map(min, filter(None, curves)), *bases]
    cut = float(f"{CUT * max(best):.2g}") if best else 0.0
    is_above = any(y > cut for curve in curves for y in curve)
    return (0.9 * min(best), cut) if best and is_above else None


def _loss_lines(entry: RunEntry, color: int) -> list[Line]:
    """A line for each stage: losses of different kinds are not one curve."""
    curve = entry.run.curve
    stages = list(dict.fromkeys(point.stage for point in curve))
    return [
        Line(
            entry.label if i == 0 else "",
            [(point.tokens, point.loss) for point in curve if point.stage == stage],
            color,
            markers=False,
            ends_badly=bool(entry.run.diverged) and i == len(stages) - 1,
        )
        for i, stage in enumerate(stages)
    ]


def _stages(runs: Sequence[TrainingResult]) -> tuple[list[tuple[float, str]], str]:
    """Where numbered stages start, and their names, if there are several and all runs have the same."""
    found = sorted((list(_stage_starts(run)) for run in runs), key=len)
    starts = found[-1] if found else []
    if len(starts) < 2 or any(other != starts[: len(other)] for other in found):
        return [], ""
    numbered = list(enumerate(starts, start=1))
    return [(start, str(i)) for i, (start, _) in numbered], ", ".join(f"{i} {name}" for i, (_, name) in numbered)


def _stage_starts(run: TrainingResult) -> Iterator[tuple[float, str]]:
    current, tokens = None, 0
    for point in run.curve:
        if point.stage != current:
            current = point.stage
            yield tokens, _stage_name(run, current)
        tokens = point.tokens


@dataclass(frozen=True)
class Curve:
    """Validation perplexity of a run by tokens, and whether the run diverged."""

    points: Sequence[Point]
    diverged: bool

    @classmethod
    def of(cls, run: TrainingResult) -> Curve:
        """The curve of a training result."""
        return cls(validation_of(run), run.diverged is not None)


def curves_panel(curves: Mapping[str, Sequence[Curve]], base: float | None) -> Panel:
    """Several curves under each label: a thin line for each, a thick one for their mean."""
    lines = [line for color, label in enumerate(curves) for line in seed_lines(label, curves[label], color)]
    return validation_panel("tokens", lines, [] if base is None else [base])


def seed_lines(label: str, curves: Sequence[Curve], color: int, dash: int = 0) -> list[Line]:
    """A run that diverged ends in a cross, marks the label and is left out of the mean."""
    diverged = sum(curve.diverged for curve in curves)
    thin = [Line("", curve.points, color, faint=True, ends_badly=curve.diverged, dash=dash) for curve in curves]
    sound = [dict(curve.points) for curve in curves if not curve.diverged]
    name = f"{label}* ({diverged} of {len(curves)} diverged)" if diverged else label
    return [*thin, Line(name, _mean(sound), color, markers=False, dash=dash)]


def _mean(curves: Sequence[Mapping[float, float]]) -> list[Point]:
    """Where all curves have a point."""
    mean = []
    for x in curves[0] if curves else ():
        values = [value for curve in curves if (value := finite(curve.get(x))) is not None]
        if len(values) == len(curves):
            mean.append((x, statistics.mean(values)))
    return mean
