"""Inputs for the tests of the decode kernels."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.linear import FusedLinear, Norm

FUNCTIONS: dict[str, Any] = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


kernels = [needs_triton, pytest.mark.filterwarnings("ignore")]


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def layer_case(
    case: tuple[Any, ...], rows: int, n: int, k: int, dtype: torch.dtype, way: str, x: Tensor | None = None
) -> tuple[FusedLinear, Tensor, Tensor, Tensor]:
    """A layer, its input (unless it is given, what lies before and behind is not a number), what is added to (or not a
    number), and what should come of it."""
    activation, gated, norm_kind, has_bias, add = case
    device = DEVICE if way == "kernel" else "cpu"
    weight = randn(n * (2 if gated else 1), k, seed=1, scale=k**-0.5).to(device, dtype)
    bias = randn(len(weight), seed=2).to(device, dtype) if has_bias else None
    norm_bias = randn(k, seed=4).to(device, dtype) if norm_kind == "layer" else None
    norm_weight = (1 + 0.2 * randn(k, seed=3)).to(device, dtype)
    norm = Norm(norm_weight, norm_bias, 1e-5, norm_kind == "layer") if norm_kind != "none" else None
    if x is None:
        x = F.pad(randn(rows, k, seed=5) + 0.5, (0, 0, 1, 1), value=math.nan).to(device, dtype)[1:-1]
    before = randn(rows, n, seed=6).to(device, dtype)
    layer = FusedLinear(weight, bias, norm, activation, gated, kernel=way == "kernel")

    wide = x.double()
    if norm is not None:
        wide = wide - wide.mean(-1, keepdim=True) if norm.centered else wide
        wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
        wide = wide if norm_bias is None else wide + norm_bias.double()
    expected = wide @ weight.double().T + (0 if bias is None else bias.double())
    halves = expected.chunk(2, dim=-1) if gated else (expected, torch.ones_like(expected))
    expected = FUNCTIONS[activation](halves[0]) * halves[1] + (before.double() if add else 0)
    return layer, x, before if add else torch.full_like(before, math.nan), expected.cpu()
