"""The figure of a cost measurement, as the paper's Figure 1: time and peak memory of one token against the text."""

from __future__ import annotations

import os
from pathlib import Path

from fastweights.report.build import write_page
from fastweights.report.cost import conditions_text, cost_panel
from fastweights.report.plots import draw_rows
from fastweights.report.results import ReportError, cost_parts
from fastweights.results import CostResult


def cost_figure(cost: CostResult, target: str | os.PathLike) -> list[Path]:
    """Draw a result of `fastweights profile` into two files of one name, .png and .svg.

    Raises:
        ReportError: If there is nothing to draw, or a file cannot be written.
    """
    svg, png = draw_cost(cost)
    files: dict[Path, str | bytes] = {Path(target).with_suffix(".png"): png, Path(target).with_suffix(".svg"): svg}
    for path, content in files.items():
        write_page(path, content)
    return list(files)


def draw_cost(cost: CostResult) -> tuple[str, bytes]:
    """The figure as SVG and as PNG."""
    rows = []
    for part in cost_parts(cost):
        panels = [cost_panel(part, key) for key in ("seconds", "peak_bytes")]
        if any(panel.is_empty for panel in panels):
            panels = [cost_panel(part, key) for key in ("seconds", "bytes")]
        if not any(panel.is_empty for panel in panels):
            rows.append((conditions_text(part), panels))
    if not rows:
        raise ReportError("nothing to draw: the result has no point of any length")
    return draw_rows(rows)
