"""Result files of today load, lose nothing, and what is damaged is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.sample_results import ALL, COST, EVALUATION, RANKING, TRAINING, write

from fastweights.results import KINDS, CostResult, EvaluationResult, Result, ResultError, TrainingResult, read_result

COMMITTED = sorted((Path(__file__).parents[1] / "results").rglob("*.json"))


def with_kind() -> dict[str, Path]:
    bodies = {path: json.loads(path.read_text()) for path in COMMITTED}
    return {str(path): path for path, body in bodies.items() if isinstance(body, dict) and "kind" in body}


def test_committed_results_round_trip_without_loss() -> None:
    found = {path: read_result(path) for path in with_kind().values()}
    assert {result.kind for result in found.values()} == set(KINDS)
    for path, result in found.items():
        assert result.to_dict() == json.loads(path.read_text()), path


@pytest.mark.parametrize("name", ALL)
def test_sample_results_have_no_field_that_the_schema_lacks(name: str) -> None:
    def extras(value: Any) -> dict[str, Any]:
        if isinstance(value, list | tuple):
            return {key: x for item in value for key, x in extras(item).items()}
        return {} if not hasattr(value, "extra") else value.extra | extras(list(vars(value).values()))

    result = KINDS[ALL[name]["kind"]].from_dict(ALL[name])
    assert extras(result) == {} and result.to_dict() == ALL[name]


def test_unknown_fields_are_retained_at_every_depth(tmp_path: Path) -> None:
    body = copy.deepcopy(EVALUATION) | {"future": [1]}
    body["models"][1]["perplexity"][0]["other"] = {"a": None}
    [path] = write(tmp_path, {"eval": body})
    result = EvaluationResult.read(path)
    assert result.extra == {"future": [1]} and result.to_dict() == body


def test_fields_without_a_value_are_not_written_unless_they_are_required() -> None:
    body = TrainingResult.from_dict(TRAINING | {"base": None, "cell": None}).to_dict()
    assert body["base"] is None and "cell" not in body and "tests" not in body


def test_a_written_result_has_its_provenance(tmp_path: Path) -> None:
    measured = {name: value for name, value in COST.items() if name not in ("date", "commit", "versions", "hardware")}
    CostResult.from_dict(measured).write(tmp_path / "cost.json")
    result = CostResult.read(tmp_path / "cost.json")
    assert result.commit and result.date and result.versions and result.hardware
    result.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "cost.json").read_text()


@pytest.mark.parametrize(
    ("body", "place", "value", "message"),
    [
        (EVALUATION, "models.1.perplexity.0.token", "?", 'models[1].perplexity[0].token must be a number, found "?"'),
        (EVALUATION, "models.0.recall.pairs.1.distance", 1.5, "models[0].recall.pairs[1].distance must be a whole"),
        (EVALUATION, "models.0.tasks.lambada.acc", None, "models[0].tasks.lambada.acc must be a number, found null"),
        (EVALUATION, "models.0.by_position.1.from", True, "models[0].by_position[1].from must be a whole number"),
        (EVALUATION, "models", {}, "models must be a list, found {}"),
        (COST, "models.1", 3, "models[1] must be an object, found 3"),
        (COST, "cheaper_from", [], "cheaper_from must be an object, found []"),
        (TRAINING, "finished", 1, "finished must be true or false, found 1"),
        (TRAINING, "name", None, "name must be a string, found null"),
        (RANKING, "layers.0.kl", "0", 'layers[0].kl must be a number, found "0"'),
    ],
)
def test_damaged_field_is_named_with_its_file(
    tmp_path: Path, body: dict[str, Any], place: str, value: Any, message: str
) -> None:
    body = copy.deepcopy(body)
    *path, last = (int(part) if part.isdigit() else part for part in place.split("."))
    inner: Any = body
    for part in path:
        inner = inner[part]
    inner[last] = value
    [file] = write(tmp_path, {"damaged": body})
    with pytest.raises(ResultError) as caught:
        read_result(file)
    assert str(caught.value).startswith(f"{file}: {message}")


def _removals(value: Any, place: str = "") -> list[tuple[str, Any]]:
    """Copies of a body with one field less, and the path of that field."""
    if isinstance(value, list):
        return [
            (where, [*value[:i], inner, *value[i + 1 :]])
            for i, item in enumerate(value[:1])
            for where, inner in _removals(item, f"{place}[{i}]")
        ]
    if not isinstance(value, dict):
        return []
    found = []
    for name, item in value.items():
        if name == "kind":
            continue
        where = f"{place}.{name}" if place else name
        found.append((where, {key: x for key, x in value.items() if key != name}))
        found += [(deeper, value | {name: inner}) for deeper, inner in _removals(item, where)]
    return found


@pytest.mark.parametrize("name", ALL)
def test_missing_field_is_named_or_was_optional(name: str) -> None:
    cls, refused = KINDS[ALL[name]["kind"]], []
    for where, body in _removals(ALL[name]):
        try:
            assert cls.from_dict(body).to_dict() == body
        except ResultError as error:
            assert str(error) == f"{where} is missing"
            refused.append(where)
    assert {"seed", "tokens"} < set(refused)
    assert any("." in where for where in refused)


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    def error(content: str | bytes) -> str:
        path = tmp_path / "bad.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ResultError) as caught:
            read_result(path)
        return str(caught.value).removeprefix(f"{tmp_path}/")

    assert "bad.json is not JSON: line 2: Expecting value" in error('{"kind":\n}')
    assert error("{}").startswith("bad.json has no kind: give a result of kind training, evaluation, cost, ranking")
    assert "bad.json has no kind" in error("[1, 2]")
    assert "bad.json has kind 'poem'" in error('{"kind": "poem"}')
    assert "bad.json has kind ['cost']" in error('{"kind": ["cost"]}')
    assert "bad.json is not text" in error(b"\xff\xfe\x00")
    with pytest.raises(ResultError, match=r"no result file at .*no\.json"):
        read_result(tmp_path / "no.json")
    with pytest.raises(ResultError, match="cannot be read: Is a directory"):
        read_result(tmp_path)


def test_a_result_of_another_kind_is_refused(tmp_path: Path) -> None:
    [path] = write(tmp_path, {"eval": EVALUATION})
    with pytest.raises(ResultError, match=r"eval\.json is a result of kind evaluation: give one of kind cost"):
        CostResult.read(path)
    assert isinstance(Result.read(path), EvaluationResult)
