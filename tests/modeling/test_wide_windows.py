"""Wide windows in some layers: which layers get one, and what they then see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny import CONFIGS, pretrained, tokens
from torch import nn

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.modeling.attention_weights import prefix_matching, wide_layers
from fastweights.modeling.layer import converted_layers
from fastweights.modeling.modes import evaluating

LOCAL: dict[str, Any] = dict(rule="local", window=2, sinks=1)


def windows_of(model: Any) -> list[int]:
    return [layer.window.window for layer in converted_layers(model).values()]


@pytest.mark.parametrize("family", CONFIGS)
def test_one_layer_of_a_small_model_gets_the_wide_window(family: str) -> None:
    """Gemma's layers with a sliding window of their own are never wider than that."""
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**LOCAL, wide_window=4))
    (wide,) = model.config.fastweights["wide_layers"]
    assert [layer for layer, window in enumerate(windows_of(model)) if window == 4] == [wide]


def test_given_layers_get_the_wide_window() -> None:
    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(**LOCAL, wide_window=50, wide_layers=(0,)))
    assert windows_of(model) == [50, 2]


def test_only_converted_layers_are_chosen() -> None:
    for layer in (0, 1):
        config = fw.FastWeightsConfig(**LOCAL, wide_window=50, layers=(layer,))
        assert fw.convert(pretrained("llama"), config).config.fastweights["wide_layers"] == [layer]


def test_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wide_layers=\[2\] do not exist: the model has 2 layers, numbered 0 to 1"):
        fw.convert(pretrained("llama"), fw.FastWeightsConfig(**LOCAL, wide_window=50, wide_layers=(1, 2)))


def test_sliding_windows_no_wider_than_the_window_are_not_widened() -> None:
    model = pretrained("mistral")
    sliding = model.config.sliding_window
    assert sliding
    model = fw.convert(model, fw.FastWeightsConfig(rule="local", window=sliding, wide_window=2 * sliding))
    settings = model.config.fastweights
    assert (settings["wide_window"], settings["wide_layers"]) == (0, None)


def matching_layer(model: Any, layer: int) -> None:
    """Give a Llama layer a head that finds the token after the last occurrence of the current one.

    The layer before it must write the previous token into the residual stream, which attention with equal weights over
    a window of two tokens does: here the embeddings themselves are arranged so that a token names its predecessor.
    """
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.k_proj.weight.zero_()
        d = attention.head_dim
        for row in range(d):
            attention.q_proj.weight[row, row] = 60.0
            attention.k_proj.weight[row, d + row] = 60.0


def test_prefix_matching_finds_the_head_that_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first elements of an embedding name the token, the next ones its predecessor, as an earlier layer would."""
    model = pretrained("llama")
    d, width = model.config.head_dim, model.config.hidden_size
    names = torch.randn(model.config.vocab_size, d, generator=torch.Generator().manual_seed(0))

    class Embedding(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            before = torch.cat([ids[:, :1], ids[:, :-1]], 1)
            rest = torch.zeros(*ids.shape, width - 2 * d)
            return torch.cat([names[ids], names[before], rest], -1)

    model.set_input_embeddings(Embedding())
    for block in model.model.layers:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            nn.init.zeros_(linear.weight)
    # RoPE turns queries and keys by their positions; without it only the tokens count.
    monkeypatch.setattr(
        model.model.rotary_emb, "forward", lambda x, ids: (torch.ones(*ids.shape, d), torch.zeros(*ids.shape, d))
    )
    for layer in (0, 1):
        other = 1 - layer
        with torch.no_grad():
            nn.init.normal_(model.model.layers[other].self_attn.q_proj.weight, std=0.02)
        matching_layer(model, layer)
        scores = prefix_matching(model)
        assert scores[layer] > 0.5 > 5 * scores[other]
        assert wide_layers(model, (0, 1)) == (layer,)


def test_prefix_matching_leaves_the_model_as_it_was() -> None:
    model = pretrained("gpt2").train()
    ids = tokens(2, 9)
    with evaluating(model):
        before = model(ids).logits
    prefix_matching(model)
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())
    with evaluating(model):
        assert torch.equal(model(ids).logits, before)


def test_a_wide_layer_that_remains_attention_is_left_out_of_a_ranking() -> None:
    from fastweights.config import FastWeightsConfig
    from fastweights.evaluation.layer_ranking import restored

    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(**LOCAL, wide_window=50, wide_layers=(0,)))
    with restored(model, pretrained("llama"), (0,)):
        assert FastWeightsConfig.from_dict(model.config.fastweights) == FastWeightsConfig(**LOCAL, layers=(1,))
    with restored(model, pretrained("llama"), (1,)):
        assert FastWeightsConfig.from_dict(model.config.fastweights).wide_layers == (0,)
    assert model.config.fastweights["wide_layers"] == [0]
