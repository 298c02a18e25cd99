"""Markdown pages whose tables, plots and figures come from result files. Three kinds of marks are filled:

<!-- report: NAME -->             a table or plot of a report of the files in <!-- results: FILES -->
<!-- end -->

<!-- figure: results/cost.json -->  time and memory against length, as `fastweights profile` draws them
<!-- end -->

a sentence with <!-- value: results/cost.json models[0].points[-1].seconds as .1f ms -->1.5 ms<!-- end --> in it
(values.py has the expressions)
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastweights.report.build import sections_of, write_page
from fastweights.report.figure import draw_cost
from fastweights.report.page import Code, Plot, Table, block_markdown
from fastweights.report.results import ReportError, ResultFile, read_results
from fastweights.report.values import find_result, value_text
from fastweights.results import CostResult, ResultError

FILES = re.compile(r"^<!--\s*results:(.*?)-->", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!--\s*(?:(?P<kind>report|figure):\s*(?P<name>.*?)|end)\s*-->[ \t]*$", re.MULTILINE)
VALUE = re.compile(r"<!--\s*value:\s*(?P<expression>.*?)\s*-->(?P<text>[^\n]*?)<!--\s*end\s*-->")
VALUE_START = re.compile(r"<!--\s*value:")
# A comment that starts a line, a list item or a quotation ends the paragraph in CommonMark: the sentence would break.
LINE_START = re.compile(r"[ \t]*(?:(?:[-*+>]|\d+\.)[ \t]+)*")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)

Parts = Mapping[str, Table | Plot | Code]


@dataclass(frozen=True)
class _Block:
    """A block between two marks: `start` and `stop` are positions in the text of the page."""

    kind: str
    name: str
    line: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Edit:
    """New text for a place of the page, and the plot it shows."""

    start: int
    stop: int
    text: str
    plot: Plot | None = None


def fill_page(
    page: str | os.PathLike,
    results: Sequence[ResultFile] | None = None,
    *,
    parts: Parts | None = None,
    write: bool = True,
) -> bool:
    """Fill the marks of a page.

    Args:
        page: a Markdown file.
        results: result files for the `report` blocks, in place of those that the page names.
        parts: tables, plots and code by name that `report` blocks may show besides those of the results.
        write: False only compares. A plot is then only looked for, since versions of matplotlib draw other bytes.

    Returns:
        Whether anything was not up to date.

    Raises:
        ReportError: a mark is not closed, or the results do not have what it names; the message has page and line.
    """
    page = Path(page)
    text = _read(page)
    edits = sorted([*_block_edits(page, text, results, parts or {}), *_value_edits(page, text)], key=lambda e: e.start)
    if not edits:
        raise ReportError(f"{page} has nothing to fill: mark a place with <!-- report: NAME --> and <!-- end --> below")
    filled = _apply(text, edits)
    plots = {page.parent / edit.plot.file: edit.plot for edit in edits if edit.plot}
    if not write:
        return filled != text or any(not path.is_file() for path in plots)
    files: dict[Path, str] = {path: plot.svg for path, plot in plots.items()} | {page: filled}
    changed = {path: content for path, content in files.items() if not _holds(path, content)}
    ends = b"\r\n" if b"\r\n" in page.read_bytes() else b"\n"
    for path, content in changed.items():
        write_page(path, content.encode().replace(b"\n", ends) if path == page else content)
    return bool(changed)


def is_filled(page: str | os.PathLike) -> bool:
    """Whether a page has marks to fill."""
    text = _without_code(_read(Path(page)))
    return bool(VALUE_START.search(text) or any(mark["kind"] for mark in MARK.finditer(text)))


def _read(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ReportError(f"{page} cannot be read: {reason}; give a Markdown page") from error


def _holds(path: Path, content: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == content


def _without_code(text: str) -> str:
    """Blanks in place of code, which may show how to write a mark: every place stays the same."""
    return CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _apply(text: str, edits: Sequence[_Edit]) -> str:
    filled, last = [], 0
    for edit in edits:
        filled += [text[last : edit.start], edit.text]
        last = edit.stop
    return "".join([*filled, text[last:]])


def _value_edits(page: Path, text: str) -> list[_Edit]:
    code_free = _without_code(text)
    found = {mark.start(): mark for mark in VALUE.finditer(code_free)}
    edits = []
    for start in (mark.start() for mark in VALUE_START.finditer(code_free)):
        where = f"{page}, line {_line(text, start)}"
        if start not in found:
            raise ReportError(f"{where}: the value is not closed: put <!-- end --> after it, on the same line")
        if LINE_START.fullmatch(text, text.rfind("\n", 0, start) + 1, start):
            raise ReportError(f"{where}: a value cannot start a line, where a comment ends the paragraph")
        mark = found[start]
        try:
            value = value_text(mark["expression"], page.parent)
        except ReportError as error:
            raise ReportError(f"{where}: {error}") from error
        edits.append(_Edit(*mark.span("text"), value))
    return edits


def _block_edits(page: Path, text: str, results: Sequence[ResultFile] | None, parts: Parts) -> list[_Edit]:
    blocks = _blocks(page, text)
    if any(block.kind == "report" and block.name not in parts for block in blocks):
        parts = {**_parts(page, text, results), **parts}
    edits = []
    for block in blocks:
        if block.kind == "report" and block.name not in parts:
            known = ", ".join(parts)
            raise ReportError(f"{page}, line {block.line}: the results have no part {block.name!r}; they have: {known}")
        part = _figure(page, block) if block.kind == "figure" else parts[block.name]
        plot = replace(part, file=f"{page.stem}_{Path(part.file).name}") if isinstance(part, Plot) else None
        edits.append(_Edit(block.start, block.stop, f"\n{block_markdown(plot or part)}\n", plot))
    return edits


def _blocks(page: Path, text: str) -> list[_Block]:
    marks = list(MARK.finditer(_without_code(text)))
    blocks: list[_Block] = []
    for mark, after in itertools.zip_longest(marks, marks[1:]):
        name, line = mark["name"], _line(text, mark.start())
        if name is None:
            if not blocks or blocks[-1].stop != mark.start():
                above = "put <!-- report: NAME --> above it"
                raise ReportError(f"{page}, line {line}: <!-- end --> closes no block: {above}")
            continue
        if after is None or after["name"] is not None:
            raise ReportError(f"{page}, line {line}: the block {name!r} is not closed: put <!-- end --> below it")
        blocks.append(_Block(mark["kind"], name, line, mark.end(), after.start()))
    return blocks


def _figure(page: Path, block: _Block) -> Plot:
    """The cost figure of a result file."""
    try:
        cost = CostResult.read(find_result(block.name, page.parent))
    except (ReportError, ResultError) as error:
        raise ReportError(f"{page}, line {block.line}: {error}") from error
    caption = f"Time and memory of one token against context length. From {Path(block.name).name}."
    return Plot(f"{Path(block.name).stem}.svg", lambda: draw_cost(cost)[0], caption, block.name)


def _parts(page: Path, text: str, results: Sequence[ResultFile] | None) -> dict[str, Table | Plot]:
    """Every table and plot of a report by its name."""
    found = read_results(_named_files(page, text) if results is None else results)
    if not found:
        raise ReportError(f"{page} is filled from result files, and none was given: name at least one .json")
    parts: dict[str, Table | Plot] = {}
    for section in sections_of(found):
        for block in section.blocks:
            if isinstance(block, Table | Plot):
                parts.setdefault(block.name, block)
    return parts


def _named_files(page: Path, text: str) -> list[Path]:
    """The files that the page names, those of a pattern sorted."""
    comments = list(FILES.finditer(_without_code(text)))
    if len(comments) != 1:
        where = f"line {_line(text, comments[1].start())}: a second" if comments else "line 1: no"
        raise ReportError(
            f"{page}, {where} comment names the results: begin the page with one <!-- results: ../results/*.json -->, "
            "paths as seen from the page"
        )
    line, files = _line(text, comments[0].start()), []
    for pattern in comments[0][1].split():
        matching = sorted(glob.glob(pattern, root_dir=page.parent, recursive=True))
        if not matching:
            raise ReportError(f"{page}, line {line}: no result file at {pattern}, as seen from {page.parent}")
        files += [page.parent / file for file in matching]
    if not files:
        raise ReportError(f"{page}, line {line}: no result file is named: write <!-- results: ../results/*.json -->")
    return files
