"""`fastweights chat` with lines that are piped in, and as on a terminal."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chat import CHATML, chat_tokenizer
from helpers.cli import error_of, run, save_model, succeed
from safetensors.torch import load_file

import fastweights as fw
from fastweights.cli import chat as chat_command
from fastweights.decode.conversation import Conversation
from fastweights.decode.text_decoder import TextDecoder

FEW = ("--max-new-tokens", 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


def saved(folder: Path, template: str | None = CHATML, family: str = "llama", **settings: Any) -> Path:
    save_model(folder, family, with_tokenizer=False, **settings or dict(m=8))
    chat_tokenizer(template).save_pretrained(folder)
    return folder


def expected_answers(folder: Path, *messages: str, system: str | None = None, weights: str | None = None) -> str:
    """What the library answers, in lines."""
    engine = fw.Engine(fw.load(folder), tokenizer=chat_tokenizer(), weights=weights)
    talk = Conversation(engine, system)
    return "".join("".join(talk.send(message, 6)) + "\n" for message in messages)


def test_each_line_is_answered_and_stdout_has_only_the_answers(folder: Path) -> None:
    result = succeed("chat", folder, *FEW, stdin="Hi\n\nBye\n")
    assert result.stdout == expected_answers(folder, "Hi", "Bye")
    sizes = re.findall(r"^\d+ tokens, [\d.]+ tokens/s, state ([\d,]+) bytes$", result.stderr, re.MULTILINE)
    assert len(sizes) == 2 and sizes[0] == sizes[1]


def test_weights_are_the_engines(folder: Path) -> None:
    result = succeed("chat", folder, *FEW, "--weights", "int8", stdin="Hi\n")
    assert result.stdout == expected_answers(folder, "Hi", weights="int8")


def test_empty_answer_is_an_empty_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "send", lambda *_: (piece for piece in ()))
    assert succeed("chat", folder, stdin="Hi\nBye\n").stdout == "\n\n"


def test_system_prompt_is_part_of_the_conversation(folder: Path, tmp_path: Path) -> None:
    for name, options in (("with", ["--system", "You are 1."]), ("without", [])):
        succeed("chat", folder, *FEW, *options, stdin=f"Hi\n/save {tmp_path}/{name}\n")
    model = fw.load(folder)
    seen = [int(fw.FastWeightsCache.load(tmp_path / name, model).seen) for name in ("with", "without")]
    assert seen[0] != seen[1]


def test_saved_conversation_is_continued_by_load_and_by_the_flag(folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    first, *rest = expected_answers(folder, "Hi", "Bye").splitlines(keepends=True)
    assert succeed("chat", folder, *FEW, stdin=f"Hi\n/save {state}\n").stdout == first
    assert succeed("chat", folder, *FEW, stdin=f"/load {state}\nBye\n").stdout == "".join(rest)
    assert succeed("chat", folder, *FEW, "--load-state", state, stdin="Bye\n").stdout == "".join(rest)


def test_state_of_generate_is_continued(folder: Path, tmp_path: Path) -> None:
    succeed("generate", folder, "--prompt", "Hi", "--max-new-tokens", 3, "--save-state", tmp_path / "state")
    assert "tokens/s" in succeed("chat", folder, *FEW, "--load-state", tmp_path / "state", stdin="Bye\n").stderr


def test_forks_are_listed_and_leave_their_origin_as_it_was(folder: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("before", "after")]
    lines = ["Hi", f"/save {files[0]}", "/fork", "Bye", "/fork other", "/switch main", f"/save {files[1]}", "/list"]
    result = succeed("chat", folder, *FEW, stdin="\n".join([*lines, "/quit", "Hi"]))
    before, after = map(load_file, files)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert re.search(r"\* main: \d+ tokens\n +fork-1: \d+ tokens\n +other: \d+ tokens", result.stderr)
    assert result.stdout == expected_answers(folder, "Hi", "Bye")


def test_reset_begins_anew(folder: Path) -> None:
    answers = succeed("chat", folder, *FEW, stdin="Hi\n/reset\nHi\n").stdout
    assert answers == expected_answers(folder, "Hi") * 2


def test_help_shows_every_command(folder: Path) -> None:
    shown = succeed("chat", folder, stdin="/help\n").stderr
    assert all(f"/{command}" in shown for command in chat_command.COMMANDS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/dance", "no command /dance"),
        ("/save", "type /save FILE"),
        ("/reset now", "type /reset"),
        ("/switch b", "no conversation b: there are main"),
        ("/fork main", "there is a conversation main already"),
        ("/load none", "no state file at none"),
        ("/save no/such/folder/s", "cannot write the state to no/such/folder/s"),
    ],
)
def test_wrong_command_ends_a_script_with_one_line(folder: Path, line: str, message: str) -> None:
    result = run("chat", folder, *FEW, stdin=f"{line}\nHi\n")
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


def test_model_without_a_template_talks_in_plain_text(tmp_path: Path) -> None:
    assert succeed("chat", saved(tmp_path / "plain", None), *FEW, stdin="Hi\n").stdout.strip()


def test_hybrid_says_how_long_a_conversation_can_be(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hybrid", m=8, layers=(0,))
    stderr = succeed("chat", folder, *FEW, stdin="Hi\n").stderr
    assert "layers 1 are still attention" in stderr and "of 4,096 tokens" in stderr
    result = run("chat", folder, *FEW, "--max-length", 20, stdin="Hi\n")
    assert result.exit_code == 2 and "--max-length is 20" in result.stderr


def test_unconverted_model_and_conflicting_flags_are_refused(folder: Path, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    assert (
        error_of("chat", base)
        == f"chat needs a converted model, and {base} is an ordinary one: run fastweights convert"
    )
    assert "--system" in error_of("chat", folder, "--system", "x", "--load-state", tmp_path / "state")
    assert "--load-state: no state file" in error_of("chat", folder, "--load-state", tmp_path / "state")
    assert "--temperature must be above 0" in error_of("chat", folder, "--temperature", 0)


# on a terminal


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lines that are typed, and exceptions that come instead; Ctrl-D follows the last."""
    lines: list[Any] = []

    def read(prompt: str) -> str:
        if not lines:
            raise EOFError
        line = lines.pop(0)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr(chat_command, "_is_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", read)
    return lines


def test_errors_do_not_end_a_conversation_on_a_terminal(folder: Path, typed: list[Any]) -> None:
    typed += ["/dance", "Hi", KeyboardInterrupt, "Bye"]
    result = succeed("chat", folder, *FEW)
    assert "error: no command /dance" in result.stderr
    assert result.stdout == expected_answers(folder, "Hi", "Bye")


def test_ctrl_c_stops_the_answer_and_not_the_program(
    folder: Path, typed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = expected_answers(folder, "Hi").strip()[:3]
    typed += ["Hi", "/list"]
    add, added = TextDecoder.add, []

    def interrupted(self: TextDecoder, token: int) -> str:
        added.append(token)
        if len(added) == 4:
            signal.raise_signal(signal.SIGINT)
        return add(self, token)

    monkeypatch.setattr(TextDecoder, "add", interrupted)
    result = succeed("chat", folder, "--max-new-tokens", 50)
    assert result.stdout == f"{answer}\n"
    assert "stopped" in result.stderr and "* main:" in result.stderr
    assert len(added) == 4
