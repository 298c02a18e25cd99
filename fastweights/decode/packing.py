"""Weights of a model's modules in the form in which decoding reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastweights.config import LOCAL, ConfigError, FastWeightsConfig
from fastweights.modeling.classes import new_layer
from fastweights.modeling.families import Family
from fastweights.modeling.families.base import adds_one_to_weight
from fastweights.modeling.layer import (
    FastWeightsAttention,
    Projections,
)
from fastweights.ops.linear import Norm
from fastweights.rules import RULES


class UnsupportedModel(ConfigError):
    """A model that the decode model cannot be built from, with the reason."""


def gate_weights(attention: FastWeightsAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weights and biases of a layer's gates, in the rule's order, and of a mix that follows the token."""
    pairs: list[tuple[Tensor, Tensor | None]] = []
    if attention.rule is not None and not RULES[attention.rule.config.rule].by_position:
        pairs += [weight_of(linear) for linear in attention.rule.gates.values()]
    if attention.mix is not None and attention.mix.from_token is not None:
        pairs.append((weight_of(attention.mix.from_token)[0], attention.mix.logit.detach()))
    return pairs


def concatenate(pairs: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linear layers with the same input as one layer's."""
    bias = None
    if any(bias is not None for _, bias in pairs):
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
    return torch.cat([weight for weight, _ in pairs]), bias


def qkv_linears(projections: Projections) -> list[Any]:
    return [projections.q_proj, projections.k_proj, projections.v_proj]


def weight_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [N,K] and bias. Adapters and quantized layers do not have them in this form."""
    if type(linear) not in (nn.Linear, Conv1D):
        raise UnsupportedModel(f"it has a {type(linear).__name__} where a linear layer is expected")
    weight = linear.weight.detach()
    return (weight.T if type(linear) is Conv1D else weight), None if linear.bias is None else linear.bias.detach()


def norm_of(norm: Any) -> Norm:
    if isinstance(norm, nn.LayerNorm):
        if norm.weight is None:
            raise UnsupportedModel("it has a layer norm without weights")
        return Norm(norm.weight.detach(), None if norm.bias is None else norm.bias.detach(), norm.eps, centered=True)
    weight = norm.weight.detach().float() + 1 if adds_one_to_weight(norm) else norm.weight.detach()
    return Norm(weight, None, getattr(norm, "variance_epsilon", None) or norm.eps, centered=False)


def as_window(
    family: Family, attention: nn.Module, config: Any, index: int, max_length: int | None
) -> FastWeightsAttention:
    """An attention layer as a local one whose window holds the longest sequence."""
    others = [x for x in attention.children() if type(x) not in (nn.Linear, Conv1D)]
    unknown = [x for x in others if any(tensor.ndim > 1 for tensor in (*x.parameters(), *x.buffers()))]
    if unknown:
        raise UnsupportedModel(f"the attention of layer {index} has a {type(unknown[0]).__name__}")
    if max_length is None:
        raise UnsupportedModel(f"layer {index} is still attention, and max_length is not given")
    weight, settings = next(attention.parameters()), FastWeightsConfig(rule=LOCAL, window=max_length)
    with torch.random.fork_rng(devices=[]):  # new parameters are drawn before they are overwritten
        layer = new_layer(family, attention, config, settings, index)
    return layer.to(weight.device, weight.dtype).requires_grad_(False)
