"""Rankings of layers: what each gains as attention, and which were chosen."""

from __future__ import annotations

from collections.abc import Sequence

from fastweights.report.page import Plot, Table
from fastweights.report.parts import plot, table
from fastweights.report.plots import BarChart
from fastweights.report.results import RankingEntry
from fastweights.report.text import MISSING, finite


def ranking_tables(entries: Sequence[RankingEntry]) -> list[Table]:
    """Of each ranking all layers, the best first, and the chosen ones."""
    return [made for i, entry in enumerate(entries) for made in _tables(entry, _suffix(i))]


def _tables(entry: RankingEntry, suffix: str) -> list[Table]:
    ranking = entry.ranking
    fitted = ", output projections fitted first" if ranking.settings.get("fit") else ""
    note = f" {entry.label} against {ranking.model.base} on {ranking.data.name}{fitted}; no layer restored: KL "
    layers = [[str(row.layer), _kl_text(row.kl), _kl_text(row.gain, "+")] for row in ranking.layers]
    chosen = [[str(i), _kl_text(kl)] for i, kl in zip(ranking.chosen, ranking.kl_after, strict=False)]
    header = ["layer", "KL with it restored", "gain"]
    return [
        *table(f"ranking{suffix}", header, layers, [entry], names=0, note=f"{note}{_kl_text(ranking.kl)}."),
        *table(f"ranking chosen{suffix}", ["chosen", "KL with those so far"], chosen, [entry], names=0),
    ]


def ranking_plots(entries: Sequence[RankingEntry]) -> list[Plot]:
    """Of each ranking the gain of every layer, by its index."""
    plots: list[Plot] = []
    for i, entry in enumerate(entries):
        rows = sorted(entry.ranking.layers, key=lambda row: row.layer)
        bars = [(str(row.layer), row.gain) for row in rows]
        marked = [str(layer) for layer in entry.ranking.chosen]
        chart = BarChart(f"Gain of a layer as attention, {entry.label}", "layer", "KL less by", bars, marked, "chosen")
        plots += plot(f"ranking{_suffix(i).replace(' ', '_')}", chart, [entry])
    return plots


def _suffix(index: int) -> str:
    return f" {index + 1}" if index else ""


def _kl_text(value: float, sign: str = "") -> str:
    return MISSING if finite(value) is None else f"{value:{sign}.4f}"
