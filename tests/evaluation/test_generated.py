"""Tasks whose answers are generated: their items, their scores, and how lm-eval runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import tokenizer
from helpers.tiny import depend_on_input, pretrained

import fastweights as fw
from fastweights.evaluation.checks import EvaluationError
from fastweights.evaluation.generated import (
    COPIED_WORDS,
    EXAMPLE,
    GENERATED_TASKS,
    NAMES,
    SHOWN_WORDS,
    exact_match,
    f1,
    first_match,
    passages,
    rouge_l,
)
from fastweights.evaluation.lm_eval import check_tasks, run_tasks
from fastweights.evaluation.suite import evaluate
from fastweights.loading import load_tokenizer
from fastweights.quickstart import PACKAGED, WINDOW

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'fastweights[eval]'")

BOOKS = [name for name, task in GENERATED_TASKS.items() if task.file is None]


def items_of(task: str) -> list[dict[str, Any]]:
    return list(GENERATED_TASKS[task].items(passages()))


def converted() -> Any:
    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(rule="decay", m=4, window=5))
    depend_on_input(model)
    return model


def with_eos() -> Any:
    made = tokenizer()
    made.eos_token = "!"
    return made


def test_every_answer_is_in_its_prompt_and_only_there() -> None:
    """Answers and summaries are written by hand, so what they name must occur in the passage."""
    counts = {task: len(items_of(task)) for task in BOOKS}
    assert counts == {"books_lookup": 192, "books_copy": 64, "books_answer": 32, "books_summary": 16}
    assert not any(name in passage["passage"] for name in NAMES for passage in passages())
    for item in items_of("books_lookup"):
        asked, (number,) = item["prompt"].rpartition("\n\n")[2], item["answers"]
        assert item["prompt"].count(f"{asked} {number}.") == 1 and item["prompt"].count(f" {number}.") == 1
    for item in items_of("books_copy"):
        passage, _, shown = item["prompt"].rpartition("\n\n")
        assert passage.startswith(f"{shown} {item['answers'][0]}")
        assert len(shown.split()) == SHOWN_WORDS and len(item["answers"][0].split()) == COPIED_WORDS
    for item in items_of("books_answer"):
        passage = item["prompt"].removeprefix(EXAMPLE).lower()
        assert any(answer in passage for answer in map(str.lower, item["answers"])), item["answers"]
    for item in items_of("books_summary"):
        names = re.findall(r"(?<!^)\b[A-Z][a-z]+", item["answers"][0])
        assert all(name in item["prompt"] for name in names), names


def test_all_prompts_fit_into_the_positions_of_the_packaged_model() -> None:
    """lm-eval would cut their beginning off, and what is asked for may be there."""
    packaged = load_tokenizer(str(PACKAGED))
    for task in BOOKS:
        longest = max(len(packaged(item["prompt"])["input_ids"]) for item in items_of(task))
        assert longest + GENERATED_TASKS[task].tokens <= WINDOW


def test_items_are_the_same_every_time() -> None:
    assert all(items_of(task) == items_of(task) for task in BOOKS)


@pytest.mark.parametrize(
    ("metric", "text", "answers", "expected"),
    [
        (exact_match, " The Piano. ", ["piano"], 1),
        (exact_match, "the “Jolly Cricketers”", ["Jolly Cricketers"], 1),
        (exact_match, "a piano and a stool", ["piano"], 0),
        (exact_match, "", ["piano"], 0),
        (exact_match, "27", ["twenty-seven", "27"], 1),
        (first_match, " 47. He", ["47"], 1),
        (first_match, " 4 7", ["47"], 0),
        (first_match, "", ["47"], 0),
        (f1, "the old piano", ["piano"], 0.5),
        (f1, "in India", ["Paris", "India"], 2 / 3),
        (f1, "", ["India"], 0),
        (rouge_l, "one two three four", ["one two three four"], 1),
        (rouge_l, "one three two four", ["one two three four"], 3 / 4),
        (rouge_l, "one two five six seven eight nine", ["one two three four"], 2 / 4),
        (rouge_l, "", ["one two"], 0),
    ],
)
def test_scores_match_their_definitions(metric: Any, text: str, answers: list[str], expected: float) -> None:
    assert metric(text, answers) == pytest.approx(expected)


@torch.no_grad()
def test_scores_are_those_of_greedy_continuations_from_a_state_of_constant_size() -> None:
    model, made, calls = converted(), with_eos(), []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    found = run_tasks(model, made, ["books_copy"], limit=2, batch_size=2)
    hook.remove()
    tokens = GENERATED_TASKS["books_copy"].tokens
    # the prompts once, and then one token at a time; the stop string may end both earlier
    assert calls[0][0] == 2 and all(shape == (2, 1) for shape in calls[1:]) and 1 < len(calls) <= tokens
    expected = []
    for item in items_of("books_copy")[:2]:
        ids = made(item["prompt"], return_tensors="pt")["input_ids"][:, -(512 - tokens) :]
        ids = torch.cat([ids.new_full((1, 1), made.bos_token_id), ids[:, 1:]], 1)
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        text = made.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("\n")[0]
        expected.append(rouge_l(text, item["answers"]))
    assert found["books_copy"]["rouge_l"] == pytest.approx(sum(expected) / 2)


def test_tasks_run_beside_those_of_lm_eval_and_with_their_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [{"text": "She poured the tea and drank the tea"}, {"text": "He threw the ball and lost the ball"}]
    (tmp_path / "lambada_openai.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = {"decay": (converted(), with_eos())}
    tasks = ["lambada", "lambada_generate", "books_answer"]
    found = evaluate(models, tasks=tasks, task_folder=tmp_path, limit=1, progress=False)
    metrics = found.models[0].tasks or {}
    assert set(metrics) == set(tasks) and set(metrics["lambada"]) >= {"acc", "perplexity"}
    assert "exact_match" in metrics["lambada_generate"] and {"exact_match", "f1"} <= set(metrics["books_answer"])


def test_a_task_without_its_data_or_an_eos_token_is_refused(tmp_path: Path) -> None:
    check_tasks(BOOKS)
    with pytest.raises(EvaluationError, match=r"tasks lambada_generate: it needs a folder .* give task_folder"):
        check_tasks(["books_copy", "lambada_generate"])
    with pytest.raises(EvaluationError, match=r"no lambada_openai.jsonl or lambada_openai.jsonl.xz in"):
        check_tasks(["lambada_generate"], tmp_path)
    with pytest.raises(EvaluationError, match="need an eos token, and the tokenizer has none"):
        run_tasks(converted(), tokenizer(), ["books_copy"], limit=1)
