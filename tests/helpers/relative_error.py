"""What the tests of the operations share: random inputs, one run with all its gradients, and one relative error.

Shapes: q [B,T,G*H,m]   k [B,T,H,m]   v [B,T,H,d]   gate logits [B,T,H,m], [B,T,H,d] or [B,T,H]   state [B,H,d,m]
        with slots: q [B,T,G*H,r]   k [B,T,H,r]   control or weights [B,T,H,m]   state [B,H,d+r+1,m]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastweights import ops
from fastweights.rules import DELTA_RULES, MATRIX_RULES, RULES

# Below this norm a tensor is compared as if it had it: what is zero but for rounding (the gradient of a query whose
# one normalized token puts out v whatever it asks) has no ratio to speak of.
SMALLEST_NORM = 1e-7
# Every rule, and every rule that can be normalized with its normalizer.
CASES = [(name, normalize) for name, rule in RULES.items() for normalize in (False, True)[: 1 + rule.has_normalizer]]

MATRIX_CASES = [case for case in CASES if case[0] in MATRIX_RULES]


def case_name(value: object) -> str | None:
    """Test ids such as gated+norm for the pairs in CASES."""
    return value[0] + ("+norm" if value[1] else "") if isinstance(value, tuple) else None


def assert_close(name: str, found: Any, expected: Any, tolerance: float, least: float = SMALLEST_NORM) -> None:
    """||found - expected|| / ||expected|| over the whole tensor, with a least norm for an expected of zero."""
    found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
    assert found.shape == expected.shape, f"{name}: shape {list(found.shape)}, expected {list(expected.shape)}"
    assert torch.isfinite(expected).all(), f"{name}: what is expected is not finite"
    assert torch.isfinite(found).all(), f"{name}: {int((~torch.isfinite(found)).sum())} elements are not finite"
    error = float((found - expected).norm()) / max(float(expected.norm()), least)
    assert error <= tolerance, f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}"


def assert_all_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(name, found[name], expected[name], tolerance)


def op_inputs(
    rule: str,
    B: int = 2,
    T: int = 20,
    H: int = 2,
    d: int = 6,
    m: int = 5,
    dtype: torch.dtype = torch.float32,
    groups: int = 1,
    low: float = -4.0,
    high: float = 4.0,
    seed: int = 0,
    normalize: bool = False,
    state: bool = True,
    r: int = 7,
) -> dict[str, Tensor]:
    """Arguments of ops.<rule>, by name; the same values for every dtype. With normalize, what is divided by is
    positive; keys of the delta rules have length 1, without which their state grows without bound. Slots have keys of
    width r and positive totals, and the weights of linformer are so small that their sums do not saturate softmax."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width = r if RULES[rule].slots else m
    inputs = {"q": draw(B, T, groups * H, width), "k": draw(B, T, H, width), "v": draw(B, T, H, d)}
    if normalize:
        inputs |= {name: inputs[name].abs() + 0.1 for name in ("q", "k")}
    if rule in DELTA_RULES:
        inputs["k"] = inputs["k"] / inputs["k"].norm(dim=-1, keepdim=True)
    widths: dict[str, tuple[int, ...]] = {"m": (m,), "d": (d,), "1": ()}
    for gate, columns in RULES[rule].arguments.items():
        uniform = torch.rand((B, T, H, *widths[columns]), generator=generator)
        inputs[gate] = (uniform - 0.5) / T**0.5 if RULES[rule].by_position else low + (high - low) * uniform
    if state:
        inputs["state"] = draw(B, H, RULES[rule].state_rows(d, width) + normalize, m)
        if normalize or RULES[rule].slots:
            inputs["state"][:, :, -1].abs_()
    return {name: x.to(dtype) for name, x in inputs.items()}


def op_flags(kind: str, B: int, T: int, seed: int = 0) -> dict[str, Tensor]:
    """mask (padding anywhere), reset (documents anywhere), both or none, as kind says by naming them."""
    generator = torch.Generator().manual_seed(seed + 1)
    flags = {
        "mask": torch.rand(B, T, generator=generator) < 0.7,
        "reset": torch.rand(B, T, generator=generator) < 0.1,
    }
    flags["mask"][0, : T // 3] = False
    flags["reset"][0, T // 2] = True
    return {name: flag for name, flag in flags.items() if name in kind}


def run_op(rule: str, inputs: Mapping[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    if not options.get("normalize", True):
        del options["normalize"]
    return getattr(ops, rule)(**inputs, **options)


def run_with_gradients(rule: str, inputs: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """y, the end state, and the gradient of every input from both of them together. The totals of slots, which may be
    far larger than the rest, are compared by themselves."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    y, state = run_op(rule, leaves, **options)
    generator = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in (y, state)]
    loss = (y * weights[0]).sum() + (state * weights[1]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True)}
    y, state = y.detach(), state.detach()
    parts = {"state": state[:, :, :-1], "totals": state[:, :, -1]} if RULES[rule].slots else {"state": state}
    return {"y": y, **parts, **results}
