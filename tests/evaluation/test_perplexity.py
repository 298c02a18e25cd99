"""Perplexity, loss by position and the recall probe, each against a plain reading of its definition."""

from __future__ import annotations

import importlib
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cli import CHARACTERS, tokenizer
from helpers.tiny import VOCAB, pretrained
from torch import nn

from fastweights import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.evaluation.perplexity import (
    EvaluationError,
    Perplexity,
    evaluate,
    perplexity,
    perplexity_by_position,
    recall_probe,
)
from fastweights.utils.errors import CheckpointError

TEXT = "".join(CHARACTERS[i] for i in torch.randint(0, 55, (150,), generator=torch.Generator().manual_seed(3)))
QUIET = dict(progress=False)
evaluation = importlib.import_module("fastweights.evaluation.perplexity")


def converted(family: str = "llama", **settings: Any) -> Any:
    return convert(pretrained(family), FastWeightsConfig(**dict(rule="decay", m=4) | settings))


def row_of(text: str) -> torch.Tensor:
    return torch.tensor([1, *tokenizer()(text, add_special_tokens=False)["input_ids"]])


@torch.no_grad()
def loss_of(model: Any, seen: torch.Tensor, target: torch.Tensor) -> float:
    return float(-model(seen[None], use_cache=False).logits[0, -1].double().log_softmax(-1)[target])


def definition(model: Any, text: str, length: int, context: int) -> float:
    """Token by token: the number of its window tells what has been seen before it."""
    row = row_of(text)
    count, step, nll = len(row) - 1, length - context, 0.0
    for token in range(1, count + 1):
        window = 0 if token <= length else 1 + (token - length - 1) // step
        end = min(count, length + window * step)
        nll += loss_of(model, row[max(0, end - length) : token], row[token])
    return nll


@pytest.mark.parametrize("context", (0, 5, 15))
@pytest.mark.parametrize("model", (pretrained("gpt2"), converted(window=3)), ids=("gpt2", "converted"))
def test_each_token_is_scored_once_in_its_window(model: Any, context: int) -> None:
    found = perplexity(model, tokenizer(), TEXT[:90], length=16, context=context, batch_size=3, **QUIET)
    assert found.nll == pytest.approx(definition(model, TEXT[:90], 16, context), rel=1e-5)
    assert (found.tokens, found.length, found.context) == (90, 16, context)


def test_text_shorter_than_a_window() -> None:
    model = converted()
    whole = perplexity(model, tokenizer(), TEXT[:40], length=400, **QUIET)
    row = row_of(TEXT[:40])[None]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="sum")
    assert whole.nll == pytest.approx(float(loss), rel=1e-5)
    assert perplexity(model, tokenizer(), TEXT[:40], length=400, context=399, **QUIET).nll == whole.nll


def test_units() -> None:
    found = perplexity(converted(), tokenizer(), "ab cd\n ef?", **QUIET)
    assert (found.tokens, found.words, found.bytes) == (10, 3, 10)
    assert found.token == pytest.approx(math.exp(found.nll / 10))
    assert found.word == pytest.approx(math.exp(found.nll / 3))
    assert found.bits_per_byte == pytest.approx(found.nll / math.log(2) / 10)
    assert perplexity(converted(), tokenizer(), "é" * 4, **QUIET).bytes == 8
    assert Perplexity(1e6, 10, 2, 10, 16, 0).word == math.inf


def test_without_bos_and_eos_the_first_token_is_not_scored() -> None:
    bare = tokenizer()
    bare.bos_token = None
    model, row = converted(), row_of(TEXT[:30])[1:]
    found = perplexity(model, bare, TEXT[:30], length=64, **QUIET)
    assert found.tokens == 29
    assert found.nll == pytest.approx(sum(loss_of(model, row[:i], row[i]) for i in range(1, 30)), rel=1e-5)
    bare.eos_token = "<pad>"
    assert perplexity(model, bare, TEXT[:30], length=64, **QUIET).tokens == 30


def test_bfloat16_logits_are_scored_in_float32() -> None:
    model, row = converted().bfloat16(), row_of(TEXT[:30])
    with torch.no_grad():
        logits = model(row[None, :-1], use_cache=False).logits[0]
    loss = nn.functional.cross_entropy(logits.float(), row[1:], reduction="sum")
    assert logits.dtype == torch.bfloat16
    assert perplexity(model, tokenizer(), TEXT[:30], **QUIET).nll == pytest.approx(float(loss), rel=1e-6)


def test_modes_are_restored_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    model = converted().train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    perplexity(model, tokenizer(), TEXT, length=32)
    with pytest.raises(EvaluationError):
        perplexity(model.double().apply(_spoil), tokenizer(), TEXT, length=32)
    assert [module.training for module in model.modules()] == before
    assert capfd.readouterr() == ("", "")


def _spoil(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        module.weight.data.fill_(math.nan)


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    (
        ("", {}, "the text is empty"),
        (" \n", {}, "the text is empty"),
        ("a", {}, "has 1 token"),
        (TEXT, dict(context=16), "--context 16 with --length 16"),
        (TEXT, dict(context=-1), "--context -1"),
        (TEXT, dict(length=0), "--length 0"),
        (TEXT, dict(batch_size=0), "--batch-size 0"),
    ),
)
def test_what_cannot_be_scored(text: str, settings: dict[str, int], said: str) -> None:
    with pytest.raises(EvaluationError, match=said):
        perplexity(converted(), tokenizer(), text, **dict(length=16) | settings, **QUIET)


def test_tokenizers_that_do_not_fit() -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        perplexity(converted(), None, TEXT, **QUIET)
    model = converted()
    model.resize_token_embeddings(40)
    with pytest.raises(EvaluationError, match="another model's tokenizer"):
        perplexity(model, tokenizer(), TEXT, **QUIET)


def test_a_loss_that_is_not_finite_names_its_window() -> None:
    model = converted()
    model.get_input_embeddings().weight.data[row_of("Z")[1]] = math.nan
    with pytest.raises(EvaluationError, match="nan in the window of tokens 32 to 48"):
        perplexity(model, tokenizer(), "a" * 40 + "Z" + "a" * 40, length=16, **QUIET)


def test_learned_positions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (pretrained("gpt2"), converted("gpt2"), pretrained("opt")):
        with pytest.raises(EvaluationError, match="learned positions for 96 tokens"):
            perplexity(model, tokenizer(), TEXT, length=97, **QUIET)
        with pytest.raises(EvaluationError, match="learned positions for 96 tokens"):
            perplexity_by_position(model, tokenizer(), TEXT, length=97, **QUIET)
    monkeypatch.setattr(evaluation, "PIECE", 50)
    clamped = converted("gpt2", positions="clamp")
    assert perplexity(clamped, tokenizer(), TEXT, length=140, **QUIET).tokens == 150
    assert perplexity_by_position(clamped, tokenizer(), TEXT, length=140, **QUIET)[-1]["to"] == 140


def test_by_position_adds_up_to_the_perplexity() -> None:
    model = converted(window=3)
    found = perplexity_by_position(model, tokenizer(), TEXT, length=75, batch_size=1, **QUIET)
    assert [(row["from"], row["to"], row["tokens"]) for row in found] == [(0, 64, 128), (64, 75, 22)]
    total = sum(row["loss"] * row["tokens"] for row in found)
    assert total == pytest.approx(perplexity(model, tokenizer(), TEXT, length=75, **QUIET).nll, rel=1e-6)
    assert found[0]["perplexity"] == pytest.approx(math.exp(found[0]["loss"]))


def test_position_buckets() -> None:
    model, row = converted(), row_of(TEXT)
    found = perplexity_by_position(model, tokenizer(), TEXT, length=50, buckets=(0, 1, 40, 99), **QUIET)
    assert [(row["from"], row["to"]) for row in found] == [(0, 1), (1, 40), (40, 50)]
    first = sum(loss_of(model, row[i : i + 1], row[i + 1]) for i in (0, 50, 100)) / 3
    assert found[0]["loss"] == pytest.approx(first, rel=1e-5)
    long = perplexity_by_position(converted(), tokenizer(), TEXT * 4, length=500, **QUIET)
    assert [row["from"] for row in long] == [0, 64, 128, 256]
    with pytest.raises(EvaluationError, match="has only 150"):
        perplexity_by_position(model, tokenizer(), TEXT, length=151, **QUIET)


@pytest.mark.parametrize(
    "model",
    (pretrained("llama"), pretrained("mistral"), pretrained("gpt_neox"), converted(window=3), converted(layers=(1,))),
    ids=("llama", "mistral", "gpt_neox", "converted", "hybrid"),
)
def test_long_windows_are_read_in_pieces(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> tuple[list[dict[str, Any]], float]:
        by_position = perplexity_by_position(model, tokenizer(), TEXT, length=70, **QUIET)
        return by_position, perplexity(model, tokenizer(), TEXT, length=70, context=60, **QUIET).nll

    at_once = both()
    monkeypatch.setattr(evaluation, "PIECE", 16)
    in_pieces = both()
    for one, other in zip(at_once[0], in_pieces[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert at_once[1] == pytest.approx(in_pieces[1], rel=1e-5)


class Fake(nn.Module):
    """A causal model without weights, which answers with `logits_of(tokens)` and remembers what it was asked."""

    def __init__(self, logits_of: Any) -> None:
        super().__init__()
        self.logits_of = logits_of
        self.config = SimpleNamespace(vocab_size=400, bos_token_id=2, eos_token_id=[3, 4])
        self.asked: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        self.asked.append(input_ids)
        return SimpleNamespace(logits=self.logits_of(input_ids))


def looks_up(tokens: torch.Tensor) -> torch.Tensor:
    """The token that followed the last token when it was there before."""
    logits = torch.zeros(*tokens.shape, 400)
    for row, answers in zip(tokens.tolist(), logits, strict=True):
        followers: dict[int, int] = {}
        for i, token in enumerate(row):
            if token in followers:
                answers[i, followers[token]] = 1.0
            if i + 1 < len(row):
                followers[token] = row[i + 1]
    return logits


def test_recall_of_a_model_that_looks_up_and_of_one_that_guesses() -> None:
    distances = (16, 33, 70)
    found = recall_probe(Fake(looks_up), distances=distances, samples=16, **QUIET)
    for kind, chance in (("pairs", 1 / 8), ("copy", 1 / 200)):
        assert [row["distance"] for row in found[kind]] == list(distances)
        assert all(row["accuracy"] == 1.0 and row["chance"] == pytest.approx(chance) for row in found[kind])
    assert all(row["accuracy_vocabulary"] == 1.0 for row in found["pairs"])

    generator = torch.Generator().manual_seed(0)
    guesses = Fake(lambda tokens: torch.rand(*tokens.shape, 400, generator=generator))
    found = recall_probe(guesses, distances=(16,), samples=512, batch_size=64, **QUIET)
    assert found["pairs"][0]["accuracy"] == pytest.approx(1 / 8, abs=0.05)
    assert found["pairs"][0]["accuracy_vocabulary"] < 0.02
    assert found["copy"][0]["accuracy"] < 0.02


def test_recall_texts() -> None:
    model = Fake(looks_up)
    recall_probe(model, distances=(40,), pairs=4, samples=6, batch_size=6, **QUIET)
    pairs, copies = model.asked
    assert bool((pairs[:, 0] == 2).all()) and bool(((pairs[:, 1:] >= 100) & (pairs[:, 1:] < 300)).all())
    for row in pairs[:, 1:]:
        same = (row == row[-1]).nonzero()[:, 0].tolist()
        assert same == [len(row) - 1 - 40, len(row) - 1]
    assert torch.equal(copies[:, 1:16], copies[:, 41:56])
    assert not torch.equal(pairs[0], pairs[4])


def test_recall_is_decided_by_the_seed() -> None:
    model = converted()
    first, again, other = (
        recall_probe(model, distances=(16, 32), samples=32, seed=seed, **QUIET) for seed in (0, 0, 1)
    )
    assert first == again and first != other
    alone = recall_probe(model, distances=(32,), samples=32, **QUIET)
    assert alone["pairs"][0] == first["pairs"][1]


@pytest.mark.parametrize(
    ("settings", "said"),
    (
        (dict(distances=(8,)), "distances of at least 16 tokens.*found distances .8."),
        (dict(distances=()), "found distances"),
        (dict(vocabulary=range(10)), "found .* and 10 tokens"),
        (dict(pairs=20), "and 30 tokens"),
    ),
)
def test_recall_that_cannot_be_asked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(EvaluationError, match=said):
        recall_probe(converted(), samples=2, **settings, **QUIET)


def test_recall_keeps_to_learned_positions() -> None:
    with pytest.raises(EvaluationError, match=r"texts of 97: .* positions for 96 tokens"):
        recall_probe(converted("gpt2"), distances=(81,), samples=2, **QUIET)
    found = recall_probe(converted("gpt2"), samples=2, **QUIET)
    assert [row["distance"] for row in found["pairs"]] == [16, 32, 64]
    spoilt = converted().apply(_spoil)
    with pytest.raises(EvaluationError, match="not a number"):
        recall_probe(spoilt, samples=2, **QUIET)


def test_evaluate_gives_a_result() -> None:
    models = {"base": (pretrained("llama").to(torch.bfloat16), tokenizer()), "decay": (converted(), tokenizer())}
    settings = dict(length=32, contexts=(0, 24), by_position=True, position_length=64, recall=True)
    found = evaluate(models, data={"one": TEXT, "two": TEXT[:70]}, **settings, **QUIET)
    assert found["kind"] == "evaluation" and found["seed"] == 0
    assert found["tokens"] == 2 * (2 * (150 + 70) + 128 + 64)
    base, decay = found["models"]
    assert (base["name"], base["converted"], base["rule"], base["state_bytes"]) == ("base", False, "attention", 0)
    assert (decay["name"], decay["converted"], decay["rule"]) == ("decay", True, "decay")
    assert (base["dtype"], decay["dtype"]) == ("bfloat16", "float32")
    assert decay["state_bytes"] == 2 * 4 * 8 * 4 * 4
    assert decay["parameters"] == sum(p.numel() for p in models["decay"][0].parameters())
    assert [(row["data"], row["context"]) for row in decay["perplexity"]] == [
        ("one", 0),
        ("one", 24),
        ("two", 0),
        ("two", 24),
    ]
    expected = perplexity(models["decay"][0], tokenizer(), TEXT, length=32, context=24, **QUIET)
    assert decay["perplexity"][1] == {"data": "one"} | expected.to_dict()
    assert [(row["data"], row["from"], row["to"]) for row in decay["by_position"]] == [("one", 0, 64), ("two", 0, 64)]
    assert set(decay["recall"]) == {"pairs", "copy"} and "tasks" not in decay
    assert json.loads(json.dumps(found)) == found


def test_evaluate_measures_only_what_is_asked_for() -> None:
    found = evaluate({"m": (converted(), tokenizer())}, data={"t": TEXT}, length=64, **QUIET)["models"][0]
    assert not {"by_position", "recall", "tasks"} & set(found)
    with pytest.raises(EvaluationError, match="nothing to evaluate on"):
        evaluate({"m": (converted(), tokenizer())}, **QUIET)
    with pytest.raises(EvaluationError, match="--by-position needs"):
        evaluate({"m": (converted(), tokenizer())}, recall=True, by_position=True, **QUIET)


def test_evaluate_fails_before_the_first_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "perplexity", lambda *_, **__: pytest.fail("measured"))
    models = {"fits": (pretrained("llama"), tokenizer()), "short": (pretrained("gpt2"), tokenizer())}
    with pytest.raises(EvaluationError, match="short: --length 128: GPT2LMHeadModel has learned positions for 96"):
        evaluate(models, data={"t": TEXT}, length=128, **QUIET)
    with pytest.raises(EvaluationError, match="fits: --context 128"):
        evaluate(models, data={"t": TEXT}, length=128, contexts=(0, 128), **QUIET)


def test_models_of_other_families_are_evaluated_too() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))
    found = evaluate({"bloom": (model, tokenizer())}, data={"t": TEXT}, length=32, **QUIET)["models"][0]
    assert not found["converted"] and found["perplexity"][0]["tokens"] == 150
