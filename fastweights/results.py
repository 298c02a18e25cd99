"""What training, evaluation, profiling and ranking write, and what the report reads: one schema.

Each kind of result is a dataclass, and so is each of its parts. `to_dict` and `from_dict` convert them to and from the
JSON files under results/. A number may be NaN or infinite, because a run that diverged has a result, too. Fields that
this version does not know are retained in `extra`, so reading and writing a file loses nothing.

The module lies low in the order of imports, below everything that measures, because training, evaluation and profiling
fill these records. It imports only fastweights.utils.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from fastweights.utils.errors import FastWeightsError, error_context
from fastweights.utils.parsing import ParseError, read_json
from fastweights.utils.provenance import write_result

PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a string", (str,)),
}


class ResultError(FastWeightsError):
    """A result file that cannot be read. The message names the file and the field."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of results and their parts.

    A field with a default is written only where its value is not the default. A field without one is always written,
    as null where it is None.
    """

    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON objects and lists."""
        body = {}
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default if item.default_factory is MISSING else item.default_factory()
            if item.name != "extra" and value != default:
                body[_key(item)] = plain(value)
        return body | self.extra

    @classmethod
    def from_dict(cls, body: Any, place: str = "") -> Self:
        """The record that a JSON object describes.

        Args:
            body: The object, as `json.loads` returns it.
            place: Where it stands in its file, for error messages; empty for the whole file.

        Raises:
            ResultError: If a field is missing or is not of its type.
        """
        values, extra = parse_fields(cls, body, place)
        return cls(**values, extra={name: value for name, value in extra.items() if name != "kind"})


def parse_fields(cls: Any, body: Any, place: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a dataclass in a JSON object, each of its type, and what the object has besides.

    Raises:
        ResultError: If a field is missing or is not of its type.
    """
    if not isinstance(body, dict):
        raise ResultError(f"{place or 'the result'} must be an object, found {_shown(body)}")
    values, schema = {}, _schema(cls)
    for item, kind in schema:
        key = _key(item)
        where = f"{place}.{key}" if place else key
        if key in body:
            values[item.name] = _parse(kind, body[key], where)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ResultError(f"{where} is missing")
    known = {_key(item) for item, _ in schema}
    return values, {name: value for name, value in body.items() if name not in known}


def _key(item: Any) -> str:
    """The name of a field in a file: its own, unless that is a keyword of Python."""
    return item.metadata.get("key", item.name)


@functools.cache
def _schema(cls: Any) -> list[tuple[Any, Any]]:
    """The fields of a record with their types."""
    hints = get_type_hints(cls)
    return [(item, hints[item.name]) for item in fields(cls) if item.name != "extra"]


def plain(value: Any) -> Any:
    """A value as JSON objects and lists, with objects in place of records."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _parse(kind: Any, value: Any, place: str) -> Any:
    """The value as the type `kind` has it, with records in place of objects."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (kind,) = (part for part in arguments if part is not NoneType)
        return None if value is None else _parse(kind, value, place)
    if kind is Any:
        return value
    if origin is list:
        _check(isinstance(value, list), place, "a list", value)
        return [_parse(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value)]
    if origin is dict:
        _check(isinstance(value, dict), place, "an object", value)
        return {name: _parse(arguments[1], item, f"{place}.{name}") for name, item in value.items()}
    if issubclass(kind, Record):
        return kind.from_dict(value, place)
    name, types = PLAIN[kind]
    _check(isinstance(value, types) and (kind is bool or not isinstance(value, bool)), place, name, value)
    return value


def _check(holds: bool, place: str, expected: str, value: Any) -> None:
    if not holds:
        raise ResultError(f"{place} must be {expected}, found {_shown(value)}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """Base of all kinds of results: provenance, seed, and the tokens that were trained or measured on.

    date, commit, versions, hardware: Where the result comes from; `write` fills what is not given.
    what: The result in words.
    """

    kind: ClassVar[str]
    date: str | None = None
    commit: str | None = None
    versions: dict[str, str] | None = None
    hardware: dict[str, Any] | None = None
    what: str | None = None
    seed: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """The result as it is written: plain values by name."""
        return {"kind": self.kind} | super().to_dict()

    def write(self, path: str | os.PathLike) -> None:
        """Write the result with its provenance as a JSON file."""
        write_result(path, self.to_dict())

    @classmethod
    def read(cls, path: str | os.PathLike) -> Self:
        """Read a result of this kind.

        Raises:
            ResultError: If the file cannot be read or holds another kind of result.
        """
        result = read_result(path)
        if not isinstance(result, cls):
            raise ResultError(f"{path} is a result of kind {result.kind}: give one of kind {cls.kind}")
        return result


# Training


@dataclass(frozen=True, kw_only=True)
class TrainedModel(Record):
    """`settings` are those of the conversion, None for a model that is not converted."""

    name: str
    parameters: int
    settings: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Data(Record):
    """The text that was trained or measured on."""

    name: str
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class BaseModel(Record):
    """The model that was converted, with its validation perplexity."""

    name: str
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class StageSummary(Record):
    """A stage of a recipe. `seconds` is None where the run did not reach it."""

    name: str
    loss: str
    steps: int
    tokens: int
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class LossPoint(Record):
    """The training loss after a step; `stage` is the stage's index."""

    step: int
    tokens: int
    stage: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class ValidationPoint(LossPoint):
    """The validation loss after a step, and its exponential."""

    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Divergence(Record):
    """Where a run diverged, and what was found there."""

    step: int
    stage: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class PerplexityRow(Record):
    """Perplexity of one text. `data` names it; `token` and `word` are perplexities by token and by word."""

    data: str
    length: int
    context: int
    tokens: int
    token: float
    word: float | None = None
    bits_per_byte: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecallRow(Record):
    """Accuracy of recall over `distance` tokens, and that of guessing."""

    distance: int
    accuracy: float
    accuracy_vocabulary: float | None = None
    chance: float
    samples: int


@dataclass(frozen=True, kw_only=True)
class Recall(Record):
    """The two recall probes, by distance."""

    pairs: list[RecallRow]
    copy: list[RecallRow]


@dataclass(frozen=True, kw_only=True)
class TrainingResult(Result):
    """One training run.

    base: The model it started from before conversion, None where that was not measured.
    curve: Training losses, thinned out.
    best, last: Validation points; None where there was no validation. The best one may be that before the first step.
    warning: Only of a run that ended worse than it began: how much worse, and what to change.
    run, cell, tests, recall: Only of the runs of a grid: its name there, what the grid says about its place in a table
        (which nothing in the package interprets but the names `table`, `row` and `column`), perplexities of the best
        checkpoint on test texts, and its recall.
    """

    kind = "training"
    name: str
    recipe: dict[str, Any]
    model: TrainedModel
    data: Data
    base: BaseModel | None
    processes: int
    stages: list[StageSummary]
    curve: list[LossPoint]
    validation: list[ValidationPoint]
    best: ValidationPoint | None
    last: ValidationPoint | None
    diverged: Divergence | None
    seconds: float
    finished: bool
    warning: str | None = None
    run: str | None = None
    cell: dict[str, Any] | None = None
    tests: list[PerplexityRow] | None = None
    recall: Recall | None = None


# Evaluation


@dataclass(frozen=True, kw_only=True)
class PositionBucket(Record):
    """Mean loss of the tokens at positions start to end - 1 of a window, and its exponential."""

    data: str | None = None
    start: int = field(metadata={"key": "from"})
    end: int = field(metadata={"key": "to"})
    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class CacheSize(Record):
    """Bytes cached after `tokens` tokens of one sequence: by a converted model, and by its base (keys and values)."""

    tokens: int
    bytes: int
    base_bytes: int


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(Record):
    """A model, and what was measured of it; None where it was not measured.

    rule: The update rule, "attention" for a model that is not converted.
    cache: Of a converted model, computed from its shape.
    without_window: Whether the model was measured with the window of its layers left out.
    tasks: The metrics of each lm-eval task.
    """

    name: str
    parameters: int
    converted: bool
    dtype: str | None = None
    rule: str
    state_bytes: int
    cache: list[CacheSize] | None = None
    settings: dict[str, Any] | None = None
    without_window: bool = False
    perplexity: list[PerplexityRow] | None = None
    by_position: list[PositionBucket] | None = None
    recall: Recall | None = None
    tasks: dict[str, dict[str, float]] | None = None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Result):
    """Measurements of the quality of models; `settings` are those of the evaluation."""

    kind = "evaluation"
    settings: dict[str, Any]
    models: list[EvaluatedModel]


# Cost


@dataclass(frozen=True, kw_only=True)
class CostPoint(Record):
    """The cost of one more token after `length` tokens.

    bytes: What is cached of the sequence.
    peak_bytes: These, and the most that the step allocates.
    kernel: The attention kernel that was chosen as the fastest.
    """

    length: int
    seconds: float
    bytes: int
    peak_bytes: int | None = None
    kernel: str | None = None


@dataclass(frozen=True, kw_only=True)
class SkippedLength(Record):
    """A length that could not be measured, and why."""

    length: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelCost(Record):
    """The cost of one model or layer by length.

    how: How the step was run, such as "CUDA graph".
    left_out: Lengths that could not be measured.
    positions: What was done to a position table that is too short.
    cheaper_from: For each quantity the length from which this costs less than the base, None for nowhere.
    """

    name: str
    converted: bool
    how: str | None = None
    points: list[CostPoint]
    left_out: list[SkippedLength] = field(default_factory=list)
    positions: str | None = None
    cheaper_from: dict[str, int | None] | None = None


@dataclass(frozen=True, kw_only=True)
class CostResult(Result):
    """Cost of one more token, of whole models or (`level` "layer") of one layer.

    tokens: Tokens timed at each length.
    heads, d, m: The shape of the layer.
    weights: What converted models' weights were stored as; null: in dtype.
    cheaper_from: That of the first converted model.
    layer: The cost of one layer, measured beside whole models.
    """

    kind = "cost"
    level: str | None = None
    batch: int
    heads: int | None = None
    d: int | None = None
    m: int | None = None
    dtype: str
    device: str
    weights: str | None = None
    models: list[ModelCost]
    cheaper_from: dict[str, int | None]
    layer: CostResult | None = None

    @property
    def is_layer(self) -> bool:
        """Whether this is the cost of one layer, not of whole models."""
        return self.level == "layer"


# Ranking


@dataclass(frozen=True, kw_only=True)
class RankedModel(Record):
    """The converted model, the model it was converted from, and its settings."""

    name: str
    base: str
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankedLayer(Record):
    """A layer restored to attention.

    kl: KL(base || model) of the next tokens with this layer restored.
    gain: By how much that is less than with no layer restored.
    """

    layer: int
    kl: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class LayerRanking(Record):
    """Which layers gain most as attention.

    kl: KL(base || model) of the next tokens with no layer restored.
    layers: The best first.
    chosen, kl_after: Layers chosen greedily, and the divergence after each.
    """

    kl: float
    layers: list[RankedLayer]
    chosen: list[int]
    kl_after: list[float]


@dataclass(frozen=True, kw_only=True)
class RankingResult(Result, LayerRanking):
    """A ranking of layers, with the model and the text that it was measured on."""

    kind = "ranking"
    model: RankedModel
    data: Data
    settings: dict[str, Any]
    seconds: float


KINDS: dict[str, type[Result]] = {
    result.kind: result for result in (TrainingResult, EvaluationResult, CostResult, RankingResult)
}


def read_result(path: str | os.PathLike) -> Result:
    """Read a result file of any kind.

    Args:
        path: A JSON file that fastweights train, eval, profile or rank wrote.

    Returns:
        A `TrainingResult`, `EvaluationResult`, `CostResult` or `RankingResult`.

    Raises:
        ResultError: If the file cannot be read, is of no known kind, or has a missing or damaged field.
    """
    body = _load(Path(path))
    kind = body.get("kind") if isinstance(body, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        found = "no kind" if kind is None else f"kind {kind!r}"
        raise ResultError(f"{path} has {found}: give a result of kind {', '.join(KINDS)}")
    with error_context(f"{path}: "):
        return KINDS[kind].from_dict(body)


def _load(path: Path) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError as error:
        raise ResultError(f"no result file at {path}: fastweights train, eval, profile and rank write them") from error
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}; give a result file (.json)") from error
    except ParseError as error:
        raise ResultError(f"{path} {error}; give a result file (.json)") from error
