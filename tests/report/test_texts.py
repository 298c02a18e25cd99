"""Reports of evaluations on several texts, and of several models in several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.sample_results import EVALUATION, evaluated, report, svg_texts, table

from fastweights.config import FastWeightsConfig
from fastweights.report.text import count_text, seconds_text, settings_text


def of(*models: dict[str, Any]) -> dict[str, Any]:
    return EVALUATION | {"models": list(models)}


def part(model: dict[str, Any], *names: str) -> dict[str, Any]:
    """What one file of several says of a model."""
    measures = ("perplexity", "by_position", "recall", "tasks")
    return {name: value for name, value in model.items() if name not in measures or name in names}


def test_every_text_has_its_perplexity_by_position(tmp_path: Path) -> None:
    models = [evaluated("gpt2", False, 1.0), evaluated("gpt2-decay", True, 1.25)]
    for model in models:
        rows = model["by_position"]
        model["by_position"] = [
            row | {"data": name, "perplexity": row["perplexity"] * factor}
            for name, factor in (("wiki.txt", 1), ("books.txt", 2))
            for row in rows
        ]
    markdown, _ = report(tmp_path, {"evaluation": of(*models)})
    for text, factor in (("wiki.txt", 1), ("books.txt", 2)):
        rows = table(markdown, f"{text}: from token")
        assert [row["gpt2"] for row in rows] == [f"{40 * factor:.2f}", f"{18.25 * factor:.2f}"]
        assert [float(row["gpt2-decay"]) for row in rows] == [50 * factor, round(22.8125 * factor, 2)]
    for file, title in (("wiki_txt", "wiki.txt"), ("books_txt", "books.txt")):
        drawn = svg_texts(tmp_path / "report" / "plots" / f"position_{file}.svg")
        assert f"Perplexity by position, {title}" in drawn and drawn.count("gpt2-decay") == 1


def test_a_model_in_two_files_is_compared_with_the_base_of_its_own(tmp_path: Path) -> None:
    first = of(evaluated("x", False, 1.0), evaluated("x-decay", True, 1.1))
    y, decayed = evaluated("y", False, 2.0), evaluated("y-decay", True, 2.2)
    results = {
        "x": first,
        "y_text": of(part(y, "perplexity"), part(decayed, "perplexity")),
        "y_tasks": of(part(decayed, "tasks")),
    }
    markdown, _ = report(tmp_path, results)
    rows = [row for row in table(markdown, "× base") if row["model"] == "y-decay"]
    assert rows and all(row["× base"] == "1.10 ×" for row in rows)


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        (seconds_text, 0.9996, "1 s"),
        (seconds_text, 0.9994, "999 ms"),
        (seconds_text, 0.99996e-3, "1 ms"),
        (count_text, 999.6e6, "1 B"),
        (count_text, 999.4e6, "999 M"),
    ],
)
def test_values_that_round_up_take_the_next_unit(text: Any, value: float, shown: str) -> None:
    assert text(value) == shown


def test_a_models_settings_name_its_sinks_where_it_has_some() -> None:
    settings = FastWeightsConfig(window=64, sinks=4).to_dict()
    assert settings_text(settings) == "decay, m 32, window 64, sinks 4"
    assert settings_text(settings | {"sinks": 0}) == "decay, m 32, window 64"


def test_a_models_settings_name_what_makes_it_smaller() -> None:
    settings = FastWeightsConfig(rule="gated", window=64, projections="shared", gate_rank=16).to_dict()
    assert settings_text(settings) == "gated, m 32, window 64, shared projections, gate rank 16"
