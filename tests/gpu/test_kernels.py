"""On a GPU: kernels give the same bits at every run, so no tile is overwritten while it is read."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.decode_kernels import layer_case
from helpers.relative_error import assert_close, op_inputs, run_with_gradients

from fastweights.ops.step import can_overlap
from fastweights.rules import RULES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rule", RULES)
def test_rule_gives_the_same_bits_every_time(rule: str) -> None:
    inputs = {name: x.cuda() for name, x in op_inputs(rule, T=2000, H=4, m=32, d=100, dtype=torch.bfloat16).items()}
    first, second = (run_with_gradients(rule, inputs, backend="triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rows", [2, 32, 64, 256])
@pytest.mark.parametrize("norm_kind", ["rms", "layer"])
@pytest.mark.parametrize(
    ("n", "k", "gated"), [(2016, 576, False), (1536, 576, True), (49152, 576, False), (8192, 2048, False)]
)
def test_linear_gives_the_same_bits_every_time(n: int, k: int, gated: bool, norm_kind: str, rows: int) -> None:
    """A tile that is overwritten while it is read is another one at each run."""
    case = ("silu" if gated else "none", gated, norm_kind, False, False)
    layer, x, _, expected = layer_case(case, rows, n, k, torch.bfloat16, "kernel")
    layer.overlap = can_overlap(x.device)
    outs = [x.new_full((rows, n), math.nan) for _ in range(50)]
    for out in outs:
        layer(x, out)
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    assert_close("out", outs[0].cpu(), expected, 1e-2)


@pytest.mark.parametrize("rows", [2, 32])
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (2048, 8192)])
def test_a_shared_sum_has_the_same_bits_every_time(n: int, k: int, rows: int) -> None:
    layer, x, before, expected = layer_case(("none", False, "none", False, True), rows, n, k, torch.bfloat16, "kernel")
    layer.overlap = can_overlap(x.device)
    outs = [before.clone() for _ in range(50)]
    for out in outs:
        layer(x, out, add=True)
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    assert_close("out", outs[0].cpu(), expected, 1e-2)
