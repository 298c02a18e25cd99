"""`fastweights generate --prompts`: answers in the order of the prompts, whole files, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import error_of, run, save_model, succeed, tokenizer

import fastweights as fw
from fastweights.decode.engine import StreamedToken
from fastweights.decode.prompt_file import in_order

TEXTS = ["Hello", "a b", "What is it?", "x", "It was"]
OPTIONS = ("--max-new-tokens", 6, "--batch-size", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), m=8)


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_prompt_is_answered_as_alone_and_in_order(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.txt", [*TEXTS[:2], "", *TEXTS[2:]])
    result = succeed("generate", folder, "--prompts", file, *OPTIONS)
    found = rows(result.stdout)
    engine = fw.Engine(fw.load(folder), tokenizer=tokenizer())
    expected = [engine.generate([text], 6)[0] for text in TEXTS]
    assert [row["prompt"] for row in found] == TEXTS
    assert [row["line"] for row in found] == [1, 2, 4, 5, 6]
    assert [row["text"] for row in found] == [tokenizer().decode(ids, skip_special_tokens=True) for ids in expected]
    assert all((row["tokens"], row["finish_reason"]) == (6, "length") for row in found)
    assert "5 prompts, 30 tokens" in result.stderr


@pytest.mark.parametrize("settings", [dict(m=8), dict(m=8, layers=(0,))], ids=["converted", "hybrid"])
def test_json_lines_standard_input_and_text_give_the_same_answers(settings: dict[str, Any], tmp_path: Path) -> None:
    command = ("generate", save_model(tmp_path / "model", **settings), *OPTIONS, "--prompts")
    text = write(tmp_path / "prompts.txt", TEXTS)
    objects = write(tmp_path / "prompts.jsonl", [json.dumps({"id": i, "prompt": text}) for i, text in enumerate(TEXTS)])
    found = [succeed(*command, file).stdout for file in (text, objects)]
    found.append(succeed(*command, "-", stdin="\n".join(TEXTS)).stdout)
    assert found[0] == found[1] == found[2]


def test_output_file_has_what_would_be_printed_and_no_partial_file_remains(folder: Path, tmp_path: Path) -> None:
    file, output = write(tmp_path / "prompts.txt", TEXTS), tmp_path / "answers.jsonl"
    printed = succeed("generate", folder, "--prompts", file, *OPTIONS).stdout
    assert succeed("generate", folder, "--prompts", file, *OPTIONS, "-o", output).stdout == ""
    assert output.read_text() == printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "prompts.txt"]


def test_stopped_run_leaves_its_answers_and_the_old_output(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, output = write(tmp_path / "prompts.txt", TEXTS), tmp_path / "answers.jsonl"
    whole = rows(succeed("generate", folder, "--prompts", file, *OPTIONS).stdout)
    output.write_text("old")
    stream = fw.Engine.stream

    def stopped(*arguments: Any) -> Any:
        for i, item in enumerate(stream(*arguments)):
            if i == 20:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(fw.Engine, "stream", stopped)
    result = run("generate", folder, "--prompts", file, *OPTIONS, "-o", output)
    assert result.exit_code != 0 and f"the answers so far are in {output}.partial" in result.stderr
    assert output.read_text() == "old"
    assert rows(Path(f"{output}.partial").read_text()) == whole[:2]


def test_answers_come_as_soon_as_all_before_them_are_complete() -> None:
    read: list[int] = []

    def stream() -> Any:
        for i, (prompt, reason) in enumerate([(1, "stop"), (0, None), (0, "length"), (2, "stop")]):
            read.append(i)
            yield StreamedToken(prompt, i, str(i), reason)

    found = [(answer.text, len(read)) for answer in in_order(stream(), 3)]
    assert found == [("12", 3), ("0", 3), ("3", 4)]


def test_sampling_of_a_file_is_reproducible_by_seed(folder: Path, tmp_path: Path) -> None:
    command = ("generate", folder, "--prompts", write(tmp_path / "p.txt", ["Hello"] * 3), *OPTIONS, "--seed")
    first, again, other = (succeed(*command, seed).stdout for seed in (1, 1, 2))
    assert first == again != other
    assert len({row["text"] for row in rows(first)}) > 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', "p.jsonl, line 2 is not JSON"),
        ("p.jsonl", b'\n{"text": "a"}\n', 'p.jsonl, line 2 has no text in a field "prompt"'),
        ("p.jsonl", b'{"prompt": 3}\n', 'p.jsonl, line 1 has no text in a field "prompt"'),
        ("p.txt", b"a\n\xff\n", "p.txt, line 2 is not UTF-8"),
        ("p.txt", b"\n\n", "p.txt has no prompts"),
        (
            "p.txt",
            b"a\n" + b"x" * 97,
            "p.txt, line 2: the sequence may reach 103: gpt2 has learned positions for 96 tokens",
        ),
        ("none.txt", None, "none.txt: No such file or directory"),
    ],
)
def test_bad_prompt_is_named_by_its_line(
    folder: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in error_of("generate", folder, *OPTIONS, "--prompts", tmp_path / name, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "p.txt", TEXTS)
    for options, message in (
        ([], "give --prompt TEXT or --prompts FILE"),
        (["--prompts", file, "--prompt", "x"], "give --prompt TEXT or --prompts FILE, not both"),
        (["--prompts", file, "--num-beams", 2], "--num-beams works with --prompt only"),
        (["--prompts", file, "--load-state", "s"], "--load-state works with --prompt only"),
        (["--prompts", file, "--save-state", "s"], "--save-state works with --prompt only"),
        (["--prompt", "x", "-o", "out"], "--output works with --prompts only"),
        (["--prompt", "x", "--batch-size", 2], "--batch-size works with --prompts only"),
        (["--prompts", file, "-o", tmp_path / "no" / "out"], "cannot be written"),
    ):
        assert message in error_of("generate", folder, *options)
    base = save_model(tmp_path / "base")
    assert "--prompts needs a converted model" in error_of("generate", base, "--prompts", file)
