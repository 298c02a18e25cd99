"""Markdown pages whose tables and plots come from result files: each block between

<!-- report: NAME -->
<!-- end -->

holds the part of a report that has this name, and <!-- results: FILES --> says which files it is made from.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastweights.report.build import sections_of, write_page
from fastweights.report.page import Plot, Table, block_markdown
from fastweights.report.results import ReportError, ResultFile, read_results

FILES = re.compile(r"^<!--\s*results:(.*?)-->", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!--\s*(?:report:\s*(?P<name>.*?)|end)\s*-->[ \t]*$", re.MULTILINE)
FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class _Block:
    """What stands between two marks, as places in the page's text."""

    name: str
    line: int
    start: int
    stop: int


def fill_page(page: str | os.PathLike, results: Sequence[ResultFile] | None = None, *, write: bool = True) -> bool:
    """Fill the marked blocks of a page from the results that it names, or from those given; returns whether anything
    was not up to date. Without `write` nothing is written, and of a plot only its presence is looked at: other
    versions of matplotlib draw other bytes."""
    page = Path(page)
    text = _read(page)
    blocks = _blocks(page, text)
    parts = _parts(page, text, results)
    for block in blocks:
        if block.name not in parts:
            known = ", ".join(parts)
            raise ReportError(f"{page}, line {block.line}: the results have no part {block.name!r}; they have: {known}")
    filled, plots = _filled(page, text, [(block, parts[block.name]) for block in blocks])
    if not write:
        return filled != text or any(not path.is_file() for path in plots)
    files: dict[Path, str] = {path: plot.svg for path, plot in plots.items()} | {page: filled}
    changed = {path: content for path, content in files.items() if not _holds(path, content)}
    ends = b"\r\n" if b"\r\n" in page.read_bytes() else b"\n"
    for path, content in changed.items():
        write_page(path, content.encode().replace(b"\n", ends) if path == page else content)
    return bool(changed)


def is_filled(page: str | os.PathLike) -> bool:
    """Whether a page says what it is filled from."""
    return FILES.search(_without_code(_read(Path(page)))) is not None


def _read(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ReportError(f"{page} cannot be read: {reason}; give a Markdown page") from error


def _holds(path: Path, content: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == content


def _without_code(text: str) -> str:
    """Blanks in place of code blocks, which may show how to write a mark: every place stays the same."""
    return FENCED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


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
        blocks.append(_Block(name, line, mark.end(), after.start()))
    if not blocks:
        raise ReportError(f"{page} has nothing to fill: mark a place with <!-- report: NAME --> and <!-- end --> below")
    return blocks


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
        said = f"line {_line(text, comments[1].start())}: a second" if comments else "line 1: no"
        raise ReportError(
            f"{page}, {said} comment names the results: begin the page with one <!-- results: ../results/*.json -->, "
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


def _filled(page: Path, text: str, blocks: Sequence[tuple[_Block, Table | Plot]]) -> tuple[str, dict[Path, Plot]]:
    """The text, and the plots by the files that it shows them from, beside the page."""
    pieces, plots, last = [], {}, 0
    for block, part in blocks:
        if isinstance(part, Plot):
            part = replace(part, file=f"{page.stem}_{Path(part.file).name}")
            plots[page.parent / part.file] = part
        pieces += [text[last : block.start], f"\n{block_markdown(part)}\n"]
        last = block.stop
    return "".join([*pieces, text[last:]]), plots
