"""Local attention against a plain masked softmax."""

from __future__ import annotations

import pytest
import torch
from helpers.relative_error import assert_close, op_flags
from torch import Tensor

from fastweights.modeling.window import WindowCache, local_attention

FLAGS = ("none", "mask", "reset", "mask+reset")


def local_inputs(T: int, groups: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(T)
    return {
        name: torch.randn(2, T, heads, 4, generator=generator)
        for name, heads in (("q", 2 * groups), ("k", 2), ("v", 2))
    }


def plain_local(
    inputs: dict[str, Tensor], window: int, mask: Tensor | None, reset: Tensor | None, softcap: float | None = None
) -> Tensor:
    """softmax(q k^T) v over the last `window` real tokens of the token's own document."""
    q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    real = torch.ones(q.shape[:2], dtype=torch.bool) if mask is None else mask
    document = torch.zeros(q.shape[:2]) if reset is None else reset.cumsum(1)
    place = real.cumsum(1)
    behind = place[:, :, None] - place[:, None, :]
    visible = (behind >= 0) & (behind < window) & real[:, :, None] & real[:, None, :]
    visible &= document[:, :, None] == document[:, None, :]
    logits = torch.einsum("bthd,bshd->bhts", q, k)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.exp() * visible[:, None]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize("window", [1, 2, 5, 32])
@pytest.mark.parametrize("T", [1, 2, 4, 5, 6, 31, 32, 33, 63, 64, 65, 70])
@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("groups", [1, 3])
def test_local_attention_matches_masked_softmax(window: int, T: int, kind: str, groups: int) -> None:
    inputs = {name: x.requires_grad_() for name, x in local_inputs(T, groups).items()}
    flags = op_flags(kind, 2, T, seed=T)
    y, _ = local_attention(**inputs, window=window, **flags)
    expected = plain_local(inputs, window, flags.get("mask"), flags.get("reset"))
    assert_close("y", y, expected, 1e-6)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    gradients, expected_gradients = (
        torch.autograd.grad((x * weight).sum(), list(inputs.values())) for x in (y, expected)
    )
    for name, dx, dx_expected in zip(inputs, gradients, expected_gradients, strict=True):
        assert_close(f"gradient of {name}", dx, dx_expected, 1e-5)


def test_local_attention_caps_logits() -> None:
    inputs = local_inputs(40, 1)
    y, _ = local_attention(**inputs, window=5, softcap=0.5)
    assert_close("y", y, plain_local(inputs, 5, None, None, softcap=0.5), 1e-6)


@pytest.mark.parametrize("window", [1, 2, 5, 32])
@pytest.mark.parametrize(
    "chunks", [(1, 1, 68), (7, 3, 30, 30), (40, 1, 1, 1, 27), (1,) * 70], ids=lambda p: f"{len(p)} chunks"
)
@pytest.mark.parametrize("kind", FLAGS)
def test_local_attention_in_chunks_matches_whole_sequence(window: int, chunks: tuple[int, ...], kind: str) -> None:
    T = sum(chunks)
    inputs, flags = local_inputs(T, 2), op_flags(kind, 2, T)
    outputs, past, start = [], None, 0
    for length in chunks:
        chunk = {name: x[:, start : start + length] for name, x in (inputs | flags).items()}
        y, past = local_attention(**chunk, window=window, past=past)
        assert isinstance(past, WindowCache)
        assert past.k.shape == past.v.shape == (2, window - 1, 2, 4)
        outputs.append(y)
        start += length
    expected = plain_local(inputs, window, flags.get("mask"), flags.get("reset"))
    assert_close("y", torch.cat(outputs, dim=1), expected, 1e-6)
