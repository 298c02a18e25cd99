"""Arguments of the engine: wrong ones are refused by name, and equivalent forms are accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine import WIDE, converted, name, prompts_of
from helpers.tiny import VOCAB, pretrained, tokens

import fastweights as fw
from fastweights.config import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prompts=[[5], []]), r"prompts\[1\] must be the tokens of one sequence, at least one, found shape \[0\]"),
        (
            dict(prompts=[tokens(2, 3)]),
            r"prompts\[0\] must be the tokens of one sequence, at least one, found shape \[2, 3\]",
        ),
        (dict(prompts=[[VOCAB]]), r"prompts\[0\] must be tokens from 0 to 60"),
        (dict(prompts=[[-1]]), r"prompts\[0\] must be tokens from 0 to 60"),
        (dict(prompts=[[1]], max_new_tokens=0), "max_new_tokens must be at least 1, found 0"),
        (dict(prompts=[[1]], max_new_tokens=[1, 2]), "max_new_tokens must be one for all or one for each of 1 prompts"),
        (dict(prompts=[[1], [2]], sampling=[WIDE]), "sampling must be one for all or one for each of 2 prompts"),
        (dict(prompts=[[1]], max_new_tokens=[2.5]), "max_new_tokens must be a whole number, found 2.5"),
        (dict(prompts=[[1]], max_new_tokens=None), "max_new_tokens must be a whole number, found None"),
        (dict(prompts=[[1]], max_new_tokens=True), "max_new_tokens must be a whole number, found True"),
        (dict(prompts=[[1]], stop_tokens=["."]), "stop_tokens must be from 0 to 60, found '.'"),
        (dict(prompts=[[1]], stop_tokens="."), "stop_tokens must be from 0 to 60, found '.'"),
        (dict(prompts=[[1]], stop_tokens=[VOCAB]), "stop_tokens must be from 0 to 60, found 61"),
        (dict(prompts=[[1]], stop_tokens=[5.5]), "stop_tokens must be from 0 to 60, found 5.5"),
        (dict(prompts=[None]), r"prompts\[0\] must be the tokens of one sequence, found None"),
        (dict(prompts=[[1]], sampling={"top_k": 3}), "sampling must hold Samplings, found {'top_k': 3}"),
        (dict(prompts=[[1]], states=["state"]), "states must hold FastWeightsCaches, found 'state'"),
    ],
)
def test_wrong_generate_argument_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fw.Engine(converted()).generate(**arguments)


def test_wrong_engine_argument_is_refused_by_name() -> None:
    for options, message in (
        (dict(batch_size=0), "batch_size must be at least 1, found 0"),
        (dict(prefill_chunk=0), "prefill_chunk must be at least 1, found 0"),
        (dict(prefill_chunk=None), "prefill_chunk must be a whole number, found None"),
        (dict(max_length=1.5), "max_length must be a whole number, found 1.5"),
        (dict(graph=True), "graph=True needs a CUDA device"),
    ):
        with pytest.raises(ConfigError, match=message):
            fw.Engine(converted(), **options)
    with pytest.raises(ConfigError, match="found a LlamaForCausalLM: convert it"):
        fw.Engine(pretrained("llama"))


def test_unusable_kernels_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ConfigError, match=r"kernels=True cannot be used here: it needs a CUDA device, and .* leave it out"
    ):
        fw.Engine(converted(), kernels=True)


def test_numpy_integers_and_all_forms_of_stop_tokens_are_accepted() -> None:
    engine, (prompt,) = fw.Engine(converted()), prompts_of(5)
    (expected,) = engine.generate([prompt], 6, stop_tokens=())
    assert engine.generate([prompt], np.int64(6), fw.Sampling(top_k=np.int64(1)), stop_tokens=()) == [expected]
    for stop in (expected[2], [expected[2]], torch.tensor([expected[2]]), torch.tensor(expected[2]), {expected[2]}):
        (found,) = engine.generate([prompt], 6, stop_tokens=stop)
        assert found == expected[: expected.index(expected[2]) + 1]


@pytest.mark.parametrize("settings", [dict(m=6), dict(m=6, window=5), dict(m=6, layers=(0,))], ids=name)
def test_tokens_do_not_depend_on_inference_mode_or_autocast(settings: dict[str, Any]) -> None:
    model, prompts = converted(**settings), prompts_of(5, 3)
    arguments = (prompts, 6, fw.Sampling(repetition_penalty=1.2, seed=3))
    expected = fw.Engine(model, max_length=20).generate(*arguments)
    with torch.inference_mode():
        engine = fw.Engine(model, max_length=20)
        assert engine.generate(*arguments) == expected
    assert engine.generate(*arguments) == expected, "outside of inference mode"
    with torch.autocast("cpu", torch.bfloat16):
        assert engine.generate(*arguments) == expected


def test_state_must_have_one_row_and_counts_towards_max_length() -> None:
    model = converted(m=6, layers=(0,))
    engine, (prompt,) = fw.Engine(model, max_length=12), prompts_of(5)
    several, one = (fw.FastWeightsCache(model.config) for _ in range(2))
    with torch.no_grad():
        model(tokens(2, 4), past_key_values=several)
        model(tokens(1, 4), past_key_values=one)
    with pytest.raises(ConfigError, match=r"states\[0\] must be of one sequence, found 2"):
        engine.generate([prompt], 2, states=[several])
    with pytest.raises(ConfigError, match=r"prompts\[0\] may grow to 13 tokens, and max_length is 12"):
        engine.generate([prompt], 5, states=[one])
    assert len(engine.generate([prompt], 4, states=[one], stop_tokens=())[0]) == 4


def test_string_prompts_float_limits_and_shared_states_are_refused() -> None:
    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(rule="decay", m=4))
    engine, state = fw.Engine(model, 2), fw.FastWeightsCache(model.config)
    for match, arguments in (
        ("prompts\\[0\\] is a string.*input_ids", dict(prompts=["a text"])),
        ("whole number, found 2.0", dict(prompts=[[5]], max_new_tokens=2.0)),
        ("states has one state for two prompts.*fork", dict(prompts=[[5], [7]], states=[state, state])),
    ):
        with pytest.raises(ConfigError, match=match):
            engine.generate(**arguments)  # type: ignore[arg-type]
