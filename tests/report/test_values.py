"""Single values in sentences of a page, filled from result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.sample_results import COST

from fastweights.report import ReportError, fill_page
from fastweights.report.page import Table
from fastweights.report.values import value_text

RESULT = {
    "a": {"ms a step": 12.5, "tokens/s": 467871.3, "none": None, "name": "decay", "whole": 3.0},
    "rows": [
        {"batch": 1, "data": "wiki.test.xz", "shape": "B 1, T 2", "seconds": 0.0012345, "bytes": 536870912},
        {"batch": 32, "data": "books.txt", "seconds": 0.002469, "bytes": 1048576},
    ],
    "runs": {"one + two": [2.0, 4.0], "sum from 1.0": 7},
    "tasks": {"piqa": {"acc": 0.1, "acc_norm": 0.5}, "lambada": {"acc": 0.3}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/x.json").write_text(json.dumps(RESULT))
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("a.name", "decay"),
        ("a.whole", "3"),
        ("a.ms a step as .1f", "12.5"),
        ("a.tokens/s as ,.0f", "467,871"),
        ("a.tokens/s as ,.3s", "468,000"),
        ("rows[0].seconds as .3s", "0.00123"),
        ("rows[0].seconds as .1f ms", "1.2 ms"),
        ("rows[-1].seconds as .0f in µs", "2469"),
        ("rows[batch=1].bytes as .0f MB", "537 MB"),
        ("rows[batch=32, data=books.txt].bytes as ,", "1,048,576"),
        ("rows[shape=B 1, T 2, batch=1].batch as .0f", "1"),
        ("rows[data=wiki.test.xz].seconds as .1e", "1.2e-03"),
        ("rows[1].seconds / rows[0].seconds as .2f", "2.00"),
        ("rows[1].seconds / rows[0].seconds - 1 as .0%", "100 %"),
        ("rows[1].bytes / results/x.json rows[0].batch * 2 as ,.0f", "2,097,152"),
        ('mean runs."one + two"[*] as .1f', "3.0"),
        ('runs."sum from 1.0" as .0f', "7"),
        ("mean tasks.*.acc_norm or acc as .1%", "40.0 %"),
        ("max rows[*].batch as .0f", "32"),
        ("count rows[*] as .0f", "2"),
    ],
)
def test_expression_is_computed_and_formatted(folder: Path, expression: str, text: str) -> None:
    function, _, rest = expression.partition(" ")
    whole = (
        f"{function} results/x.json {rest}" if function in ("mean", "max", "count") else f"results/x.json {expression}"
    )
    assert value_text(whole, folder) == text


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("results/no.json a", "no.json"),
        ("a.b", "names no file"),
        ("results/x.json a.b", "'a.b'"),
        ("results/x.json rows[5].batch", "rows[5]"),
        ("results/x.json rows[*].batch as .1f", "2 values"),
        ("results/x.json a.name as .1f", "'decay'"),
        ("results/x.json a.none as .1f", "None"),
        ("results/x.json a.name / 2 as .1f", "'decay'"),
        ("results/x.json a.whole as .1f parsec", ".1f parsec"),
        ("results/x.json a.whole as __import__", "__import__"),
    ],
)
def test_bad_expression_names_what_is_wrong(folder: Path, expression: str, named: str) -> None:
    page = folder / "page.md"
    page.write_text(f"Words.\nIt is <!-- value: {expression} --><!-- end -->.\n")
    with pytest.raises(ReportError) as caught:
        fill_page(page)
    assert str(caught.value).startswith(f"{page}, line 2: ") and named in str(caught.value)


def test_values_in_sentences_and_table_cells_are_filled_once(folder: Path) -> None:
    page = folder / "page.md"
    mark = "<!-- value: results/x.json a.ms a step as .1f -->"
    code = f"`{mark}`\n\n```\n{mark}\n```\n"
    page.write_text(f"A step: {mark}old<!-- end --> ms.\n\n| a |\n|---|\n| {mark}<!-- end --> |\n\n{code}")
    assert fill_page(page, write=False) and "old" in page.read_text()
    assert fill_page(page) and not fill_page(page)
    filled = f"{mark}12.5<!-- end -->"
    assert page.read_text() == f"A step: {filled} ms.\n\n| a |\n|---|\n| {filled} |\n\n{code}"


@pytest.mark.parametrize("before", ["", "- ", "1. ", "> ", "  - "])
def test_value_at_the_start_of_a_line_is_refused(folder: Path, before: str) -> None:
    page = folder / "page.md"
    page.write_text(f"Words\n{before}<!-- value: results/x.json a.whole -->3<!-- end --> rows.\n")
    with pytest.raises(ReportError, match="line 2: a value cannot start a line"):
        fill_page(page)


def test_value_that_is_not_closed_is_refused(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("It is <!-- value: results/x.json a.whole -->3\n<!-- end -->\n")
    with pytest.raises(ReportError, match=r"line (1|2): .*end -->"):
        fill_page(page)


def test_figure_is_drawn_beside_the_page(folder: Path) -> None:
    (folder.parent / "results/cost.json").write_text(json.dumps(COST))
    page, figure = folder / "page.md", folder / "page_cost.svg"
    page.write_text("<!-- figure: results/cost.json -->\n<!-- end -->\n")
    assert fill_page(page) and not fill_page(page)
    assert "](page_cost.svg)" in page.read_text() and "<svg" in figure.read_text()
    figure.unlink()
    assert fill_page(page, write=False)
    page.write_text("<!-- figure: results/no.json -->\n<!-- end -->\n")
    with pytest.raises(ReportError, match=r"line 1: .*no\.json"):
        fill_page(page)


def test_given_parts_need_no_result_files(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("<!-- report: mine -->\n<!-- end -->\n")
    assert fill_page(page, parts={"mine": Table(["a"], [["b"]])})
    assert page.read_text() == "<!-- report: mine -->\n| a |\n| --- |\n| b |\n<!-- end -->\n"
