"""Engine.stream: the tokens of generate one by one, with text; the iterator owns the engine while it runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.cli import tokenizer
from helpers.engine import converted, prompts_of

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.decode.engine import EngineBusy
from fastweights.decode.model import ForwardDecodeModel

TEXTS = ["Hello", "a b", "What is it?"]


def tokens_by_prompt(stream: Any, count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for item in stream:
        found[item.prompt].append(item.token)
    return found


@pytest.mark.parametrize("settings", [dict(m=6), dict(m=6, layers=(0,))], ids=["converted", "hybrid"])
@pytest.mark.parametrize("sampling", [None, fw.Sampling(temperature=2.0, seed=3)], ids=["greedy", "sampled"])
def test_stream_has_the_tokens_of_generate(settings: dict[str, Any], sampling: fw.Sampling | None) -> None:
    engine, prompts = fw.Engine(converted(**settings), 2, max_length=40), prompts_of(5, 3, 9)
    expected = engine.generate(prompts, [4, 9, 6], sampling)
    assert tokens_by_prompt(engine.stream(prompts, [4, 9, 6], sampling), 3) == expected


def test_strings_are_tokenized_and_the_texts_are_those_of_the_tokens() -> None:
    engine, own = fw.Engine(converted(), 2, tokenizer=tokenizer()), tokenizer()
    expected = engine.generate([own(text).input_ids for text in TEXTS], 7)
    assert engine.generate(TEXTS, 7) == expected
    texts = ["", "", ""]
    for item in engine.stream(TEXTS, 7):
        texts[item.prompt] += item.text
    assert texts == [own.decode(tokens, skip_special_tokens=True) for tokens in expected]


def test_text_after_a_state_gets_no_beginning_of_text_token() -> None:
    model, own = converted(), tokenizer()
    engine = fw.Engine(model, tokenizer=own)
    states = []
    for second in ("lo", own("lo", add_special_tokens=False).input_ids):
        state = fw.FastWeightsCache(model.config)
        engine.generate(["Hel"], 1, states=[state])
        engine.generate([second], 1, states=[state])
        states.append(state)
    whole = own("Hello").input_ids
    assert [int(state.seen) for state in states] == [len(whole)] * 2


def test_last_token_tells_why_its_sequence_ends() -> None:
    engine, (prompt,) = fw.Engine(converted()), prompts_of(5)
    (tokens,) = engine.generate([prompt], 6, stop_tokens=())
    stop = next(token for i, token in enumerate(tokens) if i and token not in tokens[:i])
    reasons = [item.finish_reason for item in engine.stream([prompt], 6, stop_tokens=stop)]
    assert reasons == [None] * tokens.index(stop) + ["stop"]
    assert [item.finish_reason for item in engine.stream([prompt], 3, stop_tokens=())] == [None, None, "length"]


def test_string_without_a_tokenizer_and_a_single_string_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompts\[0\] is a string: .* tokenizer"):
        fw.Engine(converted()).stream(["a text"])
    with pytest.raises(ConfigError, match="prompts must be a list"):
        fw.Engine(converted(), tokenizer=tokenizer()).stream("a text")


def test_wrong_arguments_are_refused_when_stream_is_called() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens must be at least 1"):
        fw.Engine(converted()).stream([[5]], 0)


# ownership


def test_stream_in_progress_owns_the_engine() -> None:
    engine, prompts = fw.Engine(converted()), prompts_of(5, 9)
    (expected,) = engine.generate(prompts[:1], 6)
    stream = engine.stream(prompts[:1], 6)
    found = [next(stream).token]
    for call in (lambda: engine.generate(prompts, 2), engine.step, lambda: next(engine.stream(prompts, 2))):
        with pytest.raises(EngineBusy, match="generating already"):
            call()
    assert found + [item.token for item in stream] == expected
    assert engine.generate(prompts[:1], 6) == [expected]


@pytest.mark.parametrize("how", ["not started", "closed", "deleted", "failed", "ended"])
def test_engine_is_free_when_a_stream_is_over(how: str) -> None:
    engine, prompts = fw.Engine(converted()), prompts_of(5)
    expected = engine.generate(prompts, 6)
    stream: Any = engine.stream(prompts, 6)
    if how != "not started":
        next(stream)
    if how == "closed":
        stream.close()
    elif how == "deleted":
        del stream
        gc.collect()
    elif how == "failed":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    elif how == "ended":
        list(stream)
    assert engine.generate(prompts, 6) == expected


# what runs between two tokens is the caller's


@pytest.mark.parametrize("supported", [True, False], ids=["packed", "own forward"])
def test_stream_leaves_modes_of_torch_and_of_the_model_to_its_caller(supported: bool) -> None:
    model = converted()
    engine, prompts = fw.Engine(model, 2), prompts_of(5, 3, 4)
    if not supported:
        engine.batch.decoder = ForwardDecodeModel(model, 2)
    model.train()
    for _ in engine.stream(prompts, 4):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert all(module.training for module in model.modules())


def test_stream_does_not_follow_the_autocast_of_its_caller() -> None:
    engine, prompts = fw.Engine(converted()), prompts_of(5)
    expected = engine.generate(prompts, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert tokens_by_prompt(engine.stream(prompts, 8), 1) == expected
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("family", ["gpt2", "gpt2 by its forward", "adaptive_input"])
def test_model_in_training_mode_streams_without_dropout(family: str) -> None:
    model = converted(family.split()[0])
    engine, prompts = fw.Engine(model), prompts_of(5)
    if "forward" in family:
        engine.batch.decoder = ForwardDecodeModel(model, 1)
    expected = engine.generate(prompts, 6)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    model.train()
    assert tokens_by_prompt(engine.stream(prompts, 6), 1) == expected
