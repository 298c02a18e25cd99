"""An evaluation of several models is one result with all that was asked for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cli import CHARACTERS, tokenizer
from helpers.tiny import VOCAB, pretrained

from fastweights import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.evaluation.checks import EvaluationError
from fastweights.evaluation.perplexity import perplexity
from fastweights.evaluation.suite import evaluate
from fastweights.modeling.description import describe
from fastweights.modeling.layer import converted_layers
from fastweights.modeling.positions import PositionError
from fastweights.results import EvaluationResult

TEXT = "".join(CHARACTERS[i] for i in torch.randint(0, 55, (150,), generator=torch.Generator().manual_seed(3)))
QUIET = dict(progress=False)


def converted(family: str = "llama", **settings: Any) -> Any:
    return convert(pretrained(family), FastWeightsConfig(**dict(rule="decay", m=4) | settings))


def test_evaluate_returns_all_measures_of_all_models() -> None:
    models = {"base": (pretrained("llama").to(torch.bfloat16), tokenizer()), "decay": (converted(), tokenizer())}
    settings = dict(length=32, contexts=(0, 24), by_position=True, position_length=64, recall=True)
    found = evaluate(models, data={"one": TEXT, "two": TEXT[:70]}, **settings, **QUIET)
    assert found.kind == "evaluation" and found.seed == 0
    assert found.tokens == 2 * (2 * (150 + 70) + 128 + 64)
    base, decay = found.models
    assert (base.name, base.converted, base.rule, base.state_bytes) == ("base", False, "attention", 0)
    assert (decay.name, decay.converted, decay.rule) == ("decay", True, "decay")
    assert (base.dtype, decay.dtype) == ("bfloat16", "float32")
    assert decay.state_bytes == 2 * 4 * 8 * 4 * 4
    assert base.cache is None
    assert [(size.tokens, size.bytes, size.base_bytes) for size in decay.cache] == [
        (use.tokens, use.here, use.attention) for use in describe(models["decay"][0]).memory
    ]
    assert decay.parameters == sum(p.numel() for p in models["decay"][0].parameters())
    assert [(row.data, row.context) for row in decay.perplexity] == [
        ("one", 0),
        ("one", 24),
        ("two", 0),
        ("two", 24),
    ]
    expected = perplexity(models["decay"][0], tokenizer(), TEXT, length=32, context=24, **QUIET)
    assert decay.perplexity[1] == expected.row("one")
    assert [(row.data, row.start, row.end) for row in decay.by_position] == [("one", 0, 64), ("two", 0, 64)]
    assert decay.recall is not None and decay.tasks is None
    assert EvaluationResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("bos", (True, False), ids=("bos", "no bos"))
def test_recall_sequences_start_with_the_bos_token_of_the_tokenizer(bos: bool) -> None:
    model, firsts = pretrained("llama"), set()
    model.config.bos_token_id = 5
    model.register_forward_pre_hook(
        lambda _, arguments, keywords: firsts.update(keywords["input_ids"][:, 0].tolist()), with_kwargs=True
    )
    evaluate({"base": (model, tokenizer(bos))}, recall=True, recall_samples=2, **QUIET)
    assert firsts == {1 if bos else 5}


def test_evaluate_measures_only_what_is_requested() -> None:
    found = evaluate({"m": (converted(), tokenizer())}, data={"t": TEXT}, length=64, **QUIET).models[0]
    assert (found.by_position, found.recall, found.tasks) == (None, None, None)
    with pytest.raises(EvaluationError, match="nothing to evaluate on"):
        evaluate({"m": (converted(), tokenizer())}, **QUIET)
    with pytest.raises(EvaluationError, match="by_position needs"):
        evaluate({"m": (converted(), tokenizer())}, recall=True, by_position=True, **QUIET)


def test_models_are_measured_once_more_without_their_window() -> None:
    model = converted(window=4)
    models = {"base": (pretrained("llama"), tokenizer()), "decay": (model, tokenizer())}
    found = evaluate(models, data={"t": TEXT}, length=32, recall=True, without_window=True, **QUIET)
    _, whole, alone = found.models
    assert [entry.name for entry in found.models] == ["base", "decay", "decay without the window"]
    assert [entry.without_window for entry in found.models] == [False, False, True]
    assert "without_window" not in whole.to_dict() and alone.to_dict()["without_window"] is True
    usual = evaluate(models, data={"t": TEXT}, length=32, recall=True, **QUIET).models[1]
    assert whole == replace(usual, seconds=whole.seconds)
    for layer in converted_layers(model).values():
        layer.mix.logit.data.fill_(-math.inf)
    expected = evaluate({"decay": models["decay"]}, data={"t": TEXT}, length=32, recall=True, **QUIET).models[0]
    assert (alone.perplexity, alone.recall) == (expected.perplexity, expected.recall)
    assert alone.perplexity != whole.perplexity
    assert EvaluationResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({}, "m has no window"), (dict(rule="local"), "m has the rule local"), (None, "m: no model is converted")],
    ids=["no window", "local", "unconverted"],
)
def test_models_without_a_window_beside_a_state_cannot_be_measured_without_it(settings: Any, reason: str) -> None:
    model = pretrained("llama") if settings is None else converted(**settings)
    with pytest.raises(EvaluationError, match=f"^without_window: {reason}"):
        evaluate({"m": (model, tokenizer())}, data={"t": TEXT}, length=32, without_window=True, **QUIET)


def test_evaluate_fails_before_the_first_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.evaluation.suite.perplexity", lambda *_, **__: pytest.fail("measured"))
    models = {"fits": (pretrained("llama"), tokenizer()), "short": (pretrained("gpt2"), tokenizer())}
    with pytest.raises(PositionError, match="short: length 128: gpt2 has learned positions for 96"):
        evaluate(models, data={"t": TEXT}, length=128, **QUIET)
    with pytest.raises(EvaluationError, match="fits: context 128"):
        evaluate(models, data={"t": TEXT}, length=128, contexts=(0, 128), **QUIET)


def test_models_of_other_families_are_evaluated_too() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))
    found = evaluate({"bloom": (model, tokenizer())}, data={"t": TEXT}, length=32, **QUIET).models[0]
    assert not found.converted and found.perplexity[0].tokens == 150


def test_evaluate_names_the_model_and_the_text_or_the_probe_that_fails() -> None:
    models = {"m": (converted(), tokenizer())}
    with pytest.raises(EvaluationError, match="m: data two: the text is empty"):
        evaluate(models, data={"one": TEXT, "two": " "}, length=64, **QUIET)
    with pytest.raises(EvaluationError, match=r"m: data one: the text has only 150 tokens, fewer than"):
        evaluate(models, data={"one": TEXT}, length=64, by_position=True, position_length=151, **QUIET)
    models["m"][0].get_input_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(EvaluationError, match="m: recall: the model's output is not a number"):
        evaluate(models, recall=True, **QUIET)
