"""The commands and the Python of README and docs run as written, on tiny models in place of the named ones."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers import save_model, succeed

from fastweights.quickstart import figure
from fastweights.report.results import perplexity_text

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/generation.md"]
LINKED = [
    "settings",
    "experiments",
    "training",
    "compare",
    "hybrids",
    "paper",
    "evaluation",
    "report",
    "profile",
    "speed",
    "smollm2",
]


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = save_model(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    blocks = _blocks(page, "python")
    assert blocks
    for block in blocks:
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
            _read_from(monkeypatch, auto, tiny)
        exec(compile(block, page, "exec"), {})


def _read_from(monkeypatch: pytest.MonkeyPatch, auto: Any, tiny: Path) -> None:
    """The hub's gpt2 is the tiny one."""
    original = auto.from_pretrained
    monkeypatch.setattr(auto, "from_pretrained", lambda name, **kw: original(tiny if name == "gpt2" else name, **kw))


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = save_model(tmp_path / "tiny", family="llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    for name in ("text.txt", "held_out.txt"):
        Path(name).write_text("A quick brown fox jumps over the lazy dog. Why\n" * 300)
    commands = re.findall(r"^\$ fastweights ((?:.*\\\n)*.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 9
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        succeed(*(str(tiny) if word.endswith(".gguf") else word for word in words))
    assert (tmp_path / "france.state").is_file()
    assert (tmp_path / "report/report.html").is_file() and (tmp_path / "run/best/README.md").is_file()


def _result(name: str) -> Any:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def _written(perplexity: float) -> str:
    if perplexity > 1e6:
        return f"{perplexity / 1e6:.1f} million"
    return f"{perplexity:,.0f}" if perplexity > 100 else f"{perplexity:.1f}"


def test_figures_are_those_of_the_result_files() -> None:
    readme = (ROOT / "README.md").read_text()
    for rule, row in _result("cpu")["operations"].items():
        chunked, loop, split = (row["seconds"][way] for way in ("chunked", "loop", "split loop"))
        here, loops = (f"{row['peak bytes'][way] / 1e6:.0f} MB" for way in ("chunked", "split loop"))
        times = f"{1e3 * chunked:.0f} ms | {1e3 * loop:.0f} ms, {loop / chunked:.1f} ×"
        assert f"| {rule} | {times} | {1e3 * split:.0f} ms, {split / chunked:.1f} × | {here} | {loops} |" in readme
    short, long = _result("cpu")["decoding"]["seconds a token"].values()
    assert f"ratio {long / short:.3f}" in readme
    experiments = (ROOT / "docs/experiments.md").read_text()
    for name, run in _result("window_mix")["runs"].items():
        for after in ("after swap", "after 245760 tokens", "after 491520 tokens", "after 999424 tokens"):
            assert re.search(rf"\| \**{_written(run[after])}\** \|", experiments), (name, after)


def test_quickstart_figures_are_those_of_the_result_file() -> None:
    readme, result = (ROOT / "README.md").read_text(), _result("quickstart")
    for name, perplexity in result["perplexity"].items():
        ratio = figure(perplexity / result["perplexity"]["base"], 3)
        assert re.search(rf"^ {name} +{figure(perplexity, 2)} +{ratio} ", readme, re.MULTILINE), name
    for base, decay in zip(*(model["points"] for model in result["cost"]), strict=True):
        cells = [f"{1e3 * point['seconds']:.1f} ms" for point in (base, decay)]
        assert re.search(rf"^ *{base['length']:,} +{cells[0]} .* {cells[1]} ", readme, re.MULTILINE), cells
    assert result["ratio"] <= 1.10


def test_figures_of_training_are_those_of_the_result_files() -> None:
    readme, own, compared = (ROOT / "README.md").read_text(), _result("own_model"), _result("recipes_compared")
    for model in own["models"]:
        cells = [perplexity_text(model["perplexity"][0]["token"]), f"{model['parameters']:,}"]
        for cell in cells:
            assert cell in readme, (model["name"], cell)
    means = {}
    for name, runs in compared["runs"].items():
        means[name] = sum(run["last"]["perplexity"] for run in runs) / len(runs) / compared["base"]
        assert f"{means[name]:.3f}" in readme, name
    assert f"{compared['tokens']:,} tokens" in readme
    assert len(compared["runs"]["fine-tuning"]) == 3 and means["transfer + distill"] < means["fine-tuning"]


def test_figures_of_speed_are_those_of_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from speed_page import PAGE, filled

    assert filled(PAGE.read_text()) == PAGE.read_text(), "run benchmarks/speed_page.py"
    readme = (ROOT / "README.md").read_text()
    kernels, training, decoding = (_result(f"gpu_{name}")["parts"] for name in ("kernels", "training", "decode"))
    kernels, decoding = kernels["kernels"], decoding["decode"]
    ours = {row["shape"]: row for row in kernels["ops"] if (row["rule"], row["m"]) == ("decay", 32)}
    for peer in kernels["peers"]:
        row = ours[peer["shape"]]
        assert row["forward+backward ms"] < peer["forward+backward ms"], "with Python's launches"
        if "T 4096" not in peer["shape"]:
            for value in (row["graph forward+backward ms"], peer["forward+backward ms"]):
                assert f"{value:.2f}" in readme or f"{value:.1f}" in readme, value
    for row in training["training"]["models"].values():
        assert f"{round(row['tokens/s'], -3):,.0f}" in readme
    decode = {(row["batch"], row["context"]): row["tokens/s"] for row in decoding["decay"]}
    one, few, many = round(decode[1, 1024], -1), round(decode[32, 16384], -3), round(decode[256, 65536], -3)
    assert f"{one:,.0f} tokens/s for one text, {few:,.0f} for 32 and {many:,.0f} for 256" in readme
    (peer,) = (row["tokens/s"] for row in decoding["attention"] if "tokens/s" in row)
    assert f"{peer:,.0f} for 32 texts" in readme
    compiled = _result("kernel_code")["kernels"]["backward"]
    assert f"{compiled['instructions a token']:.0f} instructions a token" in PAGE.read_text()
    attention, decay = _result("profile_layer")["models"][:2]
    last = [model["points"][-1] for model in (attention, decay)]
    assert f"{1e6 * last[0]['seconds']:.0f} µs and {last[0]['peak_bytes'] / 1e6:.0f} MB" in readme
    assert f"{1e6 * last[1]['seconds']:.1f} µs and {last[1]['peak_bytes'] / 1e6:.2f} MB" in readme


def test_perplexity_three_ways_is_as_documented() -> None:
    page, result = (ROOT / "docs/evaluation.md").read_text(), _result("perplexity_three_ways")
    found = [way["perplexity"] for way in result["ways"].values()]
    assert len(found) == 3 and max(found) / min(found) < 1 + 1e-4
    assert all(f"{perplexity:.5f}" in page for perplexity in found)


def test_ratios_of_the_experiments_are_those_of_the_result_files() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    section = page[page.index("## Recovering quality") : page.index("## How a window joins")]
    search, cpu = _result("recovery_search"), _result("recovery_cpu")
    runs = [*search["before"].values(), *search["after"].values(), *cpu["runs"].values()]
    base = next(run["base"] for run in search["after"].values() if run["base"] and run["length"] == 512)
    known = {f"{perplexity / (run['base'] or base):.3f}" for run in runs for _, perplexity in run["validation"]}
    compared = _result("recipes_compared")
    ends = [run["last"]["perplexity"] for runs in compared["runs"].values() for run in runs]
    known |= {f"{end / compared['base']:.3f}" for end in ends} | {f"{_result('quickstart')['ratio']:.3f}"}
    written = re.findall(r"\b\d\.\d{3}\b", section)
    assert len(written) > 40
    assert not set(written) - known


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, "CONTRIBUTING.md", *(f"docs/{name}.md" for name in LINKED)]:
        for target in re.findall(r"\]\((?!https:)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
