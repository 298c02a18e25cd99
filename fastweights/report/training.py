"""Training runs: how each went, stage by stage, and several runs in one plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastweights.report.page import Plot, Table
from fastweights.report.parts import is_wide, plot, points, rows_of, table
from fastweights.report.plots import Line, Panel
from fastweights.report.results import (
    MISSING,
    Entry,
    axis_text,
    count_text,
    finite,
    objects,
    perplexity_text,
    ratio,
    seconds_text,
    settings_text,
    times_text,
    value_at,
    whole,
)

CUT = 5


def outcomes(runs: Sequence[Entry]) -> list[str]:
    """In words: where each run ended."""
    return [words for run in runs if (words := _outcome(run))]


def _outcome(run: Entry) -> str:
    if run.diverged:
        return f"{run.label} {_divergence(run)}."
    best, base = value_at(run.body, "best", "perplexity"), value_at(run.body, "base", "perplexity")
    if finite(best) is None:
        return ""
    times = ratio(best, base)
    against = "" if times is None else f", {times_text(times)} the base model's {perplexity_text(base)}"
    after = count_text(value_at(run.body, "best", "tokens"))
    unfinished = " The run is not finished." if run.body.get("finished") is False else ""
    words = f"{run.label} reached a validation perplexity of {perplexity_text(best)} after {after} tokens"
    return f"{words}{against}.{unfinished}"


def _divergence(run: Entry) -> str:
    stage, step = value_at(run.diverged, "stage"), whole(value_at(run.diverged, "step"))
    names = [str(of.get("name")) for of in objects(run.body, "stages")]
    stage = names[stage] if isinstance(stage, int) and 0 <= stage < len(names) else stage
    during = "" if stage in (None, "") else f" (stage {stage})"
    return f"diverged at step {step}{during}: {value_at(run.diverged, 'reason') or 'no reason was noted'}"


def training_tables(runs: Sequence[Entry]) -> list[Table]:
    stages = [
        [
            run.label,
            str(stage.get("name") or MISSING),
            str(stage.get("loss") or MISSING),
            whole(stage.get("steps")),
            count_text(stage.get("tokens")),
            seconds_text(stage.get("seconds")),
        ]
        for run, stage in rows_of(runs, "stages")
    ]
    note = "".join(f" {run.label} {_divergence(run)}." for run in runs if run.diverged)
    header = ["run", "settings", "tokens", "time", "best perplexity", "last", "base", "best × base"]
    return [
        *table("runs", header, [_run_cells(run) for run in runs], runs, names=2, note=note),
        *table("stages", ["run", "stage", "loss", "steps", "tokens", "time"], stages, runs, names=3),
    ]


def _run_cells(run: Entry) -> list[str]:
    best, last, base = (value_at(run.body, name, "perplexity") for name in ("best", "last", "base"))
    return [
        run.label,
        settings_text(value_at(run.body, "model", "settings")),
        count_text(run.body.get("tokens")),
        seconds_text(run.body.get("seconds")),
        perplexity_text(best),
        perplexity_text(last),
        perplexity_text(base),
        times_text(ratio(best, base)),
    ]


def training_plots(runs: Sequence[Entry]) -> list[Plot]:
    borders, stages = _stages(runs)
    x_label = f"tokens ({stages})" if stages else "tokens"
    losses = [line for i, run in enumerate(runs) for line in _loss_lines(run, i)]
    validations = [
        Line(run.label, validation_of(run.body), i, ends_badly=bool(run.diverged)) for i, run in enumerate(runs)
    ]
    loss = Panel("Training loss", x_label, "loss", losses, log_y=is_wide(losses), borders=borders)
    validation = validation_panel(x_label, validations, bases_of(runs), borders)
    return [*plot("loss", loss, runs), *plot("validation", validation, runs)]


def validation_of(run: dict[str, Any]) -> list[tuple[Any, Any]]:
    return points(objects(run, "validation"), "tokens", "perplexity")


def bases_of(runs: Sequence[Entry]) -> list[float]:
    """The base model's perplexity: more than one where runs were validated differently."""
    found = {finite(value_at(run.body, "base", "perplexity")) for run in runs}
    return sorted(base for base in found if base)


def validation_panel(
    x_label: str,
    lines: Sequence[Line],
    bases: Sequence[float],
    borders: Sequence[tuple[float, str]] = (),
    title: str = "Validation perplexity",
) -> Panel:
    levels = [(base, f"base model: {perplexity_text(base)}") for base in bases]
    shown = _shown_range(lines, bases)
    y_label = "perplexity" if shown is None else f"perplexity (cut off at {axis_text(shown[1])})"
    wide = is_wide(lines, levels)
    return Panel(title, x_label, y_label, lines, log_y=wide, y_range=shown, levels=levels, borders=borders)


def _shown_range(lines: Sequence[Line], bases: Sequence[float]) -> tuple[float, float] | None:
    """A run may begin at millions: what is far above the best of every run would press the rest together."""
    curves = [[y for _, y in line.points if (finite(y) or 0) > 0] for line in lines]
    best = [*map(min, filter(None, curves)), *bases]
    cut = float(f"{CUT * max(best):.2g}") if best else 0.0
    is_above = any(y > cut for curve in curves for y in curve)
    return (0.9 * min(best), cut) if best and is_above else None


def _loss_lines(run: Entry, colour: int) -> list[Line]:
    """A line for each stage: losses of different kinds are not one curve."""
    curve = objects(run.body, "curve")
    stages = list(dict.fromkeys(str(point.get("stage")) for point in curve))
    return [
        Line(
            run.label if i == 0 else "",
            points([point for point in curve if str(point.get("stage")) == stage], "tokens", "loss"),
            colour,
            markers=False,
            ends_badly=bool(run.diverged) and i == len(stages) - 1,
        )
        for i, stage in enumerate(stages)
    ]


def _stages(runs: Sequence[Entry]) -> tuple[list[tuple[float, str]], str]:
    """Where numbered stages begin, and their names, if there are several and all runs have the same."""
    found = sorted((list(_stage_starts(run)) for run in runs), key=len)
    starts = found[-1] if found else []
    if len(starts) < 2 or any(other != starts[: len(other)] for other in found):
        return [], ""
    numbered = list(enumerate(starts, start=1))
    return [(start, str(i)) for i, (start, _) in numbered], ", ".join(f"{i} {name}" for i, (_, name) in numbered)


def _stage_starts(run: Entry) -> Iterator[tuple[float, str]]:
    """A curve's points tell their stage by name or by number."""
    names = [stage.get("name") for stage in objects(run.body, "stages")]
    current: Any = object()
    tokens = 0.0
    for point in objects(run.body, "curve"):
        if point.get("stage") != current:
            current = point.get("stage")
            yield tokens, str(names[current] if isinstance(current, int) and current < len(names) else current)
        tokens = finite(point.get("tokens")) or tokens


def comparison(runs: Mapping[str, Sequence[dict[str, Any]]], base: float | None) -> Panel:
    """Validation perplexity of several runs under each label: a thin line for each, a thick one for their mean."""
    lines = [line for colour, label in enumerate(runs) for line in seed_lines(label, runs[label], colour)]
    return validation_panel("tokens", lines, [] if base is None else [base])


def seed_lines(label: str, runs: Sequence[dict[str, Any]], colour: int, dash: int = 0) -> list[Line]:
    """A run that diverged ends in a cross, marks the label and is left out of the mean."""
    diverged = [run for run in runs if run.get("diverged")]
    thin = [Line("", validation_of(run), colour, faint=True, ends_badly=run in diverged, dash=dash) for run in runs]
    sound = [dict(validation_of(run)) for run in runs if run not in diverged]
    name = f"{label}* ({len(diverged)} of {len(runs)} diverged)" if diverged else label
    return [*thin, Line(name, _mean(sound), colour, markers=False, dash=dash)]


def _mean(curves: Sequence[dict[Any, Any]]) -> list[tuple[Any, Any]]:
    """Where all curves have a point."""
    mean = []
    for x in curves[0] if curves else ():
        values = [value for curve in curves if (value := finite(curve.get(x))) is not None]
        if len(values) == len(curves):
            mean.append((x, statistics.mean(values)))
    return mean
