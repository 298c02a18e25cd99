"""Runs as the cells of a paper's tables, and pages that are filled from results."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.sample_results import (
    ALL,
    COST,
    EVALUATION,
    INFINITY,
    NAN,
    TRAINING,
    report,
    section,
    svg_texts,
    table,
    write,
)

from fastweights.report import ReportError, fill_page, is_filled
from fastweights.report.comparison import kendall

WIKI = {"data": "wiki.test.raw.xz", "word": 44.0, "bits_per_byte": 1.1, "tokens": 300_000, "length": 1024, "context": 0}


def run(cell: dict[str, Any], best: Any, **changes: Any) -> dict[str, Any]:
    last = best if isinstance(best, float) else 20.0
    points = [{"tokens": 1_000_000 * i, "perplexity": last * 3 / i} for i in (1, 2, 3)]
    name = "-".join(str(cell.get(part, "")) for part in ("row", "column"))
    own = {"name": name, "cell": cell, "best": {"tokens": 3_000_000, "perplexity": best}, "validation": points}
    return TRAINING | own | changes


def in_table_1(row: str, column: str, paper: Any, best: Any, **changes: Any) -> dict[str, Any]:
    return run({"table": "Table 1", "row": row, "column": column, "paper": paper}, best, **changes)


def in_table_2(row: str, paper: Any, best: Any, *tests: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return run({"table": "Table 2", "row": row, "paper": paper}, best, tests=list(tests), **changes)


FAILED = {"diverged": {"step": 120, "stage": "finetune", "reason": "the loss is nan"}, "finished": False}
TABLE_1 = {
    "add_baseline": in_table_1("add", "baseline", 22.6, 31.234),
    "add_norm": in_table_1("add", "no norm", "diverged", 40.0, **FAILED),
    "add_map": in_table_1("add", "no map", 20.0, 28.0),
    "delta_baseline_0": in_table_1("delta", "baseline", 21.6, 33.0, seed=0),
    "delta_baseline_1": in_table_1("delta", "baseline", 21.6, 34.0, seed=1),
    "delta_map": in_table_1("delta", "no map", "diverged", None, **FAILED),
    "decay_baseline": in_table_1("decay", "baseline", "N/A", None, validation=[]),
    "decay_map": in_table_1("decay", "no map", 17.1, 25.5),
}
TABLE_2 = {
    "local": in_table_2("local", 19.4, 30.0, WIKI | {"token": 41.5}),
    "gated_0": in_table_2("gated, m 32", 16.4, 26.0, WIKI | {"token": 36.0}, seed=0, tokens=20_000_000),
    "gated_1": in_table_2("gated, m 32", 16.4, 27.0, WIKI | {"token": 37.0}, seed=1, tokens=25_000_000),
    "decay": in_table_2("decay, m 32", 14.6, 24.0, WIKI | {"token": 31.25}, WIKI | {"token": 30.0, "context": 480}),
}


def test_a_table_with_columns_has_ours_beside_the_papers(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, TABLE_1)
    assert table(section(markdown, "Table 1"), "Table 1") == [
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
    words = section(markdown, "Table 1")
    assert "From add_baseline.json, add_norm.json, " in words and "The base model: 14.50." in words
    assert "Of several seeds the mean, in brackets the lowest and the highest." in words


def test_a_table_without_columns_is_a_list(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, TABLE_2)
    rows = table(section(markdown, "Table 2"), "Table 2")
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
    assert "wiki.test.raw.xz" in table(report(tmp_path, one_test)[0], "Table 2")[0]
    without = {name: body | {"tests": None, "cell": body["cell"] | {"paper": None}} for name, body in TABLE_2.items()}
    assert list(table(report(tmp_path, without)[0], "Table 2")[0]) == ["Table 2", "seeds", "tokens", perplexity]


def test_the_order_is_compared_with_the_papers(tmp_path: Path) -> None:
    markdown, _ = report(tmp_path, TABLE_1 | TABLE_2)
    # 6 cells: no map < add < delta here, but delta < add in the paper; two diverged in both, which are no pair
    said = (
        "Order of 6 cells against the paper's, diverged as the worst: Kendall's tau 0.86, "
        "1 of 15 pairs ordered differently (here add (baseline) is better than delta (baseline))."
    )
    assert said in section(markdown, "Table 1") and f"- Table 1: {said}" in section(markdown, "Summary")
    same = "Order of 3 cells against the paper's: Kendall's tau 1.00, none of 3 pairs ordered differently."
    assert same in section(markdown, "Table 2")


def test_at_most_five_pairs_are_named_the_furthest_apart_first(tmp_path: Path) -> None:
    backwards = {f"r{i}": in_table_2(f"row {i}", 10.0 + i * i, 50.0 - i) for i in range(4)}
    markdown, _ = report(tmp_path, backwards)
    found = re.search(r"tau (\S+), (\d+ of \d+ pairs ordered differently) \((.*?)\)\.", section(markdown, "Table 2"))
    assert found is not None and found.group(1, 2) == ("-1.00", "6 of 6 pairs ordered differently")
    assert found[3].split("; ") == [
        "here row 3 is better than row 0",
        "here row 3 is better than row 1",
        "here row 3 is better than row 2",
        "here row 2 is better than row 0",
        "here row 2 is better than row 1",
        "and 1 more",
    ]


def test_no_order_is_told_without_two_values_on_both_sides(tmp_path: Path) -> None:
    for other in (in_table_2("b", None, 20.0), in_table_2("b", "N/A", 20.0), in_table_2("b", 20.0, None)):
        assert "Kendall" not in report(tmp_path, {"a": in_table_2("a", 10.0, 20.0), "b": other})[0]
    both = {name: in_table_2(name, "diverged", 20.0, **FAILED) for name in "ab"}
    assert "Kendall" not in report(tmp_path, both)[0]


@pytest.mark.parametrize(
    ("ours", "paper", "tau"),
    [([1, 2, 3, 4], [1, 3, 2, 4], 2 / 3), ([1, 2, 2, 5], [4, 4, 1, 2], -0.4), ([9, 9, 1], [1, 2, 2], -0.5)],
)
def test_kendall_counts_ties(ours: list[int], paper: list[int], tau: float) -> None:
    pairs = itertools.combinations(zip(ours, paper, strict=True), 2)
    orders = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in pairs]
    assert kendall(orders) == pytest.approx(tau)
    assert kendall([]) is None and kendall([(0, 1)]) is None


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
    assert (rows["b"]["validation perplexity"], rows["b"]["paper"]) == ("diverged", "diverged")
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


def test_many_runs_are_told_by_their_tables_alone(tmp_path: Path) -> None:
    few = report(tmp_path, TABLE_2)[0]
    assert "decay, m 32- reached a validation perplexity" in few and "plots/loss.svg" in few
    many = {f"r{i}": in_table_2(f"row {i}", None, 20.0 + i) for i in range(20)} | {"other": TRAINING}
    markdown, _ = report(tmp_path, many)
    assert section(markdown, "Summary").count("reached a validation perplexity") == 1
    assert len(table(section(markdown, "Training"), "best perplexity")) == 21
    assert "paper-run" in svg_texts(tmp_path / "report" / "plots" / "validation.svg")
    assert "row 3-" not in svg_texts(tmp_path / "report" / "plots" / "validation.svg")
    assert "From r0.json, r1.json, r2.json and 17 more files." in section(markdown, "Table 2")


def test_a_cell_may_be_odd_or_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.report.parts.draw", lambda panel: "")
    odd = [NAN, INFINITY, -1, 0, None, "", "?", [], {}, True, [{}], [1], {"perplexity": "x"}]
    for place in ("cell", "best", "tests", "validation", "diverged", "tokens", "seed", "base", "finished", "name"):
        for value in odd:
            report(tmp_path, TABLE_2 | {"odd": TABLE_2["decay"] | {place: value}})
    for place in ("table", "row", "column", "paper"):
        for value in odd:
            body = copy.deepcopy(TABLE_2["decay"])
            body["cell"][place] = value
            markdown, _ = report(tmp_path, TABLE_2 | {"odd": body})
            assert not re.search(r"\b(nan|inf|None)\b", markdown), (place, value)
            del body["cell"][place]
            report(tmp_path, TABLE_2 | {"odd": body})
    for place in WIKI | {"token": 1}:
        for value in odd:
            report(tmp_path, {"odd": in_table_2("a", 10.0, 20.0, WIKI | {"token": 3.0, place: value})})


def test_some_cells_without_a_column_have_their_own(tmp_path: Path) -> None:
    runs = {
        "a": in_table_1("add", "no map", 20.0, 28.0),
        "b": run({"table": "Table 1", "row": "base", "paper": 14}, 15.0),
    }
    rows = table(report(tmp_path, runs)[0], "Table 1")
    assert rows[1] == {
        "Table 1": "base",
        "no map": "–",
        "no map: paper": "–",
        "validation perplexity": "15.00",
        "paper": "14",
    }


PAGE = """# Against the paper
<!-- results: results/*.json
     results/decay.json -->

Words before.

<!-- report: Table 2 -->
to be replaced
<!-- end -->

<!--report:Table 2 plot-->
<!-- end -->

```
<!-- report: not a mark -->
```
Words after.
"""


def page_of(folder: Path, text: str = PAGE, results: dict[str, Any] = TABLE_2) -> Path:
    write(folder / "results", results)
    page = folder / "paper.md"
    page.write_text(text)
    return page


def test_a_page_is_filled_once(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert is_filled(page)
    assert fill_page(page)
    text = page.read_text()
    before, after = "Words before.\n\n<!-- report: Table 2 -->\n| Table 2 | seeds |", "```\nWords after.\n"
    assert before in text and text.endswith(after) and "to be replaced" not in text
    # the files of a pattern are taken by name
    assert [row["Table 2"] for row in table(text, "Table 2")] == ["decay, m 32", "gated, m 32", "local"]
    plot = tmp_path / "paper_comparison_table_2.svg"
    assert "<!--report:Table 2 plot-->\n![Table 2: validation perplexity. From " in text
    assert f"]({plot.name})\n<!-- end -->" in text and "gated, m 32" in svg_texts(plot)
    written = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (page, plot)}
    os.utime(plot)
    written[plot] = plot.read_bytes(), plot.stat().st_mtime_ns
    assert not fill_page(page) and not fill_page(page, write=False)
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (page, plot)} == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["paper.md", plot.name, "results"]


def test_what_is_not_up_to_date_is_found_without_writing(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert fill_page(page, write=False) and page.read_text() == PAGE
    fill_page(page)
    plot = tmp_path / "paper_comparison_table_2.svg"
    plot.write_text("drawn by another matplotlib")
    assert not fill_page(page, write=False)
    assert fill_page(page) and plot.read_text().startswith("<?xml")
    plot.unlink()
    assert fill_page(page, write=False) and not plot.exists()
    fill_page(page)
    write(tmp_path / "results", {"decay": in_table_2("decay, m 32", 14.6, 23.0)})
    assert fill_page(page, write=False)
    assert fill_page(page) and not fill_page(page, write=False)
    assert table(page.read_text(), "Table 2")[0]["validation perplexity"] == "23.00"


def test_checking_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = page_of(tmp_path)
    fill_page(page)

    def fail(panel: Any) -> str:
        raise AssertionError

    monkeypatch.setattr("fastweights.report.parts.draw", fail)
    assert not fill_page(page, write=False)


def test_results_that_are_given_take_the_place_of_the_pages(tmp_path: Path) -> None:
    page = page_of(tmp_path, "<!-- report: runs -->\n<!-- end -->\n")
    assert is_filled(page)
    [other] = write(tmp_path, {"other": TRAINING | {"name": "another"}})
    assert fill_page(page, [other])
    assert [row["run"] for row in table(page.read_text(), "run")] == ["another"]


def test_every_table_and_plot_has_a_name(tmp_path: Path) -> None:
    layer = COST | {"layer": COST | {"level": "layer"}}
    page = page_of(tmp_path, "<!-- report: all -->\n<!-- end -->", ALL | TABLE_2 | {"twice": layer})
    with pytest.raises(ReportError) as caught:
        fill_page(page, sorted((tmp_path / "results").glob("*.json")))
    names = str(caught.value).partition("they have: ")[2].split(", ")
    tables = ["models", "perplexity", "position", "recall pairs", "recall copy", "tasks", "cost", "cost 2", "cost 3"]
    plots = ["position", "recall pairs", "recall copy", "seconds", "bytes", "seconds 2", "seconds 3", "bytes 3"]
    plots += ["loss", "validation", "Table 2"]
    assert set(names) == {*tables, "runs", "stages", "provenance", "Table 2", *(f"{name} plot" for name in plots)}
    for name in names:
        page.write_text(f"<!-- report: {name} -->\n<!-- end -->")
        assert fill_page(page, sorted((tmp_path / "results").glob("*.json")))
        assert not fill_page(page, sorted((tmp_path / "results").glob("*.json")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- results: results/*.json -->\n\n<!-- report: runs -->\n", "line 3: the block 'runs' is not closed"),
        (
            "<!-- results: results/*.json -->\n<!-- report: runs -->\n<!-- report: stages -->\n<!-- end -->",
            "line 2: the block 'runs' is not closed: put <!-- end --> below it",
        ),
        ("<!-- report: runs -->\n<!-- end -->", "line 1: no comment names the results: begin the page with one"),
        (
            "<!-- results: results/*.json -->\n<!-- results: x.json -->\n<!-- report: runs -->\n<!-- end -->",
            "line 2: a second comment names the results",
        ),
        (
            "# A\n<!-- results: none/*.json -->\n<!-- report: runs -->\n<!-- end -->",
            "line 2: no result file at none/*.json, as seen from",
        ),
        ("<!-- results: -->\n<!-- report: runs -->\n<!-- end -->", "line 1: no result file is named"),
        (
            "<!-- results: results/*.json -->\n<!-- report: Table 3 -->\n<!-- end -->",
            "line 2: the results have no part 'Table 3'; they have: Table 2, Table 2 plot, runs, stages,",
        ),
        ("<!-- results: results/*.json -->\nWords.", "has nothing to fill: mark a place with"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(tmp_path: Path, text: str, message: str) -> None:
    page = page_of(tmp_path, text)
    with pytest.raises(ReportError) as caught:
        fill_page(page)
    assert str(caught.value).startswith(str(page)) and message in str(caught.value)
    assert page.read_text() == text


def test_pages_and_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no\.md cannot be read: No such file"):
        fill_page(tmp_path / "no.md")
    page = page_of(tmp_path)
    with pytest.raises(ReportError, match="is filled from result files, and none was given"):
        fill_page(page, [])
    (tmp_path / "results" / "bad.json").write_text(json.dumps({"models": EVALUATION["models"]}))
    with pytest.raises(ReportError, match=r"bad\.json has no kind"):
        fill_page(page)
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(ReportError, match=r"paper\.md cannot be read: it is not text"):
        fill_page(page)


def test_a_page_keeps_the_ends_of_its_lines(tmp_path: Path) -> None:
    write(tmp_path, {"cost": COST})
    page = tmp_path / "page.md"
    page.write_bytes(b"<!-- results: cost.json -->\r\n<!-- report: cost -->\r\n<!-- end -->\r\n")
    assert fill_page(page) and not fill_page(page)
    assert page.read_bytes().count(b"\n") == page.read_bytes().count(b"\r\n") > 4


def test_an_end_without_a_block(tmp_path: Path) -> None:
    write(tmp_path, {"cost": COST})
    page = tmp_path / "page.md"
    page.write_text("<!-- results: cost.json -->\n<!-- report: cost -->\n<!-- end -->\n<!-- end -->\n")
    with pytest.raises(ReportError, match="line 4: <!-- end --> closes no block"):
        fill_page(page)
