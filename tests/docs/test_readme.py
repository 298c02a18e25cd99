"""The commands and the Python of README and docs run as written, on tiny models in place of the named ones, and links
lead somewhere. Figures: test_figures.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.cli import save_model, succeed

ROOT = Path(__file__).parents[2]
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


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, "CONTRIBUTING.md", *(f"docs/{name}.md" for name in LINKED)]:
        for target in re.findall(r"\]\((?!https:)([^)#]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
