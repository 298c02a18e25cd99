"""Rules with slots: the loop against their definition as sums over all tokens, the operations against the loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.relative_error import assert_all_close, assert_close, op_flags, op_inputs, run_op, run_with_gradients
from torch import Tensor

from fastweights import ops
from fastweights.config import RULES_WITHOUT_GATES
from fastweights.config import SLOT_RULES as CONFIGURED
from fastweights.ops.step import step_torch
from fastweights.rules import RULES
from fastweights.rules.abc import MAX_CONTROL
from fastweights.rules.base import MIN_GATE

SLOT_RULES = [name for name, rule in RULES.items() if rule.slots]
FLAGS = ("none", "mask", "reset", "mask+reset")
every_rule = pytest.mark.parametrize("rule", SLOT_RULES)


def defined(rule: str, inputs: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """y and the final state by definition: each slot is a sum over all tokens so far, weighted anew for every token.
    For abc the weights are a softmax over time, in which the initial state counts as one more token."""
    arrays = {name: x.numpy() for name, x in inputs.items()}
    q, k, v, gate, start = arrays.values()
    batch, length, heads, r = k.shape
    d, groups = v.shape[3], q.shape[2] // heads
    y, end = np.zeros((*q.shape[:3], d)), np.zeros_like(start)
    for b, h, t in np.ndindex(batch, heads, length):
        content = np.concatenate([start[b, h, None, :-1], np.zeros((t + 1, d + r, gate.shape[3]))])  # [t+2,d+r,m]
        content[1:] = np.concatenate([v[b, : t + 1, h], k[b, : t + 1, h]], axis=1)[..., None]
        if rule == "abc":
            logits = np.concatenate([np.log(start[b, h, None, -1]), gate[b, : t + 1, h]])
            weights = np.exp(logits - logits.max(0))
            weights, total = weights / weights.sum(0), np.exp(logits).sum(0)
        else:
            weights, total = np.concatenate([np.ones((1, gate.shape[3])), gate[b, : t + 1, h]]), start[b, h, -1] + t + 1
        slots = (weights[:, None] * content).sum(0)
        for query in range(h * groups, (h + 1) * groups):
            products = np.exp(q[b, t, query] @ slots[d:])
            y[b, t, query] = slots[:d] @ (products / products.sum())
        end[b, h] = np.concatenate([slots, total[None]])
    return y, end


@every_rule
@pytest.mark.parametrize("groups", [1, 3])
def test_loop_matches_the_definition(rule: str, groups: int) -> None:
    inputs = op_inputs(rule, T=12, dtype=torch.float64, groups=groups)
    y, state = run_op(rule, inputs, backend="loop")
    expected_y, expected_state = defined(rule, inputs)
    assert_close("y", y, expected_y, 1e-12)
    assert_close("slots", state[:, :, :-1], expected_state[:, :, :-1], 1e-12)
    assert_close("totals", state[:, :, -1], expected_state[:, :, -1], 1e-12)


@every_rule
@pytest.mark.parametrize(("T", "groups", "state"), [(1, 1, True), (16, 3, False), (63, 1, False), (100, 3, True)])
@pytest.mark.parametrize("kind", FLAGS)
def test_operations_match_the_loop(rule: str, T: int, groups: int, state: bool, kind: str) -> None:
    inputs = op_inputs(rule, T=T, dtype=torch.float64, groups=groups, state=state, seed=T)
    flags = op_flags(kind, 2, T, seed=T)
    expected = run_with_gradients(rule, inputs, backend="loop", **flags)
    assert_all_close(run_with_gradients(rule, inputs, backend="chunked", **flags), expected, 1e-6)
    in_float32 = run_with_gradients(rule, {name: x.float() for name, x in inputs.items()}, backend="chunked", **flags)
    for name in ("y", "state", "totals"):
        assert_close(f"{name} in float32", in_float32[name], expected[name], 1e-5)


@pytest.mark.parametrize("backend", ["loop", "chunked"])
def test_first_token_of_an_empty_memory_is_written_completely(backend: str) -> None:
    inputs = op_inputs("abc", T=6, state=False)
    reset = torch.zeros(2, 6, dtype=torch.bool)
    reset[:, 3] = True
    y, _ = run_op("abc", inputs, reset=reset, backend=backend)
    for t in (0, 3):
        assert_close(f"y of token {t}", y[:, t], inputs["v"][:, t], 1e-6)


@pytest.mark.parametrize("backend", ["loop", "chunked"])
def test_gradient_of_an_empty_initial_state_is_finite(backend: str) -> None:
    """The logarithm of its totals is not."""
    inputs = op_inputs("abc", T=20)
    inputs["state"] = torch.zeros_like(inputs["state"])
    for name, x in run_with_gradients("abc", inputs, backend=backend).items():
        assert torch.isfinite(x).all(), name


@pytest.mark.parametrize("backend", ["loop", "chunked"])
def test_abc_retains_at_least_the_smallest_gate(backend: str) -> None:
    inputs = op_inputs("abc", T=1, dtype=torch.float64, low=MAX_CONTROL, high=MAX_CONTROL)
    start = inputs["state"]
    _, state = run_op("abc", inputs, backend=backend)
    written = torch.cat([inputs["v"][:, 0], inputs["k"][:, 0]], dim=-1)[..., None]
    assert_close("slots", state[:, :, :-1], MIN_GATE * start[:, :, :-1] + written, 1e-12)


@pytest.mark.parametrize("backend", ["loop", "chunked"])
@pytest.mark.parametrize("control", [-1e4, 1e4])
def test_extreme_controls_stay_finite_in_float32(control: float, backend: str) -> None:
    """Beyond the limit a control has no gradient."""
    inputs = op_inputs("abc", T=150, seed=2)
    inputs["s_logit"][:, 40:90] = control
    results = run_with_gradients("abc", inputs, backend=backend)
    for name, x in results.items():
        assert torch.isfinite(x).all(), name
    assert (results["gradient of s_logit"][:, 40:90] == 0).all()
    exact = run_with_gradients("abc", {name: x.double() for name, x in inputs.items()}, backend="loop")
    assert_close("y", results["y"], exact["y"], 1e-5)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_in_place_matches_the_loop(rule: str, dtype: torch.dtype) -> None:
    inputs = op_inputs(rule, T=9, groups=3, dtype=dtype)
    state = inputs.pop("state").float()
    expected, end = run_op(rule, inputs | {"state": state}, backend="loop")
    address, found = state.data_ptr(), []
    for q, k, v, gate in zip(*(x.unbind(1) for x in inputs.values()), strict=True):
        found.append(step_torch(rule, state, q, k, v, [gate]))
    assert state.data_ptr() == address
    assert_close("y", torch.stack(found, dim=1), expected, 1e-6)
    assert_close("slots", state[:, :, :-1], end[:, :, :-1], 1e-6)
    assert_close("totals", state[:, :, -1], end[:, :, -1], 1e-6)


WRONG: list[tuple[str, str, Any]] = [
    ("abc", "q", (2, 20, 2, 5)),
    ("abc", "s_logit", (2, 20, 1, 5)),
    ("abc", "s_logit", (2, 20, 5)),
    ("abc", "s_logit", (2, 20, 2, 0)),
    ("abc", "state", (2, 2, 6, 5)),
    ("linformer", "weight", (2, 19, 2, 5)),
    ("linformer", "state", (2, 2, 14, 6)),
]


@pytest.mark.parametrize(("rule", "argument", "shape"), WRONG)
def test_error_for_wrong_shape_names_the_argument(rule: str, argument: str, shape: tuple[int, ...]) -> None:
    inputs = op_inputs(rule) | {argument: torch.zeros(shape)}
    with pytest.raises(ValueError, match=rf"{rule}: {argument} must be .*found.*{list(shape)}".replace("[", r"\[")):
        run_op(rule, inputs)


def test_missing_control_is_an_error() -> None:
    q, k, v, _ = op_inputs("abc", state=False).values()
    with pytest.raises(ValueError, match=r"abc: s_logit must be .* found None"):
        ops.apply("abc", q, k, v, (None,))


def test_config_knows_the_rules_with_slots() -> None:
    """The config cannot read it from the rules, which need torch."""
    assert list(CONFIGURED) == SLOT_RULES
    assert all(RULES[name].by_position == (name in RULES_WITHOUT_GATES) for name in SLOT_RULES)
