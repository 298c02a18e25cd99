"""One token of a window's attention by the Triton kernel, against float64. Where there is no GPU, Triton's interpreter
runs it (conftest)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.decode_kernels import DEVICE, needs_triton, randn
from helpers.engine import converted
from helpers.gpu_compilation import run_compiling
from helpers.relative_error import assert_close
from helpers.tiny import tokens
from torch import Tensor
from torch.nn import functional as F

from fastweights.decode.model import DecodeModel
from fastweights.decode.prefill import prefill
from fastweights.modeling.layer import apply_rotary
from fastweights.ops.step import (
    WIDEST_RING,
    WINDOW_TILE,
    Rotary,
    can_overlap,
    has_window_kernel,
    window_kernel,
    window_tile,
)

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore")]
# B, S, G, d, w, pairs, sinks: odd ones, single ones, more queries than a tile's smallest, heads of 64, several tiles
SIZES = [
    (3, 2, 2, 5, 7, 2, 0),
    (5, 2, 2, 5, 7, 2, 3),
    (2, 1, 1, 1, 1, 0, 0),
    (5, 1, 1, 1, 2, 0, 1),
    (1, 1, 17, 8, 3, 1, 0),
    (2, 3, 3, 64, 64, 32, 0),
    (2, 3, 3, 64, 60, 32, 4),
    (1, 2, 1, 96, 33, 16, 4),
    (4, 1, 3, 64, 508, 32, 4),
    (5, 2, 1, 200, 130, 0, 0),
]
DTYPES = [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]


def case(size: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Rings that are empty, filling, just full, and have gone round; places that hold no token yet are poisoned."""
    B, S, G, d, w, pairs, sinks = size
    width = sinks + w
    x: dict[str, Any] = dict(
        keys=randn(B, S, width, d, seed=1),
        values=randn(B, S, width, d, seed=2),
        positions=torch.tensor([5 * w + 3, 0, width - 1, sinks, width])[:B],
        q=randn(B, G * S, d, seed=3),
        k=randn(B, S, d, seed=4),
        v=randn(B, S, d, seed=5),
    )
    x |= {name: tensor.to(dtype) for name, tensor in x.items() if name != "positions"}
    for row, position in enumerate(x["positions"].tolist()):
        for name in ("keys", "values"):
            x[name][row, :, position:] = x[name][row, :, position:] if position >= width else math.nan
    if pairs:
        angles = randn(B, pairs + 1, seed=6)
        chosen = torch.stack([torch.randperm(pairs + 1)[:pairs] for _ in range(S)])
        x["rotary"] = Rotary(angles.cos(), angles.sin(), chosen)
    return x


def truth(
    x: dict[str, Any], softcap: float | None, rule_output: Tensor | None, mix_logit: Tensor | None, sinks: int
) -> dict[str, Tensor]:
    dtype, (S, width) = x["keys"].dtype, x["keys"].shape[1:3]
    keys, values, q, k, v = (x[name].double() for name in ("keys", "values", "q", "k", "v"))
    if "rotary" in x:
        cos, sin, pairs = x["rotary"]
        q, k = (apply_rotary(t[:, None], cos.double()[:, None], sin.double()[:, None], pairs)[:, 0] for t in (q, k))
    y = torch.zeros_like(q)
    for b, position in enumerate(x["positions"].tolist()):
        place = position  # the first place that is empty; else that of the oldest token which is not a sink
        while place >= width:
            place -= width - sinks
        keys[b, :, place], values[b, :, place] = k[b].to(dtype).double(), v[b]
        count = min(position + 1, width)
        for head in range(q.shape[1]):
            ring = head // (q.shape[1] // S)
            logits = keys[b, ring, :count] @ q[b, head]
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            y[b, head] = logits.softmax(0) @ values[b, ring, :count]
    if rule_output is not None and mix_logit is not None:
        y = torch.lerp(rule_output.double(), y, mix_logit.double().sigmoid()[..., None])
    return dict(y=y, keys=keys, values=values)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize(("mix", "softcap"), [("none", None), ("none", 0.7), ("constant", None), ("token", 0.7)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_window_step_matches_float64(
    size: tuple[int, ...], mix: str, softcap: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    x, heads = case(size, dtype), size[1] * size[2]
    rule_output = None if mix == "none" else randn(size[0], heads, size[3], seed=7).to(dtype)
    logits = F.pad(randn(size[0], heads, seed=8), (1, 1), value=math.nan).to(dtype).to(DEVICE)[:, 1:-1]
    mix_logit = {"none": None, "constant": logits[0], "token": logits}[mix]
    expected = truth(x, softcap, rule_output, None if mix_logit is None else mix_logit.cpu(), size[6])
    rotary = Rotary(*(t.to(DEVICE) for t in x.pop("rotary"))) if "rotary" in x else None
    x = {name: tensor.to(DEVICE) for name, tensor in x.items()}
    packed = torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], dim=1)  # as views of one buffer
    q, k, v = packed.split([x[name][0].numel() for name in ("q", "k", "v")], dim=1)
    views = (q.unflatten(1, (heads, -1)), k.unflatten(1, (size[1], -1)), v.unflatten(1, (size[1], -1)))
    y = torch.full_like(x["q"], math.nan)
    rule_output = None if rule_output is None else rule_output.to(DEVICE)
    window_kernel(x["keys"], x["values"], x["positions"], *views, y, rotary, softcap, rule_output, mix_logit, size[6])
    assert_close("y", y.cpu(), expected["y"], tolerance)
    for name in ("keys", "values"):
        there = ~expected[name].isnan()
        assert torch.equal(x[name].cpu().isnan(), ~there), "a place was written that is not the token's"
        assert_close(name, x[name].cpu()[there], expected[name][there], tolerance)


def test_window_tile_fits_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    sizes = ((1, 1), (64, 64), (200, 64), (WINDOW_TILE // 64, 64), (2**20, 64), (130, 200))
    assert [window_tile(*size, device) for size in sizes] == [16, 64, 256, 256, 256, 64]
    monkeypatch.setattr("fastweights.ops.step.shared_bytes", lambda _: 99 * 1024)
    assert window_tile(508, 64, device) == 128 and window_tile(508, 256, device) == 32
    assert has_window_kernel(WIDEST_RING, 512, device)
    assert not has_window_kernel(WIDEST_RING + 1, 64, device) and not has_window_kernel(16, 513, device)


MODELS = [
    dict(m=6, window=3, mix="token"),
    dict(m=6, window=3, sinks=2),
    dict(rule="local", window=2, sinks=1),
    dict(rule="local", window=5),
    dict(m=6, layers=(0,)),
]


@pytest.mark.parametrize("settings", MODELS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_decode_model_with_window_kernels_matches_the_model(family: str, settings: dict[str, Any]) -> None:
    model = converted(family, **settings).to(DEVICE)
    decoder, text = DecodeModel(model, 2, kernels=True, max_length=12), tokens(2, 9).to(DEVICE)
    windows = [block.window for block in decoder.blocks if block.window is not None]
    assert all(window.fused for window in windows) and windows
    assert not decoder.context.rings, "only attention in torch needs an index"
    with torch.no_grad():
        for slot, length in enumerate((2, 4)):
            decoder.set_slot(slot, prefill(model, text[slot, :length])[1])
        for t in range(4):
            decoder.tokens.copy_(torch.stack([text[0, 2 + t], text[1, 4 + t]]))
            found = decoder.step().cpu()
            for slot, length in enumerate((3, 5)):
                expected = model(text[slot : slot + 1, : length + t]).logits[0, -1].cpu()
                assert_close("logits", found[slot], expected, 2e-5)


@pytest.mark.gpu
def test_window_step_is_bitwise_reproducible() -> None:
    x = {name: t.to(DEVICE) for name, t in case((3, 3, 3, 64, 64, 0, 0), torch.bfloat16).items()}
    found = []
    for _ in range(50):
        keys, values, y = x["keys"].clone(), x["values"].clone(), torch.full_like(x["q"], math.nan)
        window_kernel(keys, values, x["positions"], x["q"], x["k"], x["v"], y, overlap=can_overlap(y.device))
        found.append(y)
    assert all(torch.equal(y, found[0]) for y in found)


def test_window_kernel_compiles_without_a_gpu() -> None:
    """For every dtype and the widest tile."""
    assert run_compiling("compile_window").count("bytes shared") == 12
