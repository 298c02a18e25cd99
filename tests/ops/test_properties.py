"""Properties that hold for every shape and every gate: the chunked form is the loop, and nothing overflows.
Then what each feature map promises. The examples are the same in every run (derandomize)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.relative_error import assert_all_close, assert_close, op_inputs, run_op, run_with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastweights.config import FEATURE_MAPS, POSITIVE_MAPS
from fastweights.rules import MATRIX_RULES, RULES
from fastweights.rules.base import MIN_GATE_LOGIT
from fastweights.rules.feature_maps import MAPS, SMALLEST_SUM, input_width, sum_normalize, unit_normalize

EXAMPLES = 25
HIGH_GATE_LOGIT = 20.0
repeatable = settings(deadline=None, max_examples=EXAMPLES, derandomize=True, database=None)

every_rule = pytest.mark.parametrize("rule", RULES)
gated_rule = pytest.mark.parametrize("rule", [name for name in MATRIX_RULES if RULES[name].gates])
every_map = pytest.mark.parametrize("name", FEATURE_MAPS)

seeds = st.integers(0, 2**16)
shapes = st.fixed_dictionaries(
    {"T": st.integers(1, 130), "m": st.integers(1, 70), "d": st.integers(1, 70), "H": st.integers(1, 3)}
)
small_shapes = st.fixed_dictionaries({"T": st.integers(1, 80), "m": st.integers(1, 12), "d": st.integers(1, 12)})


def check(rule: str, inputs: dict[str, Tensor]) -> None:
    """Chunked in float64 with every gradient, and in float32 (gradients finite), against the loop in float64.
    All inputs are of size one: a state of one number that is near zero by accident is measured against that."""
    expected = run_with_gradients(rule, inputs, backend="loop")
    assert_all_close(run_with_gradients(rule, inputs, backend="chunked"), expected, 1e-6)
    in_float32 = run_with_gradients(rule, {name: x.float() for name, x in inputs.items()}, backend="chunked")
    for name, found in in_float32.items():
        assert torch.isfinite(found).all(), f"{name} in float32 is not finite"
    for name in ("y", "state"):
        assert_close(f"{name} in float32", in_float32[name], expected[name], 1e-5, least=0.1)


@every_rule
@repeatable
@given(shape=shapes, seed=seeds)
def test_chunked_matches_loop_for_any_shape(rule: str, shape: dict[str, int], seed: int) -> None:
    check(rule, op_inputs(rule, B=1, **shape, dtype=torch.float64, seed=seed))


def mixed_gates(inputs: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """A share of the gates wide open, the others shut, side by side in one tensor."""
    generator = torch.Generator().manual_seed(seed)
    mixed = dict(inputs)
    for name, x in inputs.items():
        if name.endswith("_logit"):
            is_open = torch.rand(x.shape, generator=generator) < share
            mixed[name] = torch.where(is_open, HIGH_GATE_LOGIT, MIN_GATE_LOGIT).to(x.dtype)
    return mixed


@gated_rule
@repeatable
@given(shape=small_shapes, share=st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]), seed=seeds)
def test_chunked_matches_loop_with_closed_and_open_gates(
    rule: str, shape: dict[str, int], share: float, seed: int
) -> None:
    check(rule, mixed_gates(op_inputs(rule, **shape, dtype=torch.float64, seed=seed), share, seed))


@gated_rule
@repeatable
@given(shape=small_shapes, ends=st.tuples(*[st.floats(MIN_GATE_LOGIT, HIGH_GATE_LOGIT)] * 2), seed=seeds)
def test_chunked_matches_loop_for_any_range_of_gates(
    rule: str, shape: dict[str, int], ends: tuple[float, float], seed: int
) -> None:
    check(rule, op_inputs(rule, **shape, dtype=torch.float64, low=min(ends), high=max(ends), seed=seed))


@gated_rule
@pytest.mark.parametrize("logit", [MIN_GATE_LOGIT, HIGH_GATE_LOGIT])
def test_chunked_matches_loop_for_long_sequence_with_saturated_gates(rule: str, logit: float) -> None:
    inputs = op_inputs(rule, B=1, T=700, d=16, m=8, dtype=torch.float64, low=logit, high=logit)
    check(rule, inputs)


@every_rule
@repeatable
@given(T=st.integers(2, 130), seed=seeds, data=st.data())
def test_sequence_split_anywhere_matches_whole(rule: str, T: int, seed: int, data: st.DataObject) -> None:
    split = data.draw(st.integers(1, T - 1))
    inputs = op_inputs(rule, T=T, dtype=torch.float64, seed=seed)
    y, state = run_op(rule, inputs)
    carried, chunks = inputs.pop("state"), []
    for start, stop in ((0, split), (split, T)):
        out, carried = run_op(rule, {name: x[:, start:stop] for name, x in inputs.items()} | {"state": carried})
        chunks.append(out)
    assert_close("y", torch.cat(chunks, dim=1), y, 1e-12)
    assert_close("state", carried, state, 1e-12)


# --- feature maps


def drawn_map(name: str, heads: int, m: int, d: int, seed: int = 0) -> torch.nn.Module:
    feature_map = MAPS[name](heads, m, d).requires_grad_(False)
    feature_map.draw(torch.Generator().manual_seed(seed))
    return feature_map


map_shapes = st.fixed_dictionaries({"heads": st.integers(1, 3), "m": st.integers(2, 20).map(lambda n: 2 * n)})


@every_map
@repeatable
@given(shape=map_shapes, d=st.integers(1, 16), groups=st.integers(1, 3), scale=st.floats(0.01, 4), seed=seeds)
def test_feature_maps_return_m_finite_features(
    name: str, shape: dict[str, int], d: int, groups: int, scale: float, seed: int
) -> None:
    """m features for queries and keys alike; none below zero where the map is positive."""
    width = input_width(name, shape["m"], d)
    x = scale * torch.randn(2, 3, groups * shape["heads"], width, generator=torch.Generator().manual_seed(seed))
    features = drawn_map(name, **shape, d=d, seed=seed)(x)
    assert features.shape == (*x.shape[:3], shape["m"])
    assert torch.isfinite(features).all()
    assert name not in POSITIVE_MAPS or (features >= 0).all()


@every_map
def test_queries_of_a_group_share_the_map_of_their_state(name: str) -> None:
    """Query heads h*G to h*G+G-1 go through the map of state h, as its keys do."""
    heads, groups, m, d = 2, 3, 8, 5
    feature_map = drawn_map(name, heads, m, d)
    for parameter in feature_map.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    keys = torch.randn(1, 4, heads, input_width(name, m, d), generator=torch.Generator().manual_seed(0))
    queries = keys.repeat_interleave(groups, dim=2)
    assert_close("features", feature_map(queries), feature_map(keys).repeat_interleave(groups, dim=2), 1e-6)


@repeatable
@given(r=st.integers(2, 12), seed=seeds)
def test_dpfp_matches_its_formula(r: int, seed: int) -> None:
    """phi_i = relu([x, -x])_i relu([x, -x])_{i-1}, indices going around."""
    x = torch.randn(1, 1, 1, r, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    halves = [max(float(n), 0.0) for n in [*x.flatten(), *-x.flatten()]]
    expected = [halves[i] * halves[i - 1] for i in range(2 * r)]
    assert_close("features", MAPS["dpfp"](1, 2 * r, 1)(x).flatten(), np.array(expected), 1e-12)


def test_relu_matches_its_formula() -> None:
    feature_map = drawn_map("relu", heads=2, m=3, d=4)
    torch.nn.init.normal_(feature_map.bias, generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, 2, 2, 4, generator=torch.Generator().manual_seed(0))
    for head in range(2):
        expected = torch.relu(x[0, 0, head] @ feature_map.weight[head].T + feature_map.bias[head])
        assert_close(f"features of head {head}", feature_map(x)[0, 0, head], expected, 1e-6)


def test_elu_matches_its_formula() -> None:
    x = torch.linspace(-3, 3, 7)
    expected = [n + 1 if n > 0 else math.exp(n) for n in x.tolist()]
    assert_close("features", MAPS["elu"](1, 7, 7)(x), expected, 1e-6)


@repeatable
@given(seed=seeds, d=st.integers(1, 5))
def test_favor_estimates_exp_of_dot_product_without_bias(seed: int, d: int) -> None:
    """phi(q) . phi(k) is exp(q . k) within the sampling error of many blocks of orthogonal directions."""
    blocks = 4000
    q, k = 0.5 * torch.randn(2, 1, 1, 1, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    feature_map = drawn_map("favor+", heads=1, m=blocks * d, d=d, seed=seed)
    estimates = (feature_map(q) * feature_map(k)).view(blocks, d).sum(-1) * blocks
    error = float(estimates.mean() - (q * k).sum().exp())
    assert abs(error) <= 5 * float(estimates.std()) / blocks**0.5


@repeatable
@given(seed=seeds, d=st.integers(2, 8))
def test_favor_directions_are_orthogonal(seed: int, d: int) -> None:
    directions = drawn_map("favor+", heads=1, m=d, d=d, seed=seed).directions.double()
    unit = directions / directions.norm(dim=-1, keepdim=True)
    assert_close("cosines", unit @ unit.T, torch.eye(d), 1e-5)


def test_favor_in_low_precision_is_computed_in_float32() -> None:
    """Exponents rounded to bfloat16 would be off by several per cent."""
    x = torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    feature_map = drawn_map("favor+", heads=1, m=16, d=8)
    assert_close("features", feature_map(x), feature_map(x.double()), 1e-5)


@repeatable
@given(seed=seeds, d=st.integers(1, 6))
def test_rfa_approximates_a_gaussian_kernel(seed: int, d: int) -> None:
    """phi(q) . phi(k) is exp(-|q - k|^2 / 2) of the unit vectors, within sampling error; phi(x) . phi(x) is 1."""
    m = 40_000
    q, k = torch.nn.functional.normalize(
        torch.randn(2, 1, 1, 1, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1
    )
    feature_map = drawn_map("rfa", heads=1, m=m, d=d, seed=seed)
    fq, fk = (feature_map(3 * x).flatten() for x in (q, k))
    assert abs(float(fq @ fk) - math.exp(-float((q - k).square().sum()) / 2)) <= 5 * (m / 2) ** -0.5
    assert_close("length", fq @ fq, 1.0, 1e-5)


@repeatable
@given(m=st.integers(1, 40), scale=st.floats(1e-3, 1e3), seed=seeds)
def test_sum_normalize_sums_to_one(m: int, scale: float, seed: int) -> None:
    x = scale * (torch.rand(2, 3, 2, m, generator=torch.Generator().manual_seed(seed)) + 0.01)
    normalized = sum_normalize(x)
    assert_close("sums", normalized.sum(-1), torch.ones(2, 3, 2), 1e-6)
    assert_close("direction", normalized * x.sum(-1, keepdim=True), x, 1e-6)


@repeatable
@given(m=st.integers(1, 40), scale=st.floats(1, 1e3), seed=seeds)
def test_unit_normalize_keeps_the_direction(m: int, scale: float, seed: int) -> None:
    x = torch.randn(2, 3, 2, m, generator=torch.Generator().manual_seed(seed))
    x = scale * (x + x.sign())  # not near zero
    normalized = unit_normalize(x)
    assert_close("lengths", normalized.norm(dim=-1), torch.ones(2, 3, 2), 1e-6)
    assert_close("direction", normalized * x.norm(dim=-1, keepdim=True), x, 1e-6)


def test_unit_normalize_in_low_precision_is_computed_in_float32() -> None:
    """The squares of such numbers leave float16's range."""
    x = torch.tensor([300.0, 400.0], dtype=torch.float16)
    assert_close("direction", unit_normalize(x), [0.6, 0.8], 1e-3)
    assert unit_normalize(x).dtype == torch.float16


def test_unit_normalize_of_zero_is_zero_with_finite_gradient() -> None:
    x = torch.zeros(1, 1, 1, 4, requires_grad=True)
    y = unit_normalize(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_sum_normalize_of_zero_is_zero() -> None:
    x = torch.zeros(1, 1, 1, 4, requires_grad=True)
    y = sum_normalize(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert x.grad is not None
    assert_close("gradient", x.grad, torch.full_like(x, 1 / SMALLEST_SUM), 1e-6)
