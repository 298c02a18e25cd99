"""Runs of a grid side by side: seeds averaged, those that diverged counted, a line for each variant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.grid_results import FAILED, TABLE_1, TABLE_2, WIKI, in_table_2, run
from helpers.sample_results import INFINITY, NAN, TRAINING, report, section, svg_texts, table


def test_a_comparison_has_a_row_for_each_variant(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, TABLE_2)
    test, with_context = ("wiki.test.raw.xz, context 0", "wiki.test.raw.xz, context 480")
    perplexity = "validation perplexity"
    assert table(section(markdown, "Table 2"), "Table 2") == [
        {"Table 2": "local", "seeds": "1", "tokens": "3 M", perplexity: "30.00", test: "41.50", with_context: "–"},
        {"Table 2": "gated, m 32", "seeds": "2", "tokens": "20 M to 25 M", perplexity: "26.50 (26.00 to 27.00)"}
        | {test: "36.50 (36.00 to 37.00)", with_context: "–"},
        {"Table 2": "decay, m 32", "seeds": "1", "tokens": "3 M", perplexity: "24.00", test: "31.25"}
        | {with_context: "30.00"},
    ]
    words = section(markdown, "Table 2")
    assert "The base model: 14.50." in words
    assert "Of several seeds the mean, in brackets the lowest and the highest." in words


def recall(*accuracies: float) -> dict[str, Any]:
    rows = [
        {"distance": 16 * 2**i, "accuracy": accuracy, "chance": 0.125, "samples": 64}
        for i, accuracy in enumerate(accuracies)
    ]
    return {"pairs": rows, "copy": rows[:1]}


def test_recall_of_a_comparison_has_a_table_for_each_probe(tmp_path: Path) -> None:
    """Seeds are averaged without those that diverged; a run without recall has none."""
    runs = {
        "a0": in_table_2("a", 14.6, 20.0, seed=0, recall=recall(0.5, 0.25)),
        "a1": in_table_2("a", 14.6, 22.0, seed=1, recall=recall(1.0, 0.75)),
        "a2": in_table_2("a", 14.6, 21.0, seed=2, recall=recall(0.0, 0.0), **FAILED),
        "b": in_table_2("b", 14.6, 21.0),
        "c": in_table_2("c", 14.6, 21.0, recall=recall(0.125)),
    }
    words = section(report(tmp_path, runs)[0], "Table 2")
    title = "Table 2: pairs recalled"
    assert table(words, title) == [
        {title: "a", "16": "75 %", "32": "50 %"},
        {title: "b", "16": "–", "32": "–"},
        {title: "c", "16": "12 %", "32": "–"},
    ]
    copied = table(words, "Table 2: tokens copied")
    assert copied[0] == {"Table 2: tokens copied": "a", "16": "75 %"} and len(copied) == 3
    assert "pairs recalled" not in section(report(tmp_path, TABLE_2)[0], "Table 2")


def test_variants_of_a_row_are_labelled_by_their_columns(tmp_path: Path) -> None:
    rows = table(section(report(tmp_path, TABLE_1)[0], "Table 1"), "Table 1")
    assert [row["Table 1"] for row in rows][:3] == ["add (baseline)", "add (no norm)", "add (no map)"]
    assert [row["validation perplexity"] for row in rows][:2] == ["31.23", "diverged (reached 40.00)"]


def test_seeds_that_diverged_are_counted(tmp_path: Path) -> None:
    runs = {
        "a0": in_table_2("a", 14.6, 20.0, WIKI | {"token": 30.0}, seed=0),
        "a1": in_table_2("a", 14.6, 22.0, WIKI | {"token": 32.0}, seed=1),
        "a2": in_table_2("a", 14.6, 21.0, WIKI | {"token": 500.0}, seed=2, **FAILED),
        "a3": in_table_2("a", 14.6, 21.0, WIKI | {"token": NAN}, seed=3, **FAILED),
        "b": in_table_2("b", NAN, NAN),
        "c0": in_table_2("c", 16.0, 60.0, seed=0, **FAILED),
        "c1": in_table_2("c", 16.0, 50.0, seed=1, **FAILED),
        "d": in_table_2("d", 16.0, 19.0, finished=False),
    }
    markdown, _ = report(tmp_path, runs)
    rows = {row["Table 2"]: row for row in table(section(markdown, "Table 2"), "seeds")}
    assert rows["a"]["validation perplexity"] == "21.00 (20.00 to 22.00), 2 of 4 diverged"
    assert rows["a"]["wiki.test.raw.xz"] == "31.00 (30.00 to 32.00), 2 of 4 diverged"
    assert rows["b"]["validation perplexity"] == "diverged"
    assert rows["c"]["validation perplexity"] == "diverged (reached 50.00)"
    assert "Not finished: d-." in section(markdown, "Table 2")
    drawn = svg_texts(tmp_path / "report" / "plots" / "comparison_table_2.svg")
    assert {"a* (2 of 4 diverged)", "b*", "c* (2 of 2 diverged)", "d", "base model: 14.50"} <= set(drawn)


def test_every_table_has_a_plot_with_a_line_for_each_cell(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, TABLE_1 | TABLE_2)
    plots = tmp_path / "report" / "plots"
    drawn = svg_texts(plots / "comparison_table_1.svg")
    cells = {
        "add (baseline)",
        "add (no norm)*",
        "add (no map)",
        "delta (baseline)",
        "delta (no map)*",
        "decay (no map)",
    }
    assert cells <= set(drawn) and "Table 1: validation perplexity" in drawn
    assert "decay (baseline)" not in drawn  # it has no validation point
    assert "(plots/comparison_table_2.svg)" in section(markdown, "Table 2")
    svg = (plots / "comparison_table_1.svg").read_text()
    assert len(set(re.findall(r"stroke-dasharray: ([\d., ]+); stroke-dashoffset: 0; stroke: #0072b2", svg))) == 2


def test_tables_of_like_names_have_plots_of_their_own(tmp_path: Path) -> None:
    names = ["Table 1", "table-1", "模型", "x" * 300]
    runs = {f"r{i}": run({"table": name, "row": "a"}, 20.0) for i, name in enumerate(names)}
    runs |= {f"r{i}b": body | {"cell": body["cell"] | {"row": "b"}} for i, body in enumerate(list(runs.values()))}
    report(tmp_path, runs)
    plots = {path.name for path in (tmp_path / "report" / "plots").glob("comparison_*")}
    assert len(plots) == 4 and "comparison_table_1.svg" in plots and max(map(len, plots)) < 60


def test_many_runs_of_a_table_are_left_out_of_summary_and_plots(tmp_path: Path) -> None:
    few = report(tmp_path, TABLE_2)[0]
    assert "decay, m 32- reached a validation perplexity" in few and "plots/loss.svg" in few
    many = {f"r{i}": in_table_2(f"row {i}", None, 20.0 + i) for i in range(20)} | {"other": TRAINING}
    markdown, _ = report(tmp_path, many)
    assert section(markdown, "Summary").count("reached a validation perplexity") == 1
    assert len(table(section(markdown, "Training"), "best perplexity")) == 21
    assert "paper-run" in svg_texts(tmp_path / "report" / "plots" / "validation.svg")
    assert "row 3-" not in svg_texts(tmp_path / "report" / "plots" / "validation.svg")
    assert "From r0.json, r1.json, r2.json and 17 more files." in section(markdown, "Table 2")


def test_malformed_or_incomplete_cells_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.report.parts.draw", lambda panel: "")
    for place in ("table", "row", "column"):
        for value in (NAN, INFINITY, -1, 0, None, "", "?", [], {}, True, [{}], [1]):
            cell = TABLE_2["decay"]["cell"] | {place: value}
            markdown, _ = report(tmp_path, TABLE_2 | {"odd": TABLE_2["decay"] | {"cell": cell}})
            assert not re.search(r"\b(nan|inf|None)\b", markdown), (place, value)
            del cell[place]
            report(tmp_path, TABLE_2 | {"odd": TABLE_2["decay"] | {"cell": cell}})
