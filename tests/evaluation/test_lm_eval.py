"""lm-eval around our models: its windows are ours, its tasks run on local files, and it leaves nothing behind."""

from __future__ import annotations

import importlib
import itertools
import json
import lzma
import math
import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cli import CHARACTERS, tokenizer
from helpers.tiny import pretrained

from fastweights import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.evaluation.checks import EvaluationError
from fastweights.evaluation.lm_eval import LOCAL_TASKS, check_tasks, rolling_perplexity, run_tasks
from fastweights.evaluation.perplexity import _windows, perplexity
from fastweights.evaluation.suite import evaluate
from fastweights.utils.errors import CheckpointError

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'fastweights[eval]'")
harness = importlib.import_module("fastweights.evaluation.lm_eval")

TEXT = "".join(CHARACTERS[i] for i in torch.randint(0, 55, (200,), generator=torch.Generator().manual_seed(3)))
# A short last window that repeats an earlier one: lm-eval's own cache gets such a window wrong.
REPEATING = "Hello there, my friend. It is a fine day!\n" * 9
REAL = Path(__file__).parents[3] / "shared" / "data" / "eval"

ITEMS: dict[str, list[dict[str, Any]]] = {
    "lambada_openai": [
        {"text": "Mary lit the lamp. The room was dark before, and now there was light"},
        {"text": "He threw the ball. The dog ran and came back with the ball"},
        {"text": "She poured the tea and drank the tea"},
    ],
    "hellaswag_val": [
        {
            "activity_label": "Baking",
            "ctx_a": "A man mixes dough.",
            "ctx_b": "he",
            "endings": ["puts it in the oven.", "drives away.", "sings.", "[title] sleeps."],
            "label": label,
        }
        for label in ("0", "1", "0")
    ],
    "piqa_val": [
        {"goal": "How to dry a wet shoe?", "sol1": "Put paper in it.", "sol2": "Put water in it.", "label": label}
        for label in (0, 1, 0)
    ],
    "arc_easy_val": [
        {
            "id": str(i),
            "question": "Which of these is an animal?",
            "choices": {"text": ["a stone", "a horse", "a cup"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        }
        for i in range(3)
    ],
    "winogrande_val": [
        {"sentence": "The cup fell on the rug so the _ broke.", "option1": "cup", "option2": "rug", "answer": answer}
        for answer in ("1", "2", "1")
    ],
    "openbookqa_val": [
        {
            "id": str(i),
            "question_stem": "Ice turns into water when it is",
            "choices": {"text": ["warm", "cold", "dark", "far"], "label": ["A", "B", "C", "D"]},
            "answerKey": "A",
        }
        for i in range(3)
    ],
}
ITEMS["arc_challenge_val"] = ITEMS["arc_easy_val"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The seven data files, some plain and some compressed; whatever datasets caches stays in the test's folder."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "eval").mkdir()
    for i, (name, items) in enumerate(ITEMS.items()):
        lines = "".join(json.dumps(item) + "\n" for item in items)
        if i % 2:
            (tmp_path / "eval" / f"{name}.jsonl").write_text(lines)
        else:
            (tmp_path / "eval" / f"{name}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    return tmp_path / "eval"


def converted(family: str = "llama", **settings: Any) -> Any:
    return convert(pretrained(family), FastWeightsConfig(**dict(rule="decay", m=4) | settings))


def test_windows_match_lm_eval() -> None:
    from lm_eval.utils import get_rolling_token_windows

    for tokens, length, context in itertools.product((1, 2, 7, 8, 9, 24, 25, 31), (1, 2, 8), (0, 1, 5, 7)):
        if context >= length:
            continue
        row = list(range(tokens + 1))
        theirs = list(get_rolling_token_windows(row[1:], row[0], length, context + 1))
        ours = [
            (row[start:end], row[end - scored + 1 : end + 1])
            for start, end, scored in _windows(tokens, length, context, fill_last=True)
        ]
        assert ours == theirs, (tokens, length, context)


@pytest.mark.parametrize("text", (TEXT, REPEATING), ids=("random", "repeating"))
@pytest.mark.parametrize(
    "model",
    (pretrained("gpt2"), pretrained("gemma2"), converted("gpt2", window=3), converted(layers=(1,))),
    ids=("gpt2", "gemma2", "converted", "hybrid"),
)
@pytest.mark.parametrize("bos", (True, False), ids=("bos", "no bos"))
def test_perplexity_matches_lm_eval(model: Any, text: str, bos: bool) -> None:
    for length in (16, 64, 96):
        nll, tokens = rolling_perplexity(model, tokenizer(bos), text, length)
        ours = perplexity(model, tokenizer(bos), text, length=length, batch_size=3, progress=False)
        assert ours.tokens == tokens == len(text)
        assert ours.nll == pytest.approx(nll, rel=1e-6)
        assert ours.token == pytest.approx(math.exp(nll / tokens), rel=1e-4)


def test_rolling_perplexity_needs_a_first_token() -> None:
    bare = tokenizer()
    bare.bos_token = None
    with pytest.raises(EvaluationError, match="needs a bos or eos token"):
        rolling_perplexity(converted(), bare, TEXT, 16)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        rolling_perplexity(converted(), None, TEXT, 16)


@pytest.mark.parametrize("model", (pretrained("llama"), converted()), ids=("base", "converted"))
def test_all_local_tasks_run(model: Any, folder: Path) -> None:
    found = run_tasks(model, tokenizer(), list(LOCAL_TASKS), task_folder=folder, limit=2)
    assert set(found) == set(LOCAL_TASKS)
    assert set(found["lambada"]) == {"acc", "acc_stderr", "perplexity", "perplexity_stderr"}
    assert set(found["winogrande"]) == {"acc", "acc_stderr"}
    for task in set(LOCAL_TASKS) - {"lambada", "winogrande"}:
        assert set(found[task]) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert all(type(value) is float for metrics in found.values() for value in metrics.values())
    assert all(metrics["acc"] in (0.0, 0.5, 1.0) for metrics in found.values())
    assert json.loads(json.dumps(found)) == found


@torch.no_grad()
def likelihood(model: Any, context: str, answer: str) -> float:
    ids = torch.tensor(tokenizer()(context + answer)["input_ids"])
    scores = model(ids[None, :-1]).logits[0].double().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return float(scores[-len(answer) :].sum())


def test_metrics_match_the_definitions_of_the_tasks(folder: Path) -> None:
    model = converted()
    found = run_tasks(model, tokenizer(), ["lambada", "piqa", "winogrande"], task_folder=folder)
    words = [item["text"].rpartition(" ") for item in ITEMS["lambada_openai"]]
    scores = [likelihood(model, context, f" {word}") for context, _, word in words]
    assert found["lambada"]["perplexity"] == pytest.approx(math.exp(-sum(scores) / 3), rel=1e-4)

    item = ITEMS["piqa_val"][0]
    choices = [likelihood(model, f"Question: {item['goal']}\nAnswer:", f" {item[s]}") for s in ("sol1", "sol2")]
    assert found["piqa"]["acc"] == pytest.approx(2 / 3 if choices[0] > choices[1] else 1 / 3)
    ends = [likelihood(model, f"The cup fell on the rug so the {option}", " broke.") for option in ("cup", "rug")]
    assert found["winogrande"]["acc"] == pytest.approx(2 / 3 if ends[0] > ends[1] else 1 / 3)


def test_limit_runs_the_first_items(folder: Path) -> None:
    first = run_tasks(converted(), tokenizer(), ["piqa"], task_folder=folder, limit=1)
    both = run_tasks(converted(), tokenizer(), ["piqa", "piqa"], task_folder=folder, limit=2)
    assert first["piqa"]["acc"] in (0.0, 1.0) and both["piqa"]["acc"] == 0.5


def test_run_tasks_leaves_generators_model_and_files_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host, **_: asked.append(host) or [])
    model, tokens = converted().train(), tokenizer()
    tokens.pad_token = None
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    run_tasks(model, tokens, ["lambada"], task_folder=folder, limit=2, progress=True)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(states[0], after[0]) and states[1:] == after[1:]
    assert all(module.training for module in model.modules())
    assert tokens.pad_token is None and asked == []
    assert capfd.readouterr() == ("", "")
    assert not (folder.parent / "cache").exists()


def test_truncated_contexts_start_with_bos_and_never_end_with_eos(folder: Path) -> None:
    model, seen = converted(), []
    forward = model.forward
    model.forward = lambda *args, **kwargs: seen.append(kwargs.get("input_ids", *args)) or forward(*args, **kwargs)
    made = tokenizer()
    made.eos_token = "!"
    made.add_bos_token = made.add_eos_token = True
    run_tasks(model, made, ["lambada"], task_folder=folder, length=20)
    assert all(
        bool((ids[:, 0] == made.bos_token_id).all()) and not bool((ids == made.eos_token_id).any()) for ids in seen
    )
    seen.clear()
    run_tasks(model, tokenizer(bos=False), ["lambada"], task_folder=folder, length=20)
    assert not any(bool((ids == made.bos_token_id).any()) for ids in seen) and len(seen)


def test_length_truncates_long_sequences(folder: Path) -> None:
    assert run_tasks(converted("gpt2"), tokenizer(), ["lambada"], task_folder=folder, length=20)["lambada"]["acc"] <= 1
    with pytest.raises(EvaluationError, match="a continuation has 21 tokens: allow more than length 8"):
        run_tasks(converted("gpt2"), tokenizer(), ["hellaswag"], task_folder=folder, length=8)


def test_evaluate_runs_tasks(folder: Path) -> None:
    models = {"decay": (converted(), tokenizer())}
    found = evaluate(models, tasks=["arc_easy"], task_folder=folder, limit=2, progress=False)
    assert found.models[0].tasks["arc_easy"]["acc"] in (0.0, 1.0)
    assert found.settings["tasks"] == ["arc_easy"] and str(folder) not in json.dumps(found.to_dict())
    with pytest.raises(EvaluationError, match="tasks nonsense"):
        evaluate(models, tasks=["nonsense"], task_folder=folder, progress=False)


def test_unknown_tasks_and_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"tasks mmlu: .* known are lambada, hellaswag, piqa, arc_easy"):
        check_tasks(["lambada", "mmlu"], folder)
    (folder / "piqa_val.jsonl.xz").unlink()
    with pytest.raises(EvaluationError, match=r"no piqa_val.jsonl or piqa_val.jsonl.xz in .*: found .*hellaswag_val"):
        check_tasks(["piqa"], folder)
    with pytest.raises(EvaluationError, match="found no JSONL files"):
        check_tasks(["piqa"], tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "reason"),
    (
        ('{"sentence": "_ b.", "option1": "x", "answer": "1"}', "without option2"),
        ('{"sentence": ', "not JSON: Expecting value"),
        ("5", "without sentence, option1, option2, answer"),
    ),
)
def test_bad_item_is_named_with_its_line(folder: Path, line: str, reason: str) -> None:
    (folder / "winogrande_val.jsonl.xz").unlink()
    (folder / "winogrande_val.jsonl").write_text(json.dumps(ITEMS["winogrande_val"][0]) + "\n" + line + "\n")
    with pytest.raises(EvaluationError, match=f"winogrande_val.jsonl, line 2: not an item of winogrande, {reason}"):
        run_tasks(converted(), tokenizer(), ["winogrande"], task_folder=folder)
    assert run_tasks(converted(), tokenizer(), ["winogrande"], task_folder=folder, limit=1)


def test_bad_data_file_is_named(folder: Path) -> None:
    with pytest.raises(EvaluationError, match="no items to run"):
        run_tasks(converted(), tokenizer(), ["winogrande"], task_folder=folder, limit=0)
    (folder / "piqa_val.jsonl.xz").write_bytes(lzma.compress(b"{}")[:-9])
    with pytest.raises(EvaluationError, match=r"piqa_val.jsonl.xz cannot be read: Compressed file ended"):
        run_tasks(converted(), tokenizer(), ["piqa"], task_folder=folder)


def test_stock_task_errors_name_near_tasks_and_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lm-eval's own index, which takes ten seconds to build, and without a network."""
    import lm_eval

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'baber/piqa' on the Hub\nand much more")

    monkeypatch.setattr(harness, "_stock_tasks", lambda: SimpleNamespace(task_index=("piqa", "hellaswag")))
    monkeypatch.setattr(lm_eval, "simple_evaluate", offline)
    with pytest.raises(EvaluationError, match="tasks hellaswg: lm-eval has no such task; near it are hellaswag"):
        check_tasks(["hellaswg"])
    with pytest.raises(EvaluationError, match=r"reach 'baber/piqa' on the Hub; .*task_folder") as error:
        run_tasks(converted(), tokenizer(), ["piqa"])
    assert "\n" not in str(error.value)


def test_missing_lm_eval_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"pip install 'fastweights\[eval\]'"):
        run_tasks(converted(), tokenizer(), ["lambada"])
    with pytest.raises(EvaluationError, match=r"pip install 'fastweights\[eval\]'"):
        rolling_perplexity(converted(), tokenizer(), TEXT, 16)


@pytest.mark.skipif(not REAL.is_dir(), reason="the evaluation data sets are not beside the repository")
def test_tasks_run_on_the_real_files() -> None:
    found = run_tasks(converted(), tokenizer(), list(LOCAL_TASKS), task_folder=REAL, limit=3)
    assert all(0 <= found[task]["acc"] <= 1 for task in LOCAL_TASKS)
