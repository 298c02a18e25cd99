"""Pages whose marked blocks are filled from result files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.grid_results import TABLE_2, in_table_2
from helpers.sample_results import ALL, COST, EVALUATION, TRAINING, svg_texts, table, write

from fastweights.report import ReportError, fill_page, is_filled
from fastweights.results import ResultError

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


def test_filled_page_is_not_written_again(tmp_path: Path) -> None:
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


def test_check_reports_stale_blocks_without_writing(tmp_path: Path) -> None:
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


def test_results_argument_replaces_the_files_the_page_names(tmp_path: Path) -> None:
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
    plots += ["loss", "validation", "Table 2", "ranking"]
    tables += ["cache", "ranking", "ranking chosen"]
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
def test_malformed_page_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
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
    with pytest.raises(ResultError, match=r"bad\.json has no kind"):
        fill_page(page)
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(ReportError, match=r"paper\.md cannot be read: it is not text"):
        fill_page(page)


def test_line_endings_of_a_page_are_preserved(tmp_path: Path) -> None:
    write(tmp_path, {"cost": COST})
    page = tmp_path / "page.md"
    page.write_bytes(b"<!-- results: cost.json -->\r\n<!-- report: cost -->\r\n<!-- end -->\r\n")
    assert fill_page(page) and not fill_page(page)
    assert page.read_bytes().count(b"\n") == page.read_bytes().count(b"\r\n") > 4


def test_end_without_a_block_is_refused_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, {"cost": COST})
    page = tmp_path / "page.md"
    page.write_text("<!-- results: cost.json -->\n<!-- report: cost -->\n<!-- end -->\n<!-- end -->\n")
    with pytest.raises(ReportError, match="line 4: <!-- end --> closes no block"):
        fill_page(page)
