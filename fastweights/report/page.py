"""A page of text, tables and plots as one structure, written as Markdown and as one HTML file that needs nothing else.

Every string in it is plain text: both writers escape it.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str


@dataclass(frozen=True)
class Bullets:
    """A list of bullets, after a lead where there is one."""

    lines: Sequence[str]
    lead: str = ""


@dataclass(frozen=True)
class Code:
    """A block of code."""

    language: str
    code: str


@dataclass(frozen=True)
class Table:
    """The first `names` columns are words, the others numbers; `note` stands below; a page asks for it by `name`."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    note: str = ""
    name: str = ""


@dataclass(frozen=True)
class Plot:
    """`file` is its place beside the Markdown page, `caption` says what it shows; a page asks for it by `name`."""

    file: str
    draw: Callable[[], str]
    caption: str
    name: str

    @cached_property
    def svg(self) -> str:
        """The plot, drawn once."""
        return self.draw()


Block = Text | Bullets | Code | Table | Plot


@dataclass(frozen=True)
class Section:
    """A heading, and the blocks below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report without its format: a title, and sections."""

    title: str
    sections: Sequence[Section]

    @property
    def plots(self) -> list[Plot]:
        """The plots of all sections."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Plot)]


def to_markdown(page: Page) -> str:
    """The page as Markdown. Plots are links to their files."""
    parts = [f"# {_plain(page.title)}"]
    for section in page.sections:
        parts += [f"## {_plain(section.title)}", *map(block_markdown, section.blocks)]
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*\[\]<>|&~#$]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def block_markdown(block: Block) -> str:
    """A block as Markdown."""
    match block:
        case Text(words):
            return _plain(words)
        case Bullets(lines, lead):
            return "\n".join([*([f"**{_plain(lead)}**", ""] if lead else []), *(f"- {_plain(line)}" for line in lines)])
        case Code(language, code):
            return f"```{language}\n{code.rstrip()}\n```"
        case Table():
            return _table_markdown(block)
        case Plot(file=file, caption=caption):
            return f"![{_plain(caption)}]({file})"


def _table_markdown(table: Table) -> str:
    rule = ["---" if i < table.names else "---:" for i in range(len(table.header))]
    cells = [list(map(_plain, table.header)), rule, *(list(map(_plain, row)) for row in table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([*lines, *(["", _plain(table.note)] if table.note else [])])


CSS = """
:root { color-scheme: light dark; --ink: #24292f; --paper: #ffffff; --line: #d0d7de; --quiet: #57606a; --band: #f6f8fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #14181d; --line: #3b434b; --quiet: #9aa4af; --band: #1b2128 }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.7rem; line-height: 1.25 }
h2 { font-size: 1.25rem; margin-top: 2.5rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { background: var(--band); font-weight: 600 }
.n { text-align: right; white-space: nowrap }
.note, figcaption { color: var(--quiet); font-size: .85rem }
figure { display: inline-block; width: min(100%, 29rem); margin: 1rem .5rem 1rem 0; vertical-align: top }
figure img { display: block; width: 100%; height: auto }
pre { background: var(--band); padding: .8rem; overflow-x: auto }
""".strip()
# The page may show what is inside it and nothing else: no script, no network.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_html(page: Page) -> str:
    """The page as one HTML file with its plots inside."""
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        _tag("title", page.title),
        f"<style>\n{CSS}\n</style>",
    ]
    body = [_tag("h1", page.title)]
    for section in page.sections:
        body += ["<section>", _tag("h2", section.title), *map(_block_html, section.blocks), "</section>"]
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body, "</body>", "</html>"]
    return "\n".join(lines) + "\n"


def _tag(name: str, text: str, attributes: str = "") -> str:
    return f"<{name}{attributes}>{html.escape(text)}</{name}>"


def _block_html(block: Block) -> str:
    match block:
        case Text(words):
            return _tag("p", words)
        case Bullets(lines, lead):
            items = "\n".join(_tag("li", line) for line in lines)
            return (f"<p>{_tag('strong', lead)}</p>\n" if lead else "") + f"<ul>\n{items}\n</ul>"
        case Code(_, code):
            return f"<pre>{_tag('code', code)}</pre>"
        case Table():
            return _table_html(block)
        case Plot(caption=caption):
            source = base64.b64encode(block.svg.encode()).decode()
            image = f'<img alt="{html.escape(caption)}" src="data:image/svg+xml;base64,{source}">'
            return f"<figure>\n{image}\n{_tag('figcaption', caption)}\n</figure>"


def _table_html(table: Table) -> str:
    def row(kind: str, cells: Sequence[str]) -> str:
        tags = (_tag(kind, cell, "" if i < table.names else ' class="n"') for i, cell in enumerate(cells))
        return f"<tr>{''.join(tags)}</tr>"

    rows = "\n".join(row("td", cells) for cells in table.rows)
    shown = f"<table>\n<thead>{row('th', table.header)}</thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    note = "\n" + _tag("p", table.note, ' class="note"') if table.note else ""
    return f'<div class="scroll" tabindex="0">\n{shown}\n</div>{note}'
