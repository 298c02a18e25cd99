"""One token of a rule in place, and linear layers with what stands around them: torch's way and the Triton kernels,
against float64. Where there is no GPU, Triton's interpreter runs the kernels (conftest)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.decode_kernels import DEVICE, kernels, layer_case, needs_triton, randn
from helpers.gpu_compilation import run_compiling
from helpers.relative_error import MATRIX_CASES, assert_close, case_name
from helpers.tiny import depend_on_input, pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights import ops
from fastweights.decode.device_sampler import Sampler, SamplerMode
from fastweights.decode.model import DecodeModel
from fastweights.ops.linear import DeviceLimits, choose_tile
from fastweights.ops.step import Rotary, has_kernels, step, step_kernel, step_torch
from fastweights.rules import MATRIX_RULES, RULES
from fastweights.rules.feature_maps import unit_normalize

WAYS = ["torch", pytest.param("kernel", marks=kernels)]
# B, S, G, d, m: odd ones, single ones, ones wider than a program's slice
SIZES = [(2, 3, 2, 5, 7), (1, 1, 1, 1, 1), (3, 2, 1, 70, 3), (1, 2, 3, 16, 33), (2, 1, 1, 130, 128)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one by one: large tiles, as if there were few multiprocessors."""
    if DEVICE == "cpu":
        monkeypatch.setattr("fastweights.ops.linear.multiprocessors", lambda _: 2)


def inputs(rule: str, size: tuple[int, ...], normalize: bool) -> dict[str, Any]:
    """Gate logits reach far below the floor; features are positive where they are divided by their sum, which for one
    query vanishes."""
    B, S, G, d, m = size
    widths = {"m": (m,), "d": (d,), "1": ()}
    q, k, state = (
        randn(B, G * S, m, seed=1),
        randn(B, S, m, seed=2),
        randn(B, S, d + normalize, m, seed=3),
    )
    if normalize:
        q, k, state = q.abs() + 0.1, k.abs(), state.abs() + 0.1
        q[0, 0] = 0
    gates = [randn(B, S, *widths[w], seed=5 + i, scale=8) for i, w in enumerate(RULES[rule].gates.values())]
    return dict(state=state, q=q, k=k / m**0.5, v=randn(B, S, d, seed=4), gates=gates)


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
@pytest.mark.parametrize("case", MATRIX_CASES, ids=case_name)
def test_step_matches_the_rule(case: tuple[str, bool], size: tuple[int, ...], way: str) -> None:
    rule, normalize = case
    x = inputs(rule, size, normalize)
    y, state = run(way, rule, x, normalize)
    expected, expected_state = truth(rule, x, normalize)
    assert_close("y", y, expected, 2e-6)
    assert_close("state", state, expected_state, 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_step_on_views_of_packed_bfloat16_buffer_matches_the_rule(rule: str, way: str) -> None:
    """As the decode model has them: rows far apart, and a feature map's output that is laid out in another order."""
    x = inputs(rule, (3, 2, 2, 6, 5), False)
    for name in ("q", "k", "v"):
        x[name] = torch.cat([x[name].flatten(1), randn(3, 7)], dim=1).bfloat16()[:, :-7].view_as(x[name])
    x["gates"] = [gate.bfloat16() for gate in x["gates"]]
    expected, expected_state = truth(rule, x, False)
    x["k"] = x["k"].transpose(0, 1).contiguous().transpose(0, 1)
    y, state = run(way, rule, x, False)
    assert y.dtype == torch.bfloat16
    assert_close("y", y.float(), expected, 4e-3)
    assert_close("state", state, expected_state, 1e-6)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("unit", [False, True])
def test_step_kernel_applies_rope_unit_length_and_key_scale(way: str, unit: bool) -> None:
    from fastweights.modeling.layer import apply_rotary

    x = inputs("decay", (2, 3, 2, 5, 9), False)
    cos, sin, scale = randn(2, 8, seed=9), randn(2, 8, seed=10), randn(3, 9, seed=11)
    pairs = torch.tensor([[0, 5, 6], [1, 2, 3], [7, 0, 1]])
    rotary = Rotary(*(tensor.to(DEVICE) for tensor in (cos, sin, pairs)))
    y, state = run(way, "decay", x, False, rotary=rotary, key_scale=scale.to(DEVICE), unit=unit)
    for name in ("q", "k"):
        x[name] = apply_rotary(x[name][:, None], cos[:, None], sin[:, None], pairs)[:, 0]
        x[name] = unit_normalize(x[name]) if unit else x[name]
    x["k"] = x["k"] * scale
    expected, expected_state = truth("decay", x, False)
    assert_close("y", y, expected, 2e-6)
    assert_close("state", state, expected_state, 1e-6)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("rule", MATRIX_RULES)
def test_step_kernel_writes_one_key_and_value_to_several_states(rule: str, way: str) -> None:
    x = inputs(rule, (2, 6, 2, 5, 7), False)
    few = {name: x[name][:, ::3] for name in ("k", "v")}
    pairs, cos, sin = torch.tensor([[0, 3], [1, 2]]), randn(2, 4, seed=9), randn(2, 4, seed=10)
    y, state = run(way, rule, x | few, False, rotary=Rotary(*(t.to(DEVICE) for t in (cos, sin, pairs))))
    from fastweights.modeling.layer import apply_rotary

    repeated = {name: tensor.repeat_interleave(3, dim=1) for name, tensor in few.items()}
    x |= repeated
    for name in ("q", "k"):
        x[name] = apply_rotary(x[name][:, None], cos[:, None], sin[:, None], pairs)[:, 0]
    expected, expected_state = truth(rule, x, False)
    assert_close("y", y, expected, 2e-6)
    assert_close("state", state, expected_state, 1e-6)


def test_step_without_gpu_uses_torch() -> None:
    x = inputs("delta", (2, 3, 2, 5, 7), True)
    states = [x["state"].clone(), x["state"].clone()]
    found, expected = (
        way("delta", state, x["q"], x["k"], x["v"], x["gates"], normalize=True)
        for way, state in zip((step, step_torch), states, strict=True)
    )
    assert torch.equal(found, expected) and torch.equal(*states)
    assert not has_kernels(torch.device("cpu"), torch.float32)
    assert not has_kernels(torch.device("cuda"), torch.float64)


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
@pytest.mark.parametrize("rows", [1, 2, 21, 130])
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_fused_linear_matches_float64(case: tuple[Any, ...], rows: int, way: str) -> None:
    layer, x, out, expected = layer_case(case, rows, 37, 150, torch.float32, way)
    found = layer(x, out, case[-1])
    assert_close("out", found.cpu(), expected, 2e-6)
    if case[-1]:
        assert found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 2, 21])
def test_fused_linear_takes_columns_of_a_wider_buffer(rows: int, way: str) -> None:
    case, k = ("none", False, "none", True, False), 5
    x = torch.nn.functional.pad(randn(rows, k, seed=5), (3, 4), value=math.nan)
    x = x.to(DEVICE if way == "kernel" else "cpu")[:, 3:-4]
    layer, x, out, expected = layer_case(case, rows, 37, k, torch.float32, way, x)
    assert_close("out", layer(x, out).cpu(), expected, 2e-6)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 21, 130])
@pytest.mark.parametrize("case", LINEARS, ids=str)
def test_linear_in_half_precision_matches_float64(
    case: tuple[Any, ...], rows: int, dtype: torch.dtype, way: str
) -> None:
    """A norm's sums by the tensor cores."""
    layer, x, out, expected = layer_case(case, rows, 37, 150, dtype, way)
    assert_close("out", layer(x, out, case[-1]).cpu(), expected, 1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "k", "split"), [(2, 1024, 2), (16, 2100, 4), (21, 1537, 3), (33, 1537, 1)])
@pytest.mark.parametrize(
    "case", [case for case in LINEARS if case[2] == "none"] + [("relu", False, "none", True, False)]
)
def test_split_k_matches_float64(
    case: tuple[Any, ...],
    rows: int,
    k: int,
    split: int,
    dtype: torch.dtype,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastweights.ops.linear.multiprocessors", lambda _: 11)
    layer, x, out, expected = layer_case(case, rows, 37, k, dtype, way)
    assert choose_tile(rows, 37, k, False, False, dtype, H100._replace(processors=11)).split == split
    layer.workspace.sums.fill_(math.nan)
    again = out.clone()
    assert_close("out", layer(x, out, case[-1]).cpu(), expected, 2e-6 if dtype == torch.float32 else 1e-2)
    assert not layer.workspace.arrivals.any(), "ready for the next kernel"
    assert torch.equal(layer(x, again, case[-1]), out)


H100, L4 = DeviceLimits(132, 227 * 1024, warp_groups=True), DeviceLimits(58, 99 * 1024, warp_groups=False)


@needs_triton
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 64, 256, 1024])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (576, 1536), (2016, 576), (49152, 576), (4096, 14336)])
@pytest.mark.parametrize("chip", [H100, L4], ids=["H100", "L4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_fit_tensor_cores_and_shared_memory(
    rows: int, columns: int, k: int, chip: DeviceLimits, dtype: torch.dtype
) -> None:
    settings = [(False, False, False), *((gated, True, given) for gated in (False, True) for given in (False, True))]
    for gated, normed, given in settings:
        tile, halves = choose_tile(rows, columns, k, gated, normed, dtype, chip, given), 2 if gated else 1
        assert tile.warps in (4, 8)
        if rows == 1:
            assert tile.rows == 1 and tile.depth >= k
            assert tile.depth * tile.columns * halves <= max(8192, 2 * tile.depth)
            continue
        grouped = chip.warp_groups and tile.rows >= 64 and dtype == torch.bfloat16
        assert min(tile.rows, tile.columns, tile.depth) >= 16 and tile.rows < 2 * max(rows, 64 if grouped else 16)
        buffers = tile.stages - (not grouped)
        assert buffers >= 3
        # float16 is there as float32 once more
        width = (tile.rows + tile.columns * halves) * tile.depth
        once_more = 4 * width if dtype == torch.float16 else 0
        assert buffers * width * dtype.itemsize + once_more <= 0.97 * chip.shared
        assert tile.rows * tile.columns * halves <= (128 * 256 if grouped else 128 * 128)
        if tile.split > 1:
            programs = tile.split * -(-columns // tile.columns)
            assert rows <= tile.rows <= 32 and tile.columns <= 32 and programs <= chip.processors and not normed


@needs_triton
def test_chosen_tiles_are_those_measured_fastest() -> None:
    """Of an H200's measurements at the sizes of SmolLM2-135M (columns, inner size, gated, normed), a norm's sums
    given."""
    sizes = [(2016, 576, False, True), (576, 576, False, False), (1536, 576, True, True), (576, 1536, False, False)]
    sizes.append((49152, 576, False, True))
    fastest = {
        32: [(64, 32), (64, 16), (64, 16), (32, 32), (64, 128)],
        256: [(64, 64), (64, 32), (128, 32), (64, 32), (128, 256)],
    }
    for rows, expected in fastest.items():
        assert [choose_tile(rows, *size, torch.bfloat16, H100, sums_given=size[3])[:2] for size in sizes] == expected
    assert choose_tile(32, *sizes[3], torch.bfloat16, H100).split == 3


@needs_triton
def test_pipeline_copies_do_not_overwrite_tiles_in_use() -> None:
    """In the code that is made for a GPU that need not be there."""
    printed = run_compiling("compile_linear", "32", "256")
    lines = [line for line in printed.splitlines() if " bytes, " in line]
    assert len(lines) == 32 and sum("pending" in line for line in lines) == 30
    kinds = {kind: sum(f" {kind} " in line for line in lines) for kind in ("given", "handed on")}
    assert kinds == {"given": 10, "handed on": 6}


DECODE_MODELS = [
    ("llama", 1, dict(rule="decay", m=6)),
    ("llama", 2, dict(rule="decay", m=6)),
    ("llama", 1, dict(rule="decay", m=1, gate_init="log", window=3, state_heads="kv")),
    ("gpt2", 1, dict(rule="delta", m=6)),
    ("gpt2", 2, dict(rule="delta", m=6)),
    ("llama", 2, dict(rule="gated_delta", m=6, window=3)),
    ("qwen3", 1, dict(rule="gated_delta", m=4, state_heads="kv")),
    ("llama", 2, dict(rule="gated_delta", m=8, window=3, mix="token", projections="shared", gate_rank=3)),
    ("qwen3", 1, dict(rule="decay", m=8, gate_init="log", window=3, projections="shared", gate_rank=1)),
    ("gemma2", 2, dict(rule="add", m=8, window=3, state_heads="kv", projections="shared")),
    ("gpt2", 1, dict(rule="delta", m=5, feature_map="none", normalize="unit")),
    ("qwen3", 1, dict(rule="gated", m=4, normalize="attention", output_norm=True)),
    ("gemma2", 1, dict(rule="decay", m=6)),
    ("gpt_neox", 1, dict(rule="decay", m=4)),
    ("llama", 2, dict(rule="abc", m=5, window=3, projections="shared", state_heads="kv", gate_rank=3)),
    ("gpt2", 1, dict(rule="linformer", m=5, train_length=5)),
]


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize(("family", "batch", "settings"), DECODE_MODELS, ids=str)
def test_decode_model_with_kernels_matches_the_model(
    family: str, batch: int, settings: dict[str, Any], way: str
) -> None:
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**settings)).eval().to(DEVICE)
    depend_on_input(model)
    decoder, text = DecodeModel(model, batch, kernels=True), tokens(batch, 6).to(DEVICE)
    with torch.no_grad():
        for slot in range(batch):
            decoder.set_slot(slot, model(text[slot : slot + 1, :4], use_cache=True).past_key_values)
        for t in (4, 5):
            decoder.tokens.copy_(text[:, t])
            assert_close("logits", decoder.step().cpu(), model(text[:, : t + 1]).logits[:, -1].cpu(), 2e-5)


@pytest.mark.parametrize("way", WAYS[1:])
def test_logits_have_dtype_of_the_model(way: str) -> None:
    """As the model's own are; what is drawn is computed in float32."""
    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(m=6)).eval().to(DEVICE, torch.bfloat16)
    decoder, text = DecodeModel(model, 3, kernels=True), tokens(3, 1).to(DEVICE)
    decoder.tokens.copy_(text[:, 0])
    with torch.no_grad():
        logits, expected = decoder.step(), model(text).logits[:, -1]
    assert logits.dtype == expected.dtype == torch.bfloat16
    assert_close("logits", logits.cpu(), expected.cpu(), 3e-2)
    sampling = fw.Sampling(temperature=1.5, top_k=9, top_p=0.8, repetition_penalty=1.5)
    for mode in (SamplerMode(False, False, False), SamplerMode.of([sampling])):
        sampler = Sampler(3, logits.shape[1], logits.device)
        sampler.prepare(mode)
        tokens_chosen = []
        for scores in (logits, logits.float()):
            for slot in range(3):
                sampler.set_slot(slot, sampling, slot, text[slot])
            tokens_chosen.append(sampler.choose(scores, decoder.positions, mode))
        assert torch.equal(*tokens_chosen)
