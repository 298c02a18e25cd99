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

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/generation.md"]


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
    commands = re.findall(r"^\$ fastweights (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        succeed(*(str(tiny) if word.endswith(".gguf") else word for word in shlex.split(command)))
    assert (tmp_path / "france.state").is_file()


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
    for length, measured in _result("quickstart")["measured"].items():
        cells = [f"{1e3 * measured[name]['seconds']:.1f} ms" for name in ("attention", "decay")]
        assert re.search(rf"^ *{int(length):,} +{cells[0]} .* {cells[1]} ", readme, re.MULTILINE)
    described = _result("smollm2_convert")["description"]
    for number in (described["parameters"], described["parameters"] - described["base_parameters"]):
        assert f"{number:,}" in readme
    swapped = _result("after_swap")["perplexity"]
    assert f"from {swapped['base']:.1f} to {swapped['decay m 32, uniform gates'] / 1e6:.1f} million" in readme
    assert f"to {swapped['decay m 32, uniform gates, window 32']:.0f} with `--window 32`" in readme
    experiments = (ROOT / "docs/experiments.md").read_text()
    for name, run in _result("window_mix")["runs"].items():
        for after in ("after swap", "after 245760 tokens", "after 491520 tokens", "after 999424 tokens"):
            assert re.search(rf"\| \**{_written(run[after])}\** \|", experiments), (name, after)


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, "docs/settings.md", "docs/experiments.md", "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
