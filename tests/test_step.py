"""One token of a rule in place, and linear layers with what stands around them: torch's way and the Triton kernels,
against float64. Where there is no GPU, Triton's interpreter runs the kernels (conftest)."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from relative_error import CASES, assert_close, case_name
from tiny import pretrained, tokens
from torch import Tensor
from torch.nn import functional as F

import fastweights as fw
from fastweights import ops
from fastweights.ops.linear import Linear, Norm, tiles
from fastweights.ops.step import Rotary, has_kernels, step, step_kernel, step_torch
from fastweights.rules import RULES
from fastweights.stepper import Stepper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
kernels = [needs_triton, pytest.mark.filterwarnings("ignore")]
WAYS = ["torch", pytest.param("kernel", marks=kernels)]
# B, S, G, d, m: odd ones, single ones, ones wider than a program's slice
SIZES = [(2, 3, 2, 5, 7), (1, 1, 1, 1, 1), (3, 2, 1, 70, 3), (1, 2, 3, 16, 33), (2, 1, 1, 130, 128)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one: large tiles, as if there were few multiprocessors."""
    if DEVICE == "cpu":
        monkeypatch.setattr("fastweights.ops.linear.multiprocessors", lambda _: 2)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def inputs(rule: str, size: tuple[int, ...], normalize: bool) -> dict[str, Any]:
    """Gate logits reach far below the floor; features are positive where they are divided by their sum, which for one
    query vanishes."""
    B, S, G, d, m = size
    widths = {"m": (m,), "d": (d,), "1": ()}
    q, k, state = numbers(B, G * S, m, seed=1), numbers(B, S, m, seed=2), numbers(B, S, d + normalize, m, seed=3)
    if normalize:
        q, k, state = q.abs() + 0.1, k.abs(), state.abs() + 0.1
        q[0, 0] = 0
    gates = [numbers(B, S, *widths[w], seed=5 + i, scale=8) for i, w in enumerate(RULES[rule].gates.values())]
    return dict(state=state, q=q, k=k / m**0.5, v=numbers(B, S, d, seed=4), gates=gates)


def truth(rule: str, x: dict[str, Any], normalize: bool) -> tuple[Tensor, Tensor]:
    q, k, v, *gates = (tensor[:, None].double() for tensor in (x["q"], x["k"], x["v"], *x["gates"]))
    state, backend = x["state"].double(), "loop"
    y, state = ops.apply(rule, q, k, v, tuple(gates), state, normalize, backend=backend)
    return y[:, 0], state


def run(way: str, rule: str, x: dict[str, Any], normalize: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and state; the output was not a number before."""
    device = DEVICE if way == "kernel" else "cpu"
    q, k, v, *gates = (tensor.to(device) for tensor in (x["q"], x["k"], x["v"], *x["gates"]))
    state = x["state"].to(device).clone()
    address = state.data_ptr()
    if way == "kernel":
        y = torch.full((v.shape[0], q.shape[1], v.shape[2]), math.nan, dtype=v.dtype, device=device)
        step_kernel(rule, state, q, k, v, gates, y, normalize, **options)
    else:
        y = step_torch(rule, state, q, k, v, gates, normalize)
    assert state.data_ptr() == address
    return y.cpu(), state.cpu()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_step_is_the_rules_step(case: tuple[str, bool], size: tuple[int, ...], way: str) -> None:
    rule, normalize = case
    x = inputs(rule, size, normalize)
    y, state = run(way, rule, x, normalize)
    expected, expected_state = truth(rule, x, normalize)
    assert_close("y", y, expected, 2e-6)
    assert_close("state", state, expected_state, 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_views_of_a_packed_buffer_in_bfloat16(rule: str, way: str) -> None:
    """As the stepper has them: rows far apart, and a feature map's output that is laid out in another order."""
    x = inputs(rule, (3, 2, 2, 6, 5), False)
    for name in ("q", "k", "v"):
        x[name] = torch.cat([x[name].flatten(1), numbers(3, 7)], dim=1).bfloat16()[:, :-7].view_as(x[name])
    x["gates"] = [gate.bfloat16() for gate in x["gates"]]
    expected, expected_state = truth(rule, x, False)
    x["k"] = x["k"].transpose(0, 1).contiguous().transpose(0, 1)
    y, state = run(way, rule, x, False)
    assert y.dtype == torch.bfloat16
    assert_close("y", y.float(), expected, 4e-3)
    assert_close("state", state, expected_state, 1e-6)


@pytest.mark.parametrize("way", WAYS[1:])
def test_a_kernel_turns_queries_and_keys_and_scales_keys(way: str) -> None:
    from fastweights.layer import rotate

    x = inputs("decay", (2, 3, 2, 5, 9), False)
    cos, sin, scale = numbers(2, 8, seed=9), numbers(2, 8, seed=10), numbers(3, 9, seed=11)
    planes = torch.tensor([[0, 5, 6], [1, 2, 3], [7, 0, 1]])
    rotary = Rotary(*(tensor.to(DEVICE) for tensor in (cos, sin, planes)))
    y, state = run(way, "decay", x, False, rotary=rotary, key_scale=scale.to(DEVICE))
    for name in ("q", "k"):
        x[name] = rotate(x[name][:, None], cos[:, None], sin[:, None], planes)[:, 0]
    x["k"] = x["k"] * scale
    expected, expected_state = truth("decay", x, False)
    assert_close("y", y, expected, 2e-6)
    assert_close("state", state, expected_state, 1e-6)


def test_without_a_gpu_a_step_is_torchs() -> None:
    x = inputs("delta", (2, 3, 2, 5, 7), True)
    states = [x["state"].clone(), x["state"].clone()]
    found, expected = (
        way("delta", state, x["q"], x["k"], x["v"], x["gates"], normalize=True)
        for way, state in zip((step, step_torch), states, strict=True)
    )
    assert torch.equal(found, expected) and torch.equal(*states)
    assert not has_kernels(torch.device("cpu"), torch.float32)
    assert not has_kernels(torch.device("cuda"), torch.float64)


FUNCTIONS: dict[str, Any] = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
# activation, gated, norm, bias, added to what is there
LINEARS = [
    ("none", False, "rms", True, False),
    ("none", False, "none", False, True),
    ("none", False, "none", True, True),
    ("silu", True, "rms", False, False),
    ("gelu_tanh", True, "rms", True, False),
    ("gelu_tanh", False, "layer", True, False),
    ("gelu", False, "layer", False, False),
    ("relu", False, "layer", True, False),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 2, 21])
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_a_linear_layer_and_what_stands_around_it(case: tuple[Any, ...], rows: int, way: str) -> None:
    activation, gated, norm_kind, has_bias, add = case
    n, k, device = 37, 150, DEVICE if way == "kernel" else "cpu"
    weight = numbers(n * (2 if gated else 1), k, seed=1, scale=k**-0.5).to(device)
    bias = numbers(len(weight), seed=2).to(device) if has_bias else None
    norm_bias = numbers(k, seed=4).to(device) if norm_kind == "layer" else None
    norm = Norm(numbers(k, seed=3).to(device), norm_bias, 1e-5, norm_kind == "layer") if norm_kind != "none" else None
    x = numbers(rows, k, seed=5).to(device) + 0.5
    before = numbers(rows, n, seed=6).to(device)
    out = before.clone() if add else torch.full_like(before, math.nan)
    found = Linear(weight, bias, norm, activation, gated, kernel=way == "kernel")(x, out, add)

    wide = x.double()
    if norm is not None:
        wide = wide - wide.mean(-1, keepdim=True) if norm.centred else wide
        wide = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
        wide = wide if norm_bias is None else wide + norm_bias.double()
    expected = wide @ weight.double().T + (0 if bias is None else bias.double())
    halves = expected.chunk(2, dim=-1) if gated else (expected, torch.ones_like(expected))
    expected = FUNCTIONS[activation](halves[0]) * halves[1] + (before.double() if add else 0)
    assert_close("out", found.cpu(), expected.cpu(), 2e-6)
    if add:
        assert found.data_ptr() == out.data_ptr()


@needs_triton
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 256])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (576, 1536), (2016, 576), (49152, 576), (4096, 14336)])
@pytest.mark.parametrize(("processors", "shared"), [(132, 227 * 1024), (58, 99 * 1024)], ids=["H100", "L4"])
def test_tiles_are_what_tensor_cores_and_memory_allow(
    rows: int, columns: int, k: int, processors: int, shared: int
) -> None:
    for gated, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        row_tile, column_tile, block_k, warps = tiles(rows, columns, k, gated, dtype, processors, shared)
        if rows == 1:
            assert row_tile == 1 and block_k >= k
            assert block_k * column_tile * (2 if gated else 1) <= max(8192, 2 * block_k)
        else:
            assert min(row_tile, column_tile, block_k) >= 16 and row_tile < 2 * max(rows, 16)
            needed = 4 * block_k * (row_tile + column_tile * (2 if gated else 1)) * dtype.itemsize
            assert needed <= 0.75 * shared, "four stages of a tile in the shared memory of one program"
        assert warps in (4, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 21])
@pytest.mark.parametrize("way", WAYS[1:])
def test_a_linear_kernel_in_half_precision(way: str, rows: int, dtype: torch.dtype) -> None:
    norm = Norm(numbers(40, seed=1).to(DEVICE, dtype), None, 1e-6, centred=False)
    weight, x = numbers(2 * 18, 40, seed=2, scale=0.2).to(DEVICE, dtype), numbers(rows, 40, seed=3).to(DEVICE, dtype)
    found = Linear(weight, None, norm, "silu", gated=True, kernel=True)(x, torch.full_like(x[:, :18], math.nan))
    gate, y = (F.rms_norm(x.double(), (40,), norm.weight.double(), 1e-6) @ weight.double().T).chunk(2, dim=-1)
    assert_close("out", found.cpu(), (F.silu(gate) * y).cpu(), 1e-2 if dtype == torch.bfloat16 else 2e-3)


STEPPERS = [
    ("llama", 1, dict(rule="decay", m=6)),
    ("llama", 2, dict(rule="decay", m=6)),
    ("llama", 1, dict(rule="decay", m=1, gate_init="log", window=3, state_heads="kv")),
    ("gpt2", 1, dict(rule="delta", m=6)),
    ("gpt2", 2, dict(rule="delta", m=6)),
    ("qwen3", 1, dict(rule="gated", m=4, normalize="attention", output_norm=True)),
    ("gemma2", 1, dict(rule="decay", m=6)),
    ("gpt_neox", 1, dict(rule="decay", m=4)),
]


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize(("family", "batch", "settings"), STEPPERS, ids=str)
def test_a_kernel_stepper_is_the_model(family: str, batch: int, settings: dict[str, Any], way: str) -> None:
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**settings)).eval().to(DEVICE)
    stepper, text = Stepper(model, batch, kernels=True), tokens(batch, 6).to(DEVICE)
    with torch.no_grad():
        for slot in range(batch):
            stepper.fill(slot, model(text[slot : slot + 1, :4], use_cache=True).past_key_values)
        for t in (4, 5):
            stepper.tokens.copy_(text[:, t])
            assert_close("logits", stepper.step().cpu(), model(text[:, : t + 1]).logits[:, -1].cpu(), 2e-5)
