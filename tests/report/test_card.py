"""A model card says what a saved model is and what was measured of it, and no more."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.cli import save_model, succeed
from helpers.sample_results import ALL, EVALUATION, TRAINING, evaluated, section, table, write
from helpers.training import command, training_files

from fastweights.modeling.description import describe_source
from fastweights.report import ReportError, model_card, write_model_card
from fastweights.report.text import bytes_text
from fastweights.utils.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def code_of(card: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    return code


def title_of(card: str) -> str:
    return re.findall(r"^# (.*)$", card.split("```")[0], re.MULTILINE)[0]


def name_base(folder: Path, base: str) -> Path:
    """As `fastweights convert` does it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"fastweights_base": base}))
    return folder


def test_model_card_has_settings_results_and_limits(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gpt2-decay", m=8, window=4)
    paths = write(tmp_path, ALL | {"train": TRAINING | {"base": {"name": "openai/gpt2", "perplexity": 14.5}}})
    card = model_card(paths, folder)
    assert front_matter(card) == {
        "library_name": "fastweights",
        "pipeline_tag": "text-generation",
        "tags": ["fastweights", "linear-attention", "decay"],
        "base_model": "openai/gpt2",
    }
    assert title_of(card) == "gpt2, decay fast weights"
    settings = {row["setting"]: row["value"] for row in table(card, "setting")}
    assert (settings["rule"], settings["m"], settings["window"]) == ("decay", "8", "4")
    assert settings["layers converted"] == "2 of 2"
    assert [row["perplexity"] for row in table(card, "perplexity")] == ["20.00", "16.00", "25.00", "20.00"]
    balance = section(card, "What was lost and won")
    assert "gpt2-decay has a perplexity of 20.00 on wiki, 1.25 × that of gpt2 (16.00)." in balance
    assert "paper-run reached a validation perplexity of 17.33" in balance
    assert "500.0 kB, 32.0 × smaller than with gpt2 (16.0 MB)" in balance
    described = describe_source(folder)
    expected = [(bytes_text(use.here), bytes_text(use.attention)) for use in described.memory]
    assert [tuple(row.values())[1:] for row in table(balance, "KV cache of the base model")] == expected
    assert table(section(card, "Limits"), "chance")[1]["gpt2-decay"] == "38.9 %"
    assert "EMNLP 2022" in section(card, "Citation") and "@inproceedings" in card
    assert str(tmp_path) not in card and "plots/" not in card


def test_card_compares_only_its_own_model_with_the_base(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "gpt2-decay", m=8)
    models = [evaluated("gpt2", False, 1), evaluated("gpt2-decay", True, 1.25), evaluated("untrained", True, 9)]
    balance = section(
        model_card(write(tmp_path, {"eval": EVALUATION | {"models": models}}), folder), "What was lost and won"
    )
    assert "gpt2-decay has a perplexity" in balance and "untrained" not in balance


def test_code_of_the_card_of_a_trained_model_runs_where_its_folder_is(tmp_path: Path) -> None:
    """A reader who was sent the folder starts a new Python beside it."""
    with training_files(tmp_path) as files:
        succeed(*command(files, tmp_path / "run"))
    succeed("report", tmp_path / "run" / "result.json", "-o", tmp_path / "report", "--card", tmp_path / "run" / "best")
    card = (tmp_path / "run" / "best" / "README.md").read_text()
    assert title_of(card) == "base, decay fast weights"
    assert "the base model's" in section(card, "What was lost and won")
    received = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "run" / "best", received / "best")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, "-c", code_of(card)]
    ran = subprocess.run(program, cwd=received, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Fast weights are")


@pytest.mark.parametrize(
    "base, settings, title",
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {}, "SmolLM2-135M-Instruct, decay fast weights"),
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", {}, "SmolLM2-135M-Instruct, decay fast weights"),
        ("/models/gemma-3-270m-q4_k_m.gguf", {"rule": "delta"}, "gemma-3-270m, delta fast weights"),
        ("/models/Qwen3-0.6B-BF16.gguf", {"layers": (1,)}, "Qwen3-0.6B, decay fast weights in 1 of 2 layers"),
        ("/runs/tuned/checkpoints/0-12", {"rule": "local"}, "tuned, local attention"),
        ("", {}, "model, decay fast weights"),
    ],
)
def test_title_names_the_base_and_the_rule(tmp_path: Path, base: str, settings: dict[str, Any], title: str) -> None:
    folder = name_base(save_model(tmp_path / "model", **{"m": 8} | settings), base)
    assert title_of(model_card([], folder)) == title


def test_card_of_a_run_with_an_unknown_base_is_named_after_the_run(tmp_path: Path) -> None:
    (tmp_path / "smol").mkdir()
    (tmp_path / "smol" / "best").symlink_to(save_model(tmp_path / "0-12", m=8))
    assert title_of(model_card([], tmp_path / "smol" / "best")) == "smol, decay fast weights"


def test_card_of_a_model_without_a_tokenizer_uses_that_of_the_base(tmp_path: Path) -> None:
    folder = name_base(save_model(tmp_path / "model", with_tokenizer=False, m=8), "owner/base")
    assert 'AutoTokenizer.from_pretrained("owner/base")' in code_of(model_card([], folder))


def test_model_card_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", m=8)
    about = front_matter(model_card(write(tmp_path, ALL), folder))
    assert not {"base_model", "license"} & set(about)  # "gpt2" may as well be a folder's name
    card = model_card([], folder, base_name="gpt2", license="mit")
    about = front_matter(card)
    assert (about["base_model"], about["license"]) == ("gpt2", "mit")
    assert re.findall(r"^## (.*)$", card, re.MULTILINE) == [
        "What it is",
        "What was lost and won",
        "How to use it",
        "Settings",
        "Limits",
        "Citation",
    ]
    assert "was not measured" in section(card, "What was lost and won")


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
