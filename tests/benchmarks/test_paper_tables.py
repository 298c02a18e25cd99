"""The paper's tables beside our runs, and the order of their cells."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.grid_results import FAILED, TABLE_1, TABLE_2, in_table_1, in_table_2, run
from helpers.sample_results import INFINITY, NAN, svg_texts, table, write

from fastweights.report.page import Plot, block_markdown

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from paper_tables import FILES, RESULTS, kendall, paper_tables


def tables(folder: Path, results: dict[str, Any]) -> dict[str, str]:
    """The Markdown of the tables by name."""
    parts = paper_tables(write(folder, results))
    return {name: block_markdown(part) + "\n" for name, part in parts.items() if not isinstance(part, Plot)}


def test_every_committed_run_of_the_paper_has_a_cell() -> None:
    assert sorted(f"{name}.json" for name in FILES) == sorted(path.name for path in RESULTS.glob("*.json"))
    parts = paper_tables()
    assert list(parts) == ["Table 1", "Table 1 plot", "Table 2", "Table 2 plot"]


def test_a_table_with_columns_has_ours_beside_the_papers(tmp_path: Path) -> None:
    words = tables(tmp_path, TABLE_1)["Table 1"]
    assert table(words, "Table 1") == [
        {
            "Table 1": "add",
            "baseline": "31.23",
            "baseline: paper": "22.6",
            "no norm": "diverged (reached 40.00)",
            "no norm: paper": "diverged",
            "no map": "28.00",
            "no map: paper": "20.0",
        },
        {
            "Table 1": "delta",
            "baseline": "33.50 (33.00 to 34.00)",
            "baseline: paper": "21.6",
            "no norm": "–",
            "no norm: paper": "–",
            "no map": "diverged",
            "no map: paper": "diverged",
        },
        {
            "Table 1": "decay",
            "baseline": "N/A",
            "baseline: paper": "N/A",
            "no norm": "–",
            "no norm: paper": "–",
            "no map": "25.50",
            "no map: paper": "17.1",
        },
    ]
    assert "From add_baseline.json, add_norm.json, " in words and "The base model: 14.50." in words
    assert "Of several seeds the mean, in brackets the lowest and the highest." in words


def test_table_without_columns_has_a_row_for_each_variant(tmp_path: Path) -> None:
    rows = table(tables(tmp_path, TABLE_2)["Table 2"], "Table 2")
    test, with_context = ("wiki.test.raw.xz, context 0", "wiki.test.raw.xz, context 480")
    perplexity = "validation perplexity"
    assert rows == [
        {"Table 2": "local", "seeds": "1", "tokens": "3 M", perplexity: "30.00", test: "41.50", with_context: "–"}
        | {"paper": "19.4"},
        {"Table 2": "gated, m 32", "seeds": "2", "tokens": "20 M to 25 M", perplexity: "26.50 (26.00 to 27.00)"}
        | {test: "36.50 (36.00 to 37.00)", with_context: "–", "paper": "16.4"},
        {"Table 2": "decay, m 32", "seeds": "1", "tokens": "3 M", perplexity: "24.00", test: "31.25"}
        | {with_context: "30.00", "paper": "14.6"},
    ]
    one_test = {name: body | {"tests": body["tests"][:1]} for name, body in TABLE_2.items()}
    assert "wiki.test.raw.xz" in table(tables(tmp_path, one_test)["Table 2"], "Table 2")[0]
    without = {name: body | {"tests": None, "cell": body["cell"] | {"paper": None}} for name, body in TABLE_2.items()}
    assert list(table(tables(tmp_path, without)["Table 2"], "Table 2")[0]) == ["Table 2", "seeds", "tokens", perplexity]


def test_the_order_is_compared_with_the_papers(tmp_path: Path) -> None:
    found = tables(tmp_path, TABLE_1 | TABLE_2)
    # 6 cells: no map < add < delta here, but delta < add in the paper; two diverged in both, which are no pair
    expected = (
        "Order of 6 cells against the paper's, diverged as the worst: Kendall's tau 0.86, "
        "1 of 15 pairs ordered differently (here add (baseline) is better than delta (baseline))."
    )
    assert expected in found["Table 1"]
    same = "Order of 3 cells against the paper's: Kendall's tau 1.00, none of 3 pairs ordered differently."
    assert same in found["Table 2"]


def test_at_most_five_pairs_are_named_the_furthest_apart_first(tmp_path: Path) -> None:
    backwards = {f"r{i}": in_table_2(f"row {i}", 10.0 + i * i, 50.0 - i) for i in range(4)}
    words = tables(tmp_path, backwards)["Table 2"]
    found = re.search(r"tau (\S+), (\d+ of \d+ pairs ordered differently) \((.*?)\)\.", words)
    assert found is not None and found.group(1, 2) == ("-1.00", "6 of 6 pairs ordered differently")
    assert found[3].split("; ") == [
        "here row 3 is better than row 0",
        "here row 3 is better than row 1",
        "here row 3 is better than row 2",
        "here row 2 is better than row 0",
        "here row 2 is better than row 1",
        "and 1 more",
    ]


def test_order_needs_two_values_on_both_sides(tmp_path: Path) -> None:
    for other in (in_table_2("b", None, 20.0), in_table_2("b", "N/A", 20.0), in_table_2("b", 20.0, None)):
        assert "Kendall" not in tables(tmp_path, {"a": in_table_2("a", 10.0, 20.0), "b": other})["Table 2"]
    both = {name: in_table_2(name, "diverged", 20.0, **FAILED) for name in "ab"}
    assert "Kendall" not in tables(tmp_path, both)["Table 2"]


@pytest.mark.parametrize(
    ("ours", "paper", "tau"),
    [([1, 2, 3, 4], [1, 3, 2, 4], 2 / 3), ([1, 2, 2, 5], [4, 4, 1, 2], -0.4), ([9, 9, 1], [1, 2, 2], -0.5)],
)
def test_kendall_tau_counts_ties(ours: list[int], paper: list[int], tau: float) -> None:
    pairs = itertools.combinations(zip(ours, paper, strict=True), 2)
    orders = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in pairs]
    assert kendall(orders) == pytest.approx(tau)
    assert kendall([]) is None and kendall([(0, 1)]) is None


def test_paper_value_that_is_not_finite_is_shown_as_diverged(tmp_path: Path) -> None:
    rows = table(tables(tmp_path, {"b": in_table_2("b", NAN, NAN)})["Table 2"], "seeds")
    assert (rows[0]["validation perplexity"], rows[0]["paper"]) == ("diverged", "diverged")


def test_malformed_or_missing_cells_are_shown_without_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.report.parts.draw", lambda panel: "")
    for place in ("table", "row", "column", "paper"):
        for value in (NAN, INFINITY, -1, 0, None, "", "?", [], {}, True, [{}], [1]):
            cell = TABLE_2["decay"]["cell"] | {place: value}
            words = tables(tmp_path, TABLE_2 | {"odd": TABLE_2["decay"] | {"cell": cell}})["Table 2"]
            assert not re.search(r"\b(nan|inf|None)\b", words), (place, value)
            del cell[place]
            tables(tmp_path, TABLE_2 | {"odd": TABLE_2["decay"] | {"cell": cell}})


def test_cells_without_a_column_get_a_column_of_their_own(tmp_path: Path) -> None:
    runs = {
        "a": in_table_1("add", "no map", 20.0, 28.0),
        "b": run({"table": "Table 1", "row": "base", "paper": 14}, 15.0),
    }
    rows = table(tables(tmp_path, runs)["Table 1"], "Table 1")
    assert rows[1] == {
        "Table 1": "base",
        "no map": "–",
        "no map: paper": "–",
        "validation perplexity": "15.00",
        "paper": "14",
    }


def test_plots_have_a_line_for_each_cell(tmp_path: Path) -> None:
    plot = paper_tables(write(tmp_path, TABLE_1))["Table 1 plot"]
    assert isinstance(plot, Plot)
    (tmp_path / "plot.svg").write_text(plot.svg)
    drawn = set(svg_texts(tmp_path / "plot.svg"))
    assert {"add (baseline)", "delta (no map)*", "Table 1: validation perplexity"} <= drawn
