"""The commands and the Python of README and of every page run as written, with tiny models for the named ones."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.cli import CHAT_TEMPLATE, save_model, succeed, tokenizer

ROOT = Path(__file__).parents[2]
# The examples of serving.md need a server: test_serving.py runs them.
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "serving.md"})]
CHATS = [{"role": "user", "content": "Who jumps?"}, {"role": "assistant", "content": "A quick brown fox."}]
TEXT = "A quick brown fox jumps over the lazy dog. Why\n" * 300
# What a page starts from, made by the commands of the pages before it.
NEEDS = {
    "convert.md": ["smollm2"],
    "evaluate.md": ["smollm2", "run", "eval.json"],
    "generate.md": ["run"],
    "smollm2.md": ["run"],
    "speed.md": ["smollm2"],
    "train.md": ["smollm2"],
}


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def _commands(page: Path) -> list[list[str]]:
    """The arguments of every `$ fastweights …` in the console blocks of a page, but for servers, which do not end by
    themselves."""
    lines = [re.findall(r"^\$ fastweights ((?:.*\\\n)*.*)$", block, re.MULTILINE) for block in _blocks(page, "console")]
    commands = [shlex.split(command.replace("\\\n", " "), comments=True) for block in lines for command in block]
    return [words for words in commands if words[0] != "serve"]


def _with(language_of: Any) -> list[Any]:
    return [pytest.param(page, id=page.stem) for page in PAGES if language_of(page)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("base") / "tiny", family="llama")
    made = tokenizer()
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model, its training and its evaluation."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("FASTWEIGHTS_CACHE", str(folder / "cache"))
        _write_texts()
        succeed("convert", base, "-o", "smollm2", "--m", "4", "--window", "4", "--gate-init", "log")
        sizes = ["--length", "64", "--batch-tokens", "128"]
        sizes += ["--set", "transfer.tokens=256", "--set", "distill.tokens=256"]
        succeed("train", "smollm2", "--data", "text.txt", "--validation", "held_out.txt", "-o", "run", *sizes)
        succeed("eval", base, "run/best", "--data", "held_out.txt", "--length", "64", "-o", "eval.json")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    _write_texts()
    yield tmp_path


def _write_texts() -> None:
    for name in ("text.txt", "held_out.txt"):
        Path(name).write_text(TEXT)
    Path("prompts.txt").write_text("A quick\nWhy\n")
    for name in ("chat.jsonl", "held_out.jsonl"):
        Path(name).write_text((json.dumps({"messages": CHATS}) + "\n") * 200)


def _copy_needs(page: Path, prepared: Path) -> None:
    for name in NEEDS.get(page.name, []):
        if (prepared / name).is_dir():
            shutil.copytree(prepared / name, name)
        else:
            shutil.copy(prepared / name, name)


@pytest.mark.parametrize("page", _with(_commands))
def test_commands_run(page: Path, here: Path, base: Path, prepared: Path) -> None:
    commands = _commands(page)
    outputs = [Path(word) for words in commands for flag, word in itertools.pairwise(words) if flag == "-o"]
    _copy_needs(page, prepared)
    for output in outputs:
        shutil.rmtree(output, ignore_errors=True)
    for words in commands:
        succeed(*(str(base) if word == "gpt2" or word.endswith(".gguf") else word for word in words))
    assert all(output.exists() for output in outputs)


@pytest.mark.parametrize("page", _with(lambda page: _blocks(page, "python")))
def test_python_runs(page: Path, here: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = save_model(here / "gpt2")
    _copy_needs(page, prepared)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        _load_instead_of_gpt2(monkeypatch, auto, tiny)
    for block in _blocks(page, "python"):
        exec(compile(block, page, "exec"), {})


def _load_instead_of_gpt2(monkeypatch: pytest.MonkeyPatch, auto: Any, tiny: Path) -> None:
    original = auto.from_pretrained
    monkeypatch.setattr(auto, "from_pretrained", lambda name, **kw: original(tiny if name == "gpt2" else name, **kw))


def test_links_of_pages_outside_the_site_lead_to_files() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert page.parent.joinpath(target).exists(), f"{page.name}: {target}"
