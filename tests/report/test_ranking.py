"""A ranking of layers can be reported, beside other results or alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cli import save_model
from helpers.sample_results import ALL, NAN, RANKING, report, section, svg_texts, table, write

from fastweights.report import model_card
from fastweights.report.plots import BarChart

RANKED = Path(__file__).parents[2] / "results"


def test_ranking_has_a_table_of_layers_and_of_the_chosen_ones(tmp_path: Path) -> None:
    words = section(report(tmp_path, {"rank": RANKING})[0], "Ranking of layers")
    assert table(words, "layer") == [
        {"layer": "3", "KL with it restored": "0.1250", "gain": "+0.1250"},
        {"layer": "0", "KL with it restored": "0.2000", "gain": "+0.0500"},
        {"layer": "7", "KL with it restored": "0.2625", "gain": "-0.0125"},
    ]
    assert "gpt2-decay against gpt2 on books.txt; no layer restored: KL 0.2500." in words
    assert table(words, "chosen") == [
        {"chosen": "3", "KL with those so far": "0.1250"},
        {"chosen": "0", "KL with those so far": "0.0875"},
    ]


def test_ranking_has_a_bar_for_each_layer_in_the_order_of_the_model(tmp_path: Path) -> None:
    report(tmp_path, {"rank": RANKING})
    drawn = svg_texts(tmp_path / "report" / "plots" / "ranking.svg")
    assert {"0", "3", "7", "chosen", "Gain of a layer as attention, gpt2-decay"} <= set(drawn)
    assert drawn.index("0") < drawn.index("3") < drawn.index("7")
    assert BarChart("", "", "", [("0", NAN)]).is_empty


def test_several_rankings_have_different_labels(tmp_path: Path) -> None:
    fitted = RANKING | {"settings": RANKING["settings"] | {"fit": True}, "kl": 0.5, "chosen": [], "kl_after": []}
    words = section(report(tmp_path, {"plain": RANKING, "fitted": fitted})[0], "Ranking of layers")
    assert "gpt2-decay (plain.json) against gpt2" in words
    assert "gpt2-decay (fitted.json) against gpt2 on books.txt, output projections fitted first; no layer" in words
    assert "(plots/ranking.svg)" in words and "(plots/ranking_2.svg)" in words


def test_ranking_without_a_finite_gain_is_reported(tmp_path: Path) -> None:
    broken = RANKING | {"kl": NAN, "layers": [row | {"kl": NAN, "gain": NAN} for row in RANKING["layers"]]}
    words = section(report(tmp_path, {"rank": broken})[0], "Ranking of layers")
    assert "nan" not in words and "plots/" not in words


@pytest.mark.parametrize("file", ["rank_packaged.json", "smollm2_25m/rank.json"])
def test_committed_rankings_can_be_reported(tmp_path: Path, file: str) -> None:
    from fastweights.report import make_report

    assert "Ranking of layers" in make_report([RANKED / file], tmp_path / "report").read_text()


def test_model_card_includes_a_ranking(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gpt2-decay", m=8)
    card = model_card(write(tmp_path, ALL), folder)
    assert table(section(card, "Ranking of layers"), "layer")[0]["gain"] == "+0.1250"
    assert "plots/" not in card
