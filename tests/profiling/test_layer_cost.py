"""The layer of Figure 1: the timed steps equal the layers that they stand for, and cached bytes are counted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.config import ConfigError
from fastweights.profiling import timing
from fastweights.profiling.layer_cost import AttentionLayer, RuleLayer, Shape, layer_cost
from fastweights.results import CostPoint, CostResult, SkippedLength
from fastweights.rules import RULES, loop
from fastweights.rules.feature_maps import sum_normalize, unit_normalize

B, H, D, M, T = 2, 3, 4, 5, 6
CPU = torch.device("cpu")


def shape(dtype: torch.dtype = torch.float64) -> Shape:
    return Shape(B, H, D, M, dtype, CPU, torch.Generator().manual_seed(1))


def tokens(length: int) -> Tensor:
    """x [B,T,H d]"""
    return torch.randn(B, length, H * D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def cost(lengths: tuple[int, ...] = (4, 8), **options: Any) -> CostResult:
    return layer_cost(lengths, **dict(batch=B, heads=H, d=D, m=M, repeats=2, progress=False) | options)


def points_of(result: CostResult, name: str) -> list[CostPoint]:
    return next(entry.points for entry in result.models if entry.name == name)


def test_static_cache_step_equals_full_attention() -> None:
    layer, x = AttentionLayer(shape(), T), tokens(T + 1)
    q, k, v = (
        part.unflatten(-1, (H, D)).transpose(1, 2) for part in F.linear(x, layer.w_in).split([H * D] * 3, dim=-1)
    )
    layer.keys[:, :, :T], layer.values[:, :, :T] = k[:, :, :T], v[:, :, :T]
    logits = q @ k.transpose(-1, -2) / D**0.5
    seen = torch.ones(T + 1, T + 1).tril().bool()
    y = logits.masked_fill(~seen, float("-inf")).softmax(-1) @ v
    expected = F.linear(y.transpose(1, 2).flatten(2), layer.w_out)[:, -1]
    torch.testing.assert_close(layer.step(x[:, -1]), expected)
    torch.testing.assert_close(layer.step(x[:, -1]), expected)  # the same place again


@pytest.mark.parametrize("rule", RULES)
def test_steps_of_a_rule_equal_its_loop(rule: str) -> None:
    layer, x = RuleLayer(shape(), rule), tokens(T)
    before = layer.state.clone()
    steps = torch.stack([layer.step(x[:, t]) for t in range(T)], dim=1)
    q, k, v, *logits = (part.unflatten(-1, (H, -1)) for part in F.linear(x, layer.w_in).split(layer.widths, dim=-1))
    if rule == "delta":
        q, k = sum_normalize(q.relu()), sum_normalize(k.relu())
    if rule == "gated_delta":
        q, k = unit_normalize(q), unit_normalize(k)
    gates = tuple(g.squeeze(-1) if width == "1" else g for g, width in zip(logits, layer.gates, strict=True))
    gates += tuple(weights[:, None].expand(-1, T, -1, -1) for weights in layer.weights)
    y, state = loop(RULES[rule], q, k, v, gates, before)
    torch.testing.assert_close(steps, F.linear(y.flatten(2), layer.w_out))
    torch.testing.assert_close(layer.state, state)


def test_bytes_of_attention_grow_and_those_of_rules_do_not() -> None:
    result = cost((4, 8, 12), rules=("delta", "decay"))
    assert [entry.name for entry in result.models] == ["attention", "delta", "decay"]
    assert [p.bytes for p in points_of(result, "attention")] == [2 * B * H * n * D * 4 for n in (4, 8, 12)]
    for rule in ("delta", "decay"):
        assert [p.bytes for p in points_of(result, rule)] == [B * H * D * M * 4] * 3
        assert len({p.peak_bytes for p in points_of(result, rule)}) == 1
    for entry in result.models:
        assert all(p.peak_bytes > p.bytes and p.seconds > 0 for p in entry.points)
    assert result.models[1].cheaper_from["bytes"] == 4


def test_peak_counts_tensors_that_exist_at_once() -> None:
    def step() -> None:
        for _ in range(3):
            first = torch.zeros(1000)
            second = first + 1
            del first, second

    assert 2 * 4000 <= timing.peak_bytes(step, None, CPU) < 2 * 4000 + 100


def test_result_records_the_shape_and_the_conditions() -> None:
    result = cost((8, 4))
    assert (result.kind, result.level, result.tokens) == ("cost", "layer", 2)
    assert (result.batch, result.heads, result.d, result.m) == (B, H, D, M)
    assert (result.dtype, result.device) == ("float32", "cpu")
    attention, decay, delta = result.models
    assert not attention.converted and decay.converted and delta.converted
    assert [p.length for p in attention.points] == [4, 8]
    assert attention.how == "eager" and attention.left_out == []
    assert set(result.cheaper_from) == {"seconds", "bytes", "peak_bytes"}


def test_contenders_are_timed_alternately_after_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for kind in (AttentionLayer, RuleLayer):
        monkeypatch.setattr(kind, "step", lambda self, x: taken.append(getattr(self, "rule", "attention")))
    monkeypatch.setattr("fastweights.profiling.layer_cost.SETTLE", 2)
    cost((4,), rules=("decay",))
    assert taken == ["attention", "decay"] + (["attention"] * 3 + ["decay"] * 3) * 2  # the peak, then two repeats


def test_inputs_are_random_and_deterministic() -> None:
    one, two = (AttentionLayer(shape(), T) for _ in range(2))
    assert all(bool((x != 0).all()) for x in (one.x, one.keys, one.values, one.w_in))
    assert torch.equal(one.keys, two.keys)
    assert bool((RuleLayer(shape(), "decay").state != 0).all())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee"), "CUDA out of memory. Tried to"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), "can't allocate memory"),
    ],
)
def test_a_length_that_does_not_fit_is_left_out(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = AttentionLayer.__init__

    def full(self: AttentionLayer, given: Shape, length: int) -> None:
        if length > 4:
            raise error
        made(self, given, length)

    monkeypatch.setattr(AttentionLayer, "__init__", full)
    result = cost((4, 8, 16))
    attention = result.models[0]
    assert [p.length for p in attention.points] == [4]
    assert [missing.length for missing in attention.left_out] == [8, 16]
    assert all("out of memory: " in m.reason and reason in m.reason for m in attention.left_out)
    assert "\n" not in attention.left_out[0].reason
    assert [p.length for p in points_of(result, "decay")] == [4, 8, 16]


def test_a_step_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: AttentionLayer, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(AttentionLayer, "step", full)
    attention = cost().models[0]
    assert attention.points == [] and attention.left_out[1] == SkippedLength(length=8, reason="out of memory: no room")


def test_cpu_memory_is_checked_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 3_000_000}))
    attention = cost((4, 100_000)).models[0]
    assert [p.length for p in attention.points] == [4]
    assert attention.left_out[0].reason == "out of memory: 9.6 MB are needed and 3.0 MB are free"


def test_errors_other_than_out_of_memory_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: AttentionLayer, x: Tensor) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(AttentionLayer, "step", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        cost()


def test_invalid_arguments_are_refused_by_name() -> None:
    for lengths in ((), (0, 4)):
        with pytest.raises(ConfigError, match="lengths must be"):
            cost(lengths)
    for name in ("batch", "heads", "d", "m", "repeats"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, found 0"):
            cost(**{name: 0})
    with pytest.raises(ConfigError, match="rule 'dceay' is not known; choose from add, gated, delta, decay"):
        cost(rules=("dceay",))


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> timing.Conditions:
    """What only a GPU can do does nothing; steps run once where they would be captured."""
    monkeypatch.setattr(timing, "_warm_up", lambda step: step())
    monkeypatch.setattr(timing, "_captured", lambda step: step)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return timing.Conditions(torch.device("cuda"), repeats=1)


def test_step_that_cannot_be_captured_runs_eagerly(
    no_gpu_needed: timing.Conditions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> None: ...

    contender = timing.Contender(step, 0, attends=False)
    assert timing.ready(contender, no_gpu_needed) == timing.Runner(step, "CUDA graph")

    def refused(_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(timing, "_captured", refused)
    runner = timing.ready(contender, no_gpu_needed)
    reason = "operation not permitted when stream is capturing"
    assert (runner.run, runner.how) == (step, f"eager: not captured in a CUDA graph ({reason})")


def test_attention_gets_its_fastest_kernel(no_gpu_needed: timing.Conditions, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> str:
        allowed = [kernel for kernel, enabled in ENABLED.items() if enabled()]
        tried.append(allowed)
        if allowed == ["cudnn"]:
            raise RuntimeError("No available kernel")
        return allowed[0]

    tried: list[list[str]] = []
    seconds = {"flash": 3.0, "efficient": 1.0, "math": 2.0}
    monkeypatch.setattr(timing, "_captured", lambda step: functools.partial(seconds.get, step()))
    monkeypatch.setattr(timing, "_seconds", lambda run, conditions: run())
    runner = timing.ready(timing.Contender(step, 0, attends=True), no_gpu_needed)
    assert (runner.kernel, runner.run()) == (timing.SDPBackend.EFFICIENT_ATTENTION, 1.0)
    assert {tuple(kernels) for kernels in tried} == {("flash",), ("cudnn",), ("efficient",), ("math",)}


ENABLED = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
