"""A model card says what a saved model is and what was measured of it, and no more."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from helpers.cli import save_model
from helpers.sample_results import ALL, TRAINING, section, table, write

from fastweights.report import ReportError, model_card, write_model_card
from fastweights.utils.errors import CheckpointError


def test_model_card_has_settings_results_and_limits(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gpt2-decay", m=8, window=4)
    paths = write(tmp_path, ALL | {"train": TRAINING | {"base": {"name": "openai/gpt2", "perplexity": 14.5}}})
    card = model_card(paths, folder)
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["fastweights", "linear-attention"],
        "base_model": "openai/gpt2",
    }
    settings = {row["setting"]: row["value"] for row in table(card, "setting")}
    assert (settings["rule"], settings["m"], settings["window"]) == ("decay", "8", "4")
    assert settings["layers converted"] == "2 of 2"
    assert [row["perplexity"] for row in table(card, "perplexity")] == ["20.00", "16.00", "25.00", "20.00"]
    assert "paper-run reached a validation perplexity of 17.33" in section(card, "Training")
    assert table(section(card, "Limits"), "chance")[1]["gpt2-decay"] == "38.9 %"
    assert "EMNLP 2022" in section(card, "Citation") and "@inproceedings" in card
    assert str(tmp_path) not in card and "plots/" not in card


def test_code_of_a_model_card_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "gpt2-decay", m=8)
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", model_card([], folder), re.DOTALL)[0], {})


def test_model_card_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", m=8)
    about = yaml.safe_load(model_card(write(tmp_path, ALL), folder).split("---\n")[1])
    assert not {"base_model", "license"} & set(about)  # "gpt2" may as well be a folder's name
    card = model_card([], folder, base_name="gpt2", license="mit")
    about = yaml.safe_load(card.split("---\n")[1])
    assert (about["base_model"], about["license"]) == ("gpt2", "mit")
    assert re.findall(r"^## (.*)$", card, re.MULTILINE) == [
        "What it is",
        "How to load it",
        "Settings",
        "Limits",
        "Citation",
    ]


def test_a_model_card_is_written_beside_the_model(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", m=8)
    paths = write(tmp_path, ALL)
    target = write_model_card(paths, folder, base_name="gpt2")
    assert target == folder / "README.md"
    assert target.read_text() == model_card(paths, folder, base_name="gpt2")
    write_model_card([], folder)  # our own is replaced
    target.write_text("mine\n")
    with pytest.raises(ReportError, match=r"README\.md was not written by fastweights"):
        write_model_card(paths, folder)
    assert target.read_text() == "mine\n"
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_model_card_of_an_unconverted_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="not converted"):
        model_card([], save_model(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        model_card([], tmp_path)
