"""Wide windows in some layers: which layers get one, and what they then see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens
from torch import nn

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.evaluation.layer_ranking import restored
from fastweights.modeling.attention_weights import (
    SHORTEST,
    attention_weights,
    lookup_attention,
    queries_and_keys,
    wide_layers,
)
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import converted_layers
from fastweights.modeling.modes import evaluating

LOCAL: dict[str, Any] = dict(rule="local", window=2, sinks=1)


def windows_of(model: Any) -> list[int]:
    return [layer.window.window for layer in converted_layers(model).values()]


@pytest.mark.parametrize("family", CONFIGS)
def test_one_layer_of_a_small_model_gets_the_wide_window(family: str) -> None:
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**LOCAL, wide_window=4))
    (wide,) = model.config.fastweights["wide_layers"]
    assert [layer for layer, window in enumerate(windows_of(model)) if window == 4] == [wide]


def test_given_layers_get_the_wide_window() -> None:
    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(**LOCAL, wide_window=50, wide_layers=(0,)))
    assert windows_of(model) == [50, 2]


def test_wide_window_is_no_wider_than_the_layers_own() -> None:
    model = pretrained("mistral")
    config = fw.FastWeightsConfig(**LOCAL, wide_window=50, wide_layers=(0,))
    assert windows_of(fw.convert(model, config)) == [model.config.sliding_window, 2]


def test_layers_must_be_known_where_layers_are_built() -> None:
    with pytest.raises(ConfigError, match="wide_layers is missing: name the layers, or let `convert` choose them"):
        fw.FastWeightsConfig(**LOCAL, wide_window=50).of_layer(0)


def test_one_converted_layer_in_four_is_chosen() -> None:
    config = copy.deepcopy(pretrained("llama").config)
    config.num_hidden_layers = 12
    for layers, count in ((None, 3), ((0, 5), 1), (tuple(range(9)), 2)):
        model = fw.convert(
            type(pretrained("llama"))(config), fw.FastWeightsConfig(**LOCAL, layers=layers, wide_window=9)
        )
        assert len(model.config.fastweights["wide_layers"]) == count


def test_layers_that_remain_attention_are_not_read() -> None:
    """They may be quantized."""
    model = pretrained("llama")
    for parameter in model.model.layers[1].self_attn.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.int8)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    model = fw.convert(model, fw.FastWeightsConfig(**LOCAL, layers=(0,), wide_window=9))
    assert model.config.fastweights["wide_layers"] == [0]


def test_overflow_is_refused_by_name() -> None:
    model = pretrained("llama")
    model.model.embed_tokens.weight.data.fill_(torch.inf)
    with pytest.raises(ConfigError, match=r"wide_layers cannot be chosen: .* overflow in float32; load it in"):
        fw.convert(model, fw.FastWeightsConfig(**LOCAL, wide_window=9))


def test_model_with_few_positions_gets_no_wide_window() -> None:
    config = copy.deepcopy(pretrained("gpt2").config)
    config.n_positions = SHORTEST - 1
    model = fw.convert(type(pretrained("gpt2"))(config), fw.FastWeightsConfig(**LOCAL, wide_window=9))
    assert (model.config.fastweights["wide_window"], model.config.fastweights["wide_layers"]) == (0, None)
    config.n_positions = SHORTEST
    model = fw.convert(type(pretrained("gpt2"))(config), fw.FastWeightsConfig(**LOCAL, wide_window=9))
    assert len(model.config.fastweights["wide_layers"]) == 1


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


@pytest.mark.parametrize("keys_name", ["predecessor", "token"])
@pytest.mark.parametrize("layer", [0, 1])
def test_lookup_attention_finds_the_layer_that_looks_up(
    layer: int, keys_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one layer queries name the token, and keys its predecessor (an induction head) or the token itself (a
    duplicate-token head)."""
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
        for linear, first in ((attention.q_proj, 0), (attention.k_proj, d if keys_name == "predecessor" else 0)):
            linear.weight.zero_()
            for row in range(len(linear.weight)):
                linear.weight[row, first + row % d] = 30.0
    scores = lookup_attention(model, (0, 1))
    assert scores[layer] > 5 * scores[1 - layer]
    assert wide_layers(model, (0, 1)) == (layer,)
    assert wide_layers(model, (1 - layer,)) == (1 - layer,)


@pytest.mark.parametrize("family", CONFIGS)
def test_attention_weights_are_those_of_the_model(family: str) -> None:
    """Under autocast, too: the trainer measures distances of attention inside it."""
    model = pretrained(family)
    model.set_attn_implementation("eager")
    ids, found = tokens(1, 9), {}

    def capture(_module: nn.Module, arguments: Any, keywords: Any) -> None:
        x = arguments[0] if arguments else keywords["hidden_states"]
        with torch.autocast("cpu", torch.bfloat16):
            q, k, shape = queries_and_keys(model, 1, x, keywords.get("position_embeddings"))
            found["weights"] = attention_weights(q[0], k[0], shape, torch.tensor([3, 8]), torch.arange(9))

    attention = family_of(model).attention_of(family_of(model).blocks(model)[1])
    attention.register_forward_pre_hook(capture, with_kwargs=True)
    with evaluating(model):
        attentions = model(ids, use_cache=False, output_attentions=True).attentions
    assert_close("weights", found["weights"], attentions[1][0][:, [3, 8]], 1e-5)


def test_lookup_attention_leaves_the_model_as_it_was() -> None:
    model = pretrained("gpt2").train()
    ids = tokens(2, 9)
    with evaluating(model):
        before = model(ids).logits
    lookup_attention(model, (0, 1))
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
