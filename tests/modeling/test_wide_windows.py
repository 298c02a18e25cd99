"""Wide windows in some layers: which layers get one, and what they then see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny import CONFIGS, pretrained, tokens
from torch import nn

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.evaluation.layer_ranking import restored
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


class PairEmbedding(nn.Module):
    """Embeddings whose first d elements name the token, and whose next ones name its predecessor, as a model's first
    layers would write them."""

    def __init__(self, names: torch.Tensor, width: int) -> None:
        super().__init__()
        self.names, self.rest = names, width - 2 * names.shape[1]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        before = torch.cat([ids[:, :1], ids[:, :-1]], 1)
        return torch.cat([self.names[ids], self.names[before], torch.zeros(*ids.shape, self.rest)], -1)


@pytest.mark.parametrize("layer", [0, 1])
def test_prefix_matching_finds_the_layer_that_matches(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one layer queries name the token and keys its predecessor."""
    model = pretrained("llama")
    d = model.config.head_dim
    names = torch.randn(model.config.vocab_size, d, generator=torch.Generator().manual_seed(0))
    model.set_input_embeddings(PairEmbedding(names, model.config.hidden_size))

    def no_rotation(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(*position_ids.shape, d), torch.zeros(*position_ids.shape, d)

    monkeypatch.setattr(model.model.rotary_emb, "forward", no_rotation)
    with torch.no_grad():
        for block in model.model.layers:  # they add nothing to the embeddings
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        attention = model.model.layers[layer].self_attn
        for linear, first in ((attention.q_proj, 0), (attention.k_proj, d)):
            linear.weight.zero_()
            for row in range(len(linear.weight)):
                linear.weight[row, first + row % d] = 30.0
    scores = prefix_matching(model)
    assert scores[layer] > 5 * scores[1 - layer]
    assert wide_layers(model, (0, 1)) == (layer,)
    assert wide_layers(model, (1 - layer,)) == (1 - layer,)


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
    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(**LOCAL, wide_window=50, wide_layers=(0,)))
    with restored(model, pretrained("llama"), (0,)):
        assert fw.FastWeightsConfig.from_dict(model.config.fastweights) == fw.FastWeightsConfig(**LOCAL, layers=(1,))
    with restored(model, pretrained("llama"), (1,)):
        assert fw.FastWeightsConfig.from_dict(model.config.fastweights).wide_layers == (0,)
    assert model.config.fastweights["wide_layers"] == [0]
