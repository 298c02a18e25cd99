"""Results as a report shows them: read from their files, and models and runs under labels that tell them apart."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from fastweights.results import (
    CostResult,
    EvaluatedModel,
    EvaluationResult,
    RankingResult,
    Result,
    TrainingResult,
    read_result,
)
from fastweights.utils.errors import FastWeightsError

MEASURES = ("perplexity", "by_position", "recall", "tasks")
ResultFile = str | os.PathLike
Item = TypeVar("Item")
# The name of an item, the file it comes from, and the item.
Named = tuple[str, str, Item]


class ReportError(FastWeightsError):
    """A report that cannot be made, with the file and the reason."""


@dataclass(frozen=True)
class LoadedResult:
    """A result and its file: as much of the path as tells it from the others."""

    file: str
    result: Result


@dataclass(frozen=True)
class ModelEntry:
    """An evaluated model, under a label that no other has in the report."""

    label: str
    file: str
    model: EvaluatedModel

    @property
    def converted(self) -> bool:
        """Whether the model has fast-weight layers."""
        return self.model.converted

    @property
    def files(self) -> set[str]:
        """Those of a model that was measured in parts."""
        return set(self.file.split(", "))


@dataclass(frozen=True)
class RunEntry:
    """A training run, under a label that no other has in the report; one that diverged is marked with *."""

    label: str
    file: str
    run: TrainingResult


@dataclass(frozen=True)
class CostEntry:
    """The cost of whole models, or of one layer."""

    file: str
    cost: CostResult


@dataclass(frozen=True)
class RankingEntry:
    """A ranking of the layers of a model, under a label that no other has in the report."""

    label: str
    file: str
    ranking: RankingResult


def read_results(paths: Iterable[ResultFile]) -> list[LoadedResult]:
    """Read results in the order given, a file named twice only once.

    Raises:
        ResultError: If a file cannot be read; the message names it.
    """
    unique = list({Path(path).resolve(): Path(path) for path in paths}.values())
    return [LoadedResult(name, read_result(path)) for name, path in zip(_short_names(unique), unique, strict=True)]


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of the paths, long enough to differ."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return []


def models_in(results: Sequence[LoadedResult]) -> list[ModelEntry]:
    """The models of all evaluations; one that was measured in parts is one model."""
    found = [
        (model.name, loaded.file, model)
        for loaded in results
        if isinstance(loaded.result, EvaluationResult)
        for model in loaded.result.models
    ]
    return [ModelEntry(label, file, model) for label, file, model in _labelled(_joined(found))]


def _joined(found: Sequence[Named[EvaluatedModel]]) -> list[Named[EvaluatedModel]]:
    """Join models of one name whose facts agree and of which different things were measured."""
    joined: list[Named[EvaluatedModel]] = []
    for name, file, model in found:
        for i, (other_name, other_file, other) in enumerate(joined):
            if other_name == name and _are_parts(model, other):
                own = {item.name: value for item in fields(model) if (value := getattr(model, item.name)) is not None}
                joined[i] = name, f"{other_file}, {file}", replace(other, **own)
                break
        else:
            joined.append((name, file, model))
    return joined


def _are_parts(one: EvaluatedModel, other: EvaluatedModel) -> bool:
    pairs = {item.name: (getattr(one, item.name), getattr(other, item.name)) for item in fields(one)}
    in_both = {name for name, pair in pairs.items() if None not in pair} - {"seconds"}
    return not in_both & set(MEASURES) and all(pairs[name][0] == pairs[name][1] for name in in_both)


def runs_in(results: Sequence[LoadedResult]) -> list[RunEntry]:
    """The training runs. Those of one name get their seeds in their labels, or else their files."""
    found = [(loaded.file, loaded.result) for loaded in results if isinstance(loaded.result, TrainingResult)]
    names = Counter(run.name for _, run in found)
    named = [(f"{run.name}, seed {run.seed}" if names[run.name] > 1 else run.name, file, run) for file, run in found]
    return [RunEntry(label + "*" * bool(run.diverged), file, run) for label, file, run in _labelled(named)]


def costs_in(results: Sequence[LoadedResult]) -> list[CostEntry]:
    """The cost of layers and of whole models; a file may hold either or both."""
    found = [(loaded.file, loaded.result) for loaded in results if isinstance(loaded.result, CostResult)]
    return [CostEntry(file, part) for file, cost in found for part in cost_parts(cost)]


def cost_parts(cost: CostResult) -> list[CostResult]:
    """The cost of a layer and that of whole models, as far as they were measured."""
    if cost.layer is None:
        return [cost]
    return [replace(cost.layer, hardware=cost.layer.hardware or cost.hardware), replace(cost, layer=None)]


def rankings_in(results: Sequence[LoadedResult]) -> list[RankingEntry]:
    """The rankings of layers, by the name of their model."""
    found = [
        (loaded.result.model.name, loaded.file, loaded.result)
        for loaded in results
        if isinstance(loaded.result, RankingResult)
    ]
    return [RankingEntry(label, file, ranking) for label, file, ranking in _labelled(found)]


def _labelled(found: Sequence[Named[Item]]) -> list[Named[Item]]:
    """The same without copies; after a name that is not the only one its file, and a count if that is not enough."""
    distinct = [item for i, item in enumerate(found) if not any(item[::2] == other[::2] for other in found[:i])]
    names = Counter(name for name, _, _ in distinct)
    seen: Counter[Hashable] = Counter()
    labelled = []
    for name, file, item in distinct:
        seen[name, file] += 1
        again = f", {seen[name, file]}" if seen[name, file] > 1 else ""
        labelled.append((f"{name} ({file}{again})" if names[name] > 1 else name, file, item))
    return labelled


def base_entry(model: ModelEntry, models: Sequence[ModelEntry]) -> ModelEntry | None:
    """What a converted model is compared with: the unconverted model of its own file, else of any; None without one."""
    unconverted = [other for other in models if not other.converted]
    nearest = [other for other in unconverted if other.files & model.files] or unconverted
    return nearest[0] if nearest and model.converted else None
