"""Local attention against a plain masked softmax."""

from __future__ import annotations

import pytest
import torch
from helpers.relative_error import assert_close, op_flags
from torch import Tensor

from fastweights.modeling.window import WindowCache, local_attention

FLAGS = ("none", "mask", "reset", "mask+reset")
# Windows and sinks. A pretrained sliding window may be narrower than the sinks.
SIZES = [(1, 0), (2, 0), (5, 0), (32, 0), (2, 1), (5, 1), (5, 4), (32, 7), (1, 2), (3, 6)]


def local_inputs(T: int, groups: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(T)
    return {
        name: torch.randn(2, T, heads, 4, generator=generator)
        for name, heads in (("q", 2 * groups), ("k", 2), ("v", 2))
    }


def plain_local(
    inputs: dict[str, Tensor],
    window: int,
    mask: Tensor | None,
    reset: Tensor | None,
    softcap: float | None = None,
    sinks: int = 0,
) -> Tensor:
    """softmax(q k^T) v over the first `sinks` and the last `window` real tokens of the token's own document."""
    q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    real = torch.ones(q.shape[:2], dtype=torch.bool) if mask is None else mask
    document = torch.zeros(q.shape[:2]) if reset is None else reset.cumsum(1)
    place = real.cumsum(1)
    behind = place[:, :, None] - place[:, None, :]
    same = (document[:, :, None] == document[:, None, :]) & real[:, :, None] & real[:, None, :]
    rank = (same & (behind > 0)).sum(-1)  # in its document
    visible = same & (behind >= 0) & ((behind < window) | (rank < sinks)[:, None, :])
    logits = torch.einsum("bthd,bshd->bhts", q, k)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = logits.exp() * visible[:, None]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize(("window", "sinks"), SIZES)
@pytest.mark.parametrize("T", [1, 2, 4, 5, 6, 31, 32, 33, 63, 64, 65, 70])
@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("groups", [1, 3])
def test_local_attention_matches_masked_softmax(window: int, sinks: int, T: int, kind: str, groups: int) -> None:
    inputs = {name: x.requires_grad_() for name, x in local_inputs(T, groups).items()}
    flags = op_flags(kind, 2, T, seed=T)
    y, _ = local_attention(**inputs, window=window, sinks=sinks, **flags)
    expected = plain_local(inputs, window, flags.get("mask"), flags.get("reset"), sinks=sinks)
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


def plain_cache(k: Tensor, mask: Tensor | None, reset: Tensor | None, window: int, sinks: int) -> list[Tensor]:
    """For each row the keys of the first `sinks` and the last `window` - 1 real tokens of its last document."""
    rows = []
    for row, keys in enumerate(k):
        start = 0 if reset is None or not reset[row].any() else int(reset[row].nonzero().max())
        real = keys[start:] if mask is None else keys[start:][mask[row, start:]]
        first, last = real[:sinks], real[sinks:]
        rows.append(torch.cat([first, last[max(0, len(last) - (window - 1)) :]]))
    return rows


@pytest.mark.parametrize(("window", "sinks"), SIZES)
@pytest.mark.parametrize(
    "chunks", [(1, 1, 68), (7, 3, 30, 30), (40, 1, 1, 1, 27), (1,) * 70], ids=lambda p: f"{len(p)} chunks"
)
@pytest.mark.parametrize("kind", FLAGS)
def test_local_attention_in_chunks_matches_whole_sequence(
    window: int, sinks: int, chunks: tuple[int, ...], kind: str
) -> None:
    T = sum(chunks)
    inputs, flags = local_inputs(T, 2), op_flags(kind, 2, T)
    outputs, past, start = [], None, 0
    for length in chunks:
        end = start + length
        chunk = {name: x[:, start:end] for name, x in (inputs | flags).items()}
        y, past = local_attention(**chunk, window=window, past=past, sinks=sinks)
        assert isinstance(past, WindowCache)
        assert past.k.shape == past.v.shape == (2, sinks + window - 1, 2, 4)
        so_far = {name: x[:, :end] for name, x in flags.items()}
        for name, found in (("k", past.k), ("v", past.v)):
            expected = plain_cache(inputs[name][:, :end], so_far.get("mask"), so_far.get("reset"), window, sinks)
            for row, held in enumerate(expected):
                assert past.mask[row].tolist() == [False] * (past.mask.shape[1] - len(held)) + [True] * len(held)
                assert torch.equal(found[row][past.mask[row]], held), f"cached {name} after {end} tokens"
        outputs.append(y)
        start = end
    expected = plain_local(inputs, window, flags.get("mask"), flags.get("reset"), sinks=sinks)
    assert_close("y", torch.cat(outputs, dim=1), expected, 1e-6)


@pytest.mark.parametrize("sinks", [1, 3])
def test_documents_shorter_than_the_sinks_see_only_themselves(sinks: int) -> None:
    inputs, reset = local_inputs(40, 1), torch.zeros(2, 40, dtype=torch.bool)
    reset[0, [0, 1, 3, 20, 21]] = reset[1, [2, 4]] = True
    y, _ = local_attention(**inputs, window=4, reset=reset, sinks=sinks)
    assert_close("y", y, plain_local(inputs, 4, None, reset, sinks=sinks), 1e-6)


def test_sinks_are_those_of_the_document_before_the_call_until_the_next_one_begins() -> None:
    """Left padding in a later call moves the cached tokens, sinks among them."""
    inputs = local_inputs(30, 2)
    mask, reset = torch.ones(2, 30, dtype=torch.bool), torch.zeros(2, 30, dtype=torch.bool)
    mask[0, 12:17] = mask[1, 14] = False
    reset[0, 24] = True
    outputs, past = [], None
    for part in (slice(0, 12), slice(12, 30)):
        chunk = {name: x[:, part] for name, x in (inputs | dict(mask=mask, reset=reset)).items()}
        y, past = local_attention(**chunk, window=3, past=past, sinks=2)
        outputs.append(y)
    assert_close("y", torch.cat(outputs, dim=1), plain_local(inputs, 3, mask, reset, sinks=2), 1e-6)
