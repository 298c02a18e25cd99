"""torch's dynamic int8 quantization of converted models."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.tiny import CONFIGS, pretrained, tokens
from torch import nn

import fastweights as fw
from fastweights.modeling.layer import FastWeightsAttention

VARIANTS = [
    dict(rule="decay", m=8),
    dict(rule="delta", m=8, window=3, mix="token"),
    dict(rule="gated_delta", m=8, window=3, mix="token", projections="shared", gate_rank=3),
    dict(rule="local", window=4),
]


def quantize(model: Any, modules: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces torchao
        return torch.ao.quantization.quantize_dynamic(model, modules, dtype=torch.qint8)


def converted(family: str, **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings))


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_a_quantized_model_stays_near_the_original_and_generates(family: str, settings: dict[str, Any]) -> None:
    model, ids = converted(family, **settings), tokens(2, 7)
    quantized = quantize(model, {nn.Linear})
    expected = model(ids).logits
    assert (quantized(ids).logits - expected).norm() < 0.2 * expected.norm()
    assert quantized.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
@torch.no_grad()
def test_quantized_layers_work_in_a_half_precision_model(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Dynamic quantization takes float32 only: the converted layers convert for it."""
    model, ids = converted("llama", **settings).to(dtype), tokens(2, 7)
    layers = [name for name, module in model.named_modules() if isinstance(module, FastWeightsAttention)]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    quantized = quantize(model, {name for name in linears if name.startswith(tuple(layers))})
    logits, expected = quantized(ids).logits, model(ids).logits
    assert logits.dtype == dtype
    assert (logits - expected).float().norm() < 0.2 * expected.float().norm()


def test_a_quantized_model_cannot_be_converted() -> None:
    with pytest.raises(ValueError, match="float dtype first"):
        fw.convert(quantize(pretrained("llama"), {nn.Linear}))
