"""Panels of lines as pictures: the same bytes for the same numbers, light or dark as the reader's screen is."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastweights.report.results import ReportError
from fastweights.report.text import axis_text, count_text, finite

Point = tuple[float, float]

# Okabe and Ito's colors, which the color-blind tell apart; grey is the base model's.
GREY = "#808b96"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "sD^vPX"
DASHES = ("-", "--", ":", "-.")
INK, PAPER, GRID = "#24292f", "#ffffff", "#d8dee4"
DARK = {INK: "#e6edf3", PAPER: "#14181d", GRID: "#343c44"}
STYLE = {
    "svg.hashsalt": "fastweights",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": INK for part in ("labelcolor", "edgecolor", "titlecolor")},
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "grid.color": GRID,
    "legend.frameon": False,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
}
MOST_POINTS = 250
LONGEST_LABEL = 44
# Of a name beside the axes of draw_rows, as a share of the axes' height.
NAME_HEIGHT = 0.07


@dataclass(frozen=True)
class Line:
    """`color` counts the palette, None is the base model's grey; `dash` counts the ways to draw a line of one color;
    `faint` is one of several seeds; `ends_badly` puts a cross where a run diverged."""

    label: str
    points: Sequence[Point]
    color: int | None
    faint: bool = False
    markers: bool = True
    ends_badly: bool = False
    dash: int = 0


@dataclass(frozen=True)
class Panel:
    """`levels` are dashed horizontal lines and `borders` dotted vertical ones, with names; `circles` mark points."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    x_text: Callable[[Any], str] = count_text
    y_text: Callable[[Any], str] = axis_text
    y_range: tuple[float, float] | None = None
    levels: Sequence[tuple[float, str]] = ()
    borders: Sequence[tuple[float, str]] = ()
    circles: Sequence[Point] = ()

    def shown(self, line: Line) -> list[Point]:
        """The points that the axes can show, averaged where they are too many to be seen."""
        points = [(x, y) for x, y in line.points if finite(x) is not None and finite(y) is not None]
        return _thinned([(x, y) for x, y in points if (x > 0 or not self.log_x) and (y > 0 or not self.log_y)])

    @property
    def is_empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(map(self.shown, self.lines))


@dataclass(frozen=True)
class BarChart:
    """A bar for each name; those of `marked` names have another color, which the legend calls `marked_as`."""

    title: str
    x_label: str
    y_label: str
    bars: Sequence[tuple[str, float]]
    marked: Sequence[str] = ()
    marked_as: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is no bar to draw."""
        return not any(finite(height) is not None for _, height in self.bars)


def draw(panel: Panel | BarChart) -> str:
    """The panel as SVG."""
    matplotlib = check_matplotlib()
    text = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a browser has the fonts that are missing here
        drawn = bar_figure(panel) if isinstance(panel, BarChart) else figure(panel)
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _for_dark_screens(text.getvalue())


def figure(panel: Panel) -> Any:
    """The panel as a matplotlib figure, the legend below it so that it hides nothing."""
    from matplotlib.figure import Figure

    labels = [line.label for line in panel.lines if not line.faint] + [name for _, name in panel.levels]
    columns = 2 if max(map(len, labels), default=0) <= LONGEST_LABEL // 2 else 1
    legend_height = 0.24 * -(-len(labels) // columns)
    drawn = Figure(figsize=(5.8, 3.7 + legend_height), layout="constrained")
    _fill(drawn.add_subplot(), panel)
    if any(labels):
        drawn.legend(loc="outside lower center", ncols=columns, fontsize=10, handlelength=2.4)
    return drawn


def bar_figure(chart: BarChart) -> Any:
    """The chart as a matplotlib figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = Figure(figsize=(5.8, 3.7), layout="constrained")
    axes = drawn.add_subplot()
    bars = [(name, height) for name, height in chart.bars if finite(height) is not None]
    for is_marked, color, label in ((False, COLORS[0], None), (True, COLORS[1], chart.marked_as)):
        chosen = [(i, y) for i, (name, y) in enumerate(bars) if (name in chart.marked) == is_marked]
        if chosen:
            axes.bar([i for i, _ in chosen], [y for _, y in chosen], color=color, label=label)
    axes.set_title(chart.title, loc="left", pad=8)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda i, _: bars[int(i)][0] if 0 <= i < len(bars) else ""))
    if any(name in chart.marked for name, _ in bars):
        drawn.legend(loc="outside lower center", fontsize=10)
    return drawn


def draw_rows(rows: Sequence[tuple[str, Sequence[Panel]]]) -> tuple[str, bytes]:
    """Rows of panels side by side, each row with a title, each line with its name at its end: SVG and PNG."""
    matplotlib = check_matplotlib()
    from matplotlib.figure import Figure

    svg, png = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        drawn = Figure(figsize=(11, 4.2 * len(rows)), layout="constrained")
        for part, (title, panels) in zip(drawn.subfigures(len(rows), squeeze=False)[:, 0], rows, strict=True):
            part.suptitle(title, fontsize=12)
            for axes, panel in zip(part.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                _fill(axes, panel)
                _name_lines(axes, panel)
        drawn.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        drawn.savefig(png, format="png", metadata={"Software": None}, dpi=150)
    return _for_dark_screens(svg.getvalue()), png.getvalue()


def _fill(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        _draw_line(axes, line, panel.shown(line))
    for i, (y, name) in enumerate(panel.levels):
        axes.axhline(y, color=GREY, linewidth=1.4, linestyle=("--", ":", "-.")[i % 3], label=_label(name))
    for x, y in panel.circles:
        axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.4)
    _set_axes(axes, panel)
    _draw_borders(axes, panel)


def _name_lines(axes: Any, panel: Panel) -> None:
    """Names right of the axes, each at the height where its line ends, or as near to it as others leave room."""
    axes.autoscale_view()
    to_axes = axes.transScale + axes.transLimits
    ends = [(to_axes.transform(panel.shown(line)[-1])[1], line) for line in panel.lines if panel.shown(line)]
    taken = float("-inf")
    for height, line in sorted(ends, key=lambda end: end[0]):
        taken = max(height, taken + NAME_HEIGHT)
        axes.text(1.01, taken, _label(line.label), color=_color(line), transform=axes.transAxes, va="center")


def check_matplotlib() -> Any:
    """Import matplotlib.

    Raises:
        ReportError: If it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError(
            "plots are drawn with matplotlib, which is not installed: pip install 'fastweights[plot]'"
        ) from error
    return matplotlib


def _thinned(points: list[Point]) -> list[Point]:
    """At most about MOST_POINTS, each the mean of its neighbors."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _label(name: str) -> str:
    """A name as a legend can show it; matplotlib hides those that begin with an underscore."""
    name = " ".join(name.split())
    name = name if len(name) <= LONGEST_LABEL else name[: LONGEST_LABEL - 1] + "…"
    return f" {name}" if name.startswith("_") else name


def _color(line: Line) -> str:
    return GREY if line.color is None else COLORS[line.color % len(COLORS)]


def _draw_line(axes: Any, line: Line, points: list[Point]) -> None:
    index, color = line.color or 0, _color(line)
    marker = "o" if line.color is None else MARKERS[index % len(MARKERS)]
    few = len(points) <= 24
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color=color,
        linestyle=DASHES[(index // len(COLORS) + line.dash) % len(DASHES)],
        linewidth=0.9 if line.faint else 2.2,
        alpha=0.5 if line.faint else 1.0,
        marker=marker if line.markers and few and not line.faint else None,
        markersize=5,
        label=None if line.faint else _label(line.label),
    )
    if line.ends_badly and points:
        axes.plot(*points[-1], "x", color=color, markersize=9, markeredgewidth=2.2)


def _set_axes(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

    axes.set_title(panel.title, loc="left", pad=20 if panel.borders else 8)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(linewidth=0.8)
    points = [point for line in panel.lines for point in panel.shown(line)]
    xs = sorted({x for x, _ in points})
    ys = panel.y_range or [y for _, y in points] + [y for y, _ in panel.levels]
    if panel.log_x:
        axes.set_xscale("log")
        axes.set_xticks(_spread(xs))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    if panel.log_y and ys:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_log_locator(max(ys) / min(ys)))
        axes.margins(y=0.12)
    for axis, text in ((axes.xaxis, panel.x_text), (axes.yaxis, panel.y_text)):
        axis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
        axis.set_minor_formatter(NullFormatter())
        axis.set_minor_locator(NullLocator())
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)


def _log_locator(spread: float) -> Any:
    from matplotlib.ticker import LogLocator, MaxNLocator

    if spread < 8:
        return MaxNLocator(5)
    return LogLocator(subs=(1, 2, 5) if spread < 150 else (1,), numticks=9)


def _spread(xs: list[float]) -> list[float]:
    """Of the measured places, those whose labels do not run into one another on a logarithmic axis."""
    spread: list[float] = []
    for x in xs:
        if not spread or x / spread[-1] >= (xs[-1] / xs[0]) ** 0.15:
            spread.append(x)
    return spread


def _draw_borders(axes: Any, panel: Panel) -> None:
    """Stages by number above the axes: names would not fit over a short one."""
    for x, name in panel.borders:
        axes.axvline(x, color=INK, linewidth=0.9, linestyle=":")
        axes.annotate(name, (x, 1), (2, 3), xycoords=axes.get_xaxis_transform(), textcoords="offset points", fontsize=9)


def _for_dark_screens(svg: str) -> str:
    """Ink, paper and grid as variables that follow the reader's choice; the paper is part of the picture, so that it
    can be read on any page."""
    names = {INK: "--ink", PAPER: "--paper", GRID: "--grid"}
    light = "; ".join(f"{name}: {color}" for color, name in names.items())
    dark = "; ".join(f"{name}: {DARK[color]}" for color, name in names.items())
    style = f":root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n*{{"
    svg = re.sub(rf"\b(fill|stroke): ({'|'.join(names)})\b", lambda found: f"{found[1]}: var({names[found[2]]})", svg)
    return svg.replace("*{", style, 1)
