"""The commands that measure and report, on tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.cli import error_of, run, save_model, succeed
from helpers.sample_results import COST, EVALUATION, svg_texts, write

from fastweights.cli.options import check_output

TEXT = "A quick brown fox jumps over the lazy dog. Why\n" * 20


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.chdir(tmp_path)
    base = save_model(tmp_path / "base")
    succeed("convert", base, "-o", "converted", "--preset", "paper", "--m", 4)
    Path("text.txt").write_text(TEXT)
    return base, tmp_path / "converted"


def test_eval_length_defaults_to_the_smallest_position_limit(models: tuple[Path, Path]) -> None:
    shown = succeed("eval", *models, "--data", "text.txt", "-o", "eval.json").stdout
    result = json.loads(Path("eval.json").read_text())
    assert result["settings"]["length"] == 96
    assert [model["name"] for model in result["models"]] == ["base", "converted"]
    for model in result["models"]:
        assert f"{model['parameters']:,}" in shown
    assert "96 tokens" in error_of("eval", *models, "--data", "text.txt", "--length", 97)


def test_eval_without_window_adds_an_entry_that_reports_show(models: tuple[Path, Path]) -> None:
    succeed("convert", models[0], "-o", "windowed", "--m", 4, "--window", 4)
    typed = ("--data", "text.txt", "--length", 32, "--without-window")
    shown = succeed("eval", models[0], "windowed", *typed, "-o", "eval.json").stdout
    assert shown.count("windowed without the window") == 2, "among the models, and in the table of perplexities"
    found = json.loads(Path("eval.json").read_text())["models"]
    assert [model["name"] for model in found] == ["base", "windowed", "windowed without the window"]
    succeed("report", "eval.json", "-o", "report")
    page = Path("report/report.md").read_text()
    assert "windowed without the window has a perplexity of" in page and "windowed caches" in page
    assert "windowed without the window caches" not in page and "the window has a state" not in page
    assert "--without-window: converted has no window" in error_of("eval", *models, *typed)


def test_data_files_of_one_name_are_shown_with_their_paths(models: tuple[Path, Path]) -> None:
    Path("other").mkdir()
    Path("other/text.txt").write_text(TEXT[:200])
    succeed("eval", models[1], "--data", "text.txt", "--data", "other/text.txt", "-o", "eval.json")
    (model,) = json.loads(Path("eval.json").read_text())["models"]
    assert [row["data"] for row in model["perplexity"]] == ["text.txt", "other/text.txt"]


@pytest.mark.parametrize("command", [["eval", "--data", "text.txt"], ["profile"]])
def test_unwritable_output_is_refused_before_measuring(models: tuple[Path, Path], command: list[str]) -> None:
    for target in ("missing/out.json", "base"):
        assert f"--output {target} cannot be written" in error_of(command[0], models[1], *command[1:], "-o", target)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which no one can make a file")
def test_folder_without_write_access_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.profiling.layer_cost.layer_cost", None)  # nothing is measured
    error = error_of("profile", "--layer", "--lengths", "4", "-o", "/proc/x.json")
    assert error.startswith("--output /proc/x.json cannot be written: no file can be written in /proc (")
    assert error.endswith("choose another folder")


def test_checking_an_output_leaves_no_file(tmp_path: Path) -> None:
    target = tmp_path / "cost.json"
    check_output(target)
    assert list(tmp_path.iterdir()) == []
    target.write_text("mine")
    written = target.stat().st_mtime_ns
    check_output(target)
    assert list(tmp_path.iterdir()) == [target]
    assert (target.read_text(), target.stat().st_mtime_ns) == ("mine", written)


def test_profile_adds_the_base_of_a_converted_model(models: tuple[Path, Path]) -> None:
    shown = succeed("profile", models[1], "--lengths", "4,8", "-o", "cost.json").stdout
    assert all(shown.count(f" {column}") == 2 for column in ("time", "memory", "peak"))
    entries = json.loads(Path("cost.json").read_text())["models"]
    assert [(entry["name"], entry["converted"]) for entry in entries] == [("base", False), ("converted", True)]
    (models[0] / "config.json").unlink()
    assert "measured without it" in succeed("profile", models[1], "--lengths", "4,8").stderr


def test_profile_names_lengths_that_do_not_fit_into_memory(models: tuple[Path, Path]) -> None:
    lines = succeed("profile", models[1], "--lengths", f"4,{10**14}").stderr
    assert "after 100,000,000,000,000 tokens: out of memory" in lines
    refused = run("profile", models[1], "--lengths", 10**14)
    assert refused.exit_code == 2 and refused.stdout == ""
    assert "error: --lengths: nothing could be measured" in refused.stderr and "out of memory" in refused.stderr


def test_profile_measures_packaged_model_and_layer_by_default(tmp_path: Path) -> None:
    output = succeed("profile", "--lengths", "4,8", "--batch", 2, "-o", tmp_path / "cost.json").stderr
    assert "on cpu: one layer, batch 2, heads 1, d = m = 64, after 4, 8 tokens" in output
    assert "on cpu: packaged, converted, batch 2, after 4, 8 tokens" in output
    result = json.loads((tmp_path / "cost.json").read_text())
    assert [m["name"] for m in result["models"]] == ["packaged", "converted"]
    assert [m["name"] for m in result["layer"]["models"]] == ["attention", "decay", "delta"]
    assert result["batch"] == result["layer"]["batch"] == 2
    shown = svg_texts(tmp_path / "cost.svg")
    assert {"packaged", "converted", "decay", "attention", "delta", "Time of one token"} <= set(shown)


@pytest.fixture
def layer_result(tmp_path: Path) -> Path:
    succeed("profile", "--layer", "--lengths", "4,8", "--batch", 2, "--heads", 3, "-o", tmp_path / "layer.json")
    return tmp_path / "layer.json"


def test_profile_measures_the_layer_alone(layer_result: Path) -> None:
    result = json.loads(layer_result.read_text())
    assert (result["level"], result["batch"], result["heads"]) == ("layer", 2, 3) and result["commit"]
    assert [m["name"] for m in result["models"]] == ["attention", "decay", "delta"]


def test_profile_redraws_a_result(layer_result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {suffix: layer_result.with_suffix(suffix).read_bytes() for suffix in (".png", ".svg")}
    monkeypatch.setattr("fastweights.profiling.layer_cost.layer_cost", None)  # nothing is measured
    shown = succeed("profile", "--from", layer_result, "-o", tmp_path / "again.svg")
    assert all(f"{name}:" in shown.stdout for name in ("attention", "decay", "delta"))
    assert all((tmp_path / f"again{suffix}").read_bytes() == content for suffix, content in drawn.items())
    layer_result.with_suffix(".svg").unlink()
    assert f"{layer_result.with_suffix('.svg')}" in succeed("profile", "--from", layer_result).stderr
    assert layer_result.with_suffix(".svg").read_bytes() == drawn[".svg"]


def test_profile_refuses_bad_combinations(layer_result: Path, tmp_path: Path, models: tuple[Path, Path]) -> None:
    def error(*arguments: object) -> str:
        return error_of("profile", *arguments)

    assert error("--from", layer_result, models[0], "--layer") == (
        "--from draws a result again: give it without MODEL, --layer"
    )
    write(tmp_path, {"eval": EVALUATION, "empty": COST | {"models": []}})
    assert "eval.json is a result of kind evaluation: give one of kind cost" in error("--from", "eval.json")
    assert "no result file at no.json" in error("--from", "no.json")
    assert error(models[0], "--layer") == "--layer is for the layer, and base is a model: give only one of them"
    assert error(models[0], "--heads", 2).startswith("--heads is for the layer")
    assert "--output a.svg is a picture: give a JSON file for the result, such as a.json" in error("-o", "a.svg")
    assert (
        "--lengths must be at least one length of 1 or more tokens, found [0]"
        in run("profile", "--layer", "--lengths", "0").stderr
    )
    assert "nothing to draw: the result has no point" in run("profile", "--from", "empty.json").stderr


def test_profile_without_matplotlib_writes_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    target = tmp_path / "layer.json"
    output = succeed("profile", "--layer", "--lengths", "4", "--batch", 2, "-o", target).stderr
    assert f"pip install 'fastweights[plot]', then fastweights profile --from {target}" in output
    assert [p.name for p in tmp_path.iterdir()] == ["layer.json"]
    assert "pip install 'fastweights[plot]'" in run("profile", "--from", target).stderr


def test_malformed_lengths_name_the_flag(models: tuple[Path, Path]) -> None:
    assert (
        error_of("profile", models[1], "--lengths", "4,x") == "--lengths takes whole numbers such as 0,480, found '4,x'"
    )


def test_report_fills_and_checks_pages(tmp_path: Path) -> None:
    write(tmp_path, {"cost": COST})
    page = tmp_path / "page.md"
    page.write_text("<!-- results: cost.json -->\n<!-- report: cost -->\n<!-- end -->\n")
    stale = run("report", "--fill", page, "--check")
    assert stale.exit_code == 1 and stale.stdout == f"{page}: not up to date\n" and "|" not in page.read_text()
    assert succeed("report", "--fill", page).stdout == f"{page}: filled\n"
    assert succeed("report", "--fill", page, "--check").stdout == succeed("report", "--fill", page).stdout == ""
    assert "--check goes with --fill" in error_of("report", tmp_path / "cost.json", "--check")
    assert "give it without --output" in error_of("report", "--fill", page, "-o", tmp_path / "report")
