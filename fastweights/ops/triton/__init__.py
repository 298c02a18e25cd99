"""The rules as Triton kernels: same arguments and results as rules.loop, plain autograd in eager mode, and custom
operators with known shapes under torch.compile, which cannot look inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.ops.triton import launch
from fastweights.ops.triton.parts import PAD, RESET
from fastweights.rules import Rule


def kernels(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: tuple[Tensor, ...],
    state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    *,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """`wide`: y in float32, whatever the inputs are."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v, *repeated = (x.repeat_interleave(groups, dim=2) for x in (k, v, *gate_logits))
        gate_logits = tuple(repeated)
        state = None if state is None else state.repeat_interleave(groups, dim=1)
    gates = [x[..., None] if x.ndim == 3 else x for x in gate_logits]
    q, k, v, *gates = (x.contiguous() for x in (q, k, v, *gates))
    state = None if state is None else state.contiguous()
    flags = None
    if mask is not None or reset is not None:
        flags = torch.zeros(q.shape[:2], dtype=torch.int8, device=q.device)
        flags += 0 if mask is None else (~mask).to(torch.int8) * PAD.value
        flags += 0 if reset is None else reset.to(torch.int8) * RESET.value
    inputs = [q, k, v, *gates] + ([] if state is None else [state])
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if torch.compiler.is_compiling():
        y, end, *_ = rule_op(rule.name, q, k, v, gates, flags, state, keep, wide)
    elif keep:
        y, end = _Eager.apply(rule.name, wide, flags, state, q, k, v, *gates)
    else:
        y, end, *_ = launch.forward(_plan(rule.name, q, k, v, flags), q, k, v, gates, flags, state, False, wide)
    return y, end[:, ::groups]


def _plan(name: str, q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None) -> launch.Plan:
    return launch.plan_for(launch.shape_of(name, q, k, v, flags))


def _saved(ctx: Any) -> tuple[Any, ...]:
    """q, k, v, gates, flags, and what the forward pass kept, as both ways save them."""
    q, k, v, *rest = ctx.saved_tensors
    return q, k, v, list(rest[: ctx.gates]), rest[ctx.gates], list(rest[ctx.gates + 1 :])


class _Eager(torch.autograd.Function):
    """What rule_op is under torch.compile. A custom operator takes longer to call than small kernels take to run."""

    @staticmethod
    def forward(ctx, name, wide, flags, state, q, k, v, *gates):
        ctx.plan, ctx.has_state, ctx.gates = _plan(name, q, k, v, flags), state is not None, len(gates)
        y, end, *saved = launch.forward(ctx.plan, q, k, v, list(gates), flags, state, True, wide)
        ctx.save_for_backward(q, k, v, *gates, flags, *saved)
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dend):
        given = (*_saved(ctx), dy.contiguous(), dend.contiguous())
        dq, dk, dv, dstart, *dgates = launch.backward(ctx.plan, *given)
        return None, None, None, dstart if ctx.has_state else None, dq, dk, dv, *dgates


@torch.library.custom_op("fastweights::rule", mutates_args=())
def rule_op(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    state: Tensor | None,
    keep: bool,
    wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return launch.forward(_plan(name, q, k, v, flags), q, k, v, gates, flags, state, keep, wide)  # type: ignore[return-value]


@rule_op.register_fake
def _(name, q, k, v, gates, flags, state, keep, wide):
    plan = launch.Plan(launch.shape_of(name, q, k, v, flags))  # sizes may be symbols, which no cache can look up
    shape = plan.shape
    end = v.new_empty(shape.batch, shape.heads, shape.d, shape.m, dtype=torch.float32)
    dtypes = (plan.state_dtype, torch.float32, torch.float32)
    saved = [v.new_empty(size, dtype=dtype) for size, dtype in zip(plan.saved_shapes(keep), dtypes, strict=True)]
    return v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype), end, *saved


@torch.library.custom_op("fastweights::rule_backward", mutates_args=())
def rule_backward_op(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    saved: list[Tensor],
    dy: Tensor,
    dend: Tensor,
) -> list[Tensor]:
    return launch.backward(_plan(name, q, k, v, flags), q, k, v, gates, flags, saved, dy, dend)


@rule_backward_op.register_fake
def _(name, q, k, v, gates, flags, saved, dy, dend):
    return [x.new_empty(x.shape) for x in (q, k, v, dend, *gates)]


def _setup(ctx, inputs, output):
    name, q, k, v, gates, flags, state, _, _ = inputs
    ctx.name, ctx.has_state, ctx.gates = name, state is not None, len(gates)
    ctx.save_for_backward(q, k, v, *gates, flags, *output[2:])


def _backward(ctx, dy, dend, *_):
    dq, dk, dv, dstart, *dgates = rule_backward_op(ctx.name, *_saved(ctx), dy.contiguous(), dend.contiguous())
    return None, dq, dk, dv, dgates, None, dstart if ctx.has_state else None, None, None


rule_op.register_autograd(_backward, setup_context=_setup)
