"""A model without its window: the state's output alone, as if the window's share were 0."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, depend_on_input, pretrained, tokens

import fastweights as fw
from fastweights.modeling.layer import converted_layers
from fastweights.modeling.modes import WindowError, without_window

PADDED = torch.tensor([[0] * 5 + [1] * 15, [1] * 20, [1] * 20])
PACKED = torch.cat([torch.arange(9), torch.arange(11)]).expand(3, -1)
INPUTS = {"plain": {}, "padding": {"attention_mask": PADDED}, "packed": {"position_ids": PACKED, "use_cache": False}}


def converted(family: str = "llama", **settings: Any) -> Any:
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**dict(rule="decay", m=4, window=3) | settings))
    depend_on_input(model)
    return model.eval()


def with_share_zero(model: Any) -> Any:
    model = copy.deepcopy(model)
    for layer in converted_layers(model).values():
        layer.mix.logit.data.fill_(-math.inf)
    return model


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("mix", ["constant", "token"])
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_model_without_window_equals_one_with_share_zero(family: str, mix: str, inputs: str) -> None:
    model, ids = converted(family, mix=mix), tokens(3, 20)
    usual, expected = (m(ids, **INPUTS[inputs]).logits for m in (model, with_share_zero(model)))
    with without_window(model):
        assert model(ids, **INPUTS[inputs]).logits.equal(expected)
    assert not usual.equal(expected)
    assert model(ids, **INPUTS[inputs]).logits.equal(usual)


@pytest.mark.parametrize("inputs", INPUTS)
@torch.no_grad()
def test_window_is_left_out_of_the_named_rows_only(inputs: str) -> None:
    model, ids, rows = converted(mix="token"), tokens(3, 20), torch.tensor([True, False, True])
    usual, alone = (m(ids, **INPUTS[inputs]).logits for m in (model, with_share_zero(model)))
    with without_window(model, rows):
        assert model(ids, **INPUTS[inputs]).logits.equal(torch.where(rows[:, None, None], alone, usual))


@torch.no_grad()
def test_text_in_chunks_and_generated_tokens_are_read_without_the_window() -> None:
    model, ids = converted(sinks=1, mix="token"), tokens(2, 30)
    zero = with_share_zero(model)
    with without_window(model):
        first = model(ids[:, :17], use_cache=True)
        rest = model(ids[:, 17:], past_key_values=first.past_key_values).logits
        generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert_close("logits", torch.cat([first.logits, rest], 1), zero(ids).logits, 1e-5)
    assert generated.equal(zero.generate(ids, max_new_tokens=8, do_sample=False))


@torch.no_grad()
def test_attention_layers_of_a_hybrid_do_not_change() -> None:
    model, ids = converted(layers=(1,)), tokens(2, 20)
    with without_window(model):
        found = model(ids).logits
    assert found.equal(with_share_zero(model)(ids).logits)


def test_parameters_of_a_window_that_is_left_out_have_zero_gradients() -> None:
    model = converted()
    with without_window(model):
        model(tokens(2, 20)).logits.square().sum().backward()
    for layer in converted_layers(model).values():
        assert all(p.grad is not None and not p.grad.any() for p in layer.window.parameters())
        assert all(p.grad is not None and p.grad.any() for p in layer.rule.projections.q_proj.parameters())


def test_window_is_back_after_an_error() -> None:
    model, ids = converted(), tokens(2, 20)
    usual = model(ids).logits
    with pytest.raises(RuntimeError), without_window(model):
        raise RuntimeError
    assert model(ids).logits.equal(usual)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: converted(window=0), "has no window"),
        (lambda: converted(rule="local"), "has the rule local"),
        (lambda: pretrained("llama"), "is not converted"),
    ],
    ids=["no window", "local", "unconverted"],
)
def test_model_without_a_window_beside_a_state_is_refused(model: Any, reason: str) -> None:
    with pytest.raises(WindowError, match=f"the model {reason}"), without_window(model()):
        pass
