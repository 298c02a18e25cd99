"""Result files of training, evaluation, profiling and ranking -> one page of words, tables and plots, and a model card.

Either can be made from any of them; what was not measured is left out. A run that diverged is marked with *.
Files, each importing only from those before it: text (numbers as text), results (reading, labels), page (structure;
Markdown, HTML), plots (pictures), parts (what tables and plots share), quality, cost, training, comparison, ranking
(contents), build (the page), figure, card, values, fill (parts of a report in other pages).
"""

from fastweights.report.build import compare_curves, make_report, tables_of
from fastweights.report.card import model_card, write_model_card
from fastweights.report.figure import cost_figure
from fastweights.report.fill import fill_page, is_filled
from fastweights.report.plots import check_matplotlib
from fastweights.report.results import ReportError

__all__ = [
    "ReportError",
    "check_matplotlib",
    "compare_curves",
    "cost_figure",
    "fill_page",
    "is_filled",
    "make_report",
    "model_card",
    "tables_of",
    "write_model_card",
]
