"""The rules as Triton kernels, with the arguments and results of rules.loop.

In eager mode they are an autograd function; under torch.compile, which cannot look inside, custom operators with known
shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.ops.triton import launch
from fastweights.ops.triton.primitives import PAD, RESET
from fastweights.rules import Rule


def run_kernels(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: tuple[Tensor, ...],
    state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    *,
    float32_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run a rule over whole sequences; float32_output returns y in float32, whatever the dtype of the inputs.

    Where several query heads share a state, keys, values, gates and states are repeated for each of them.
    """
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
    save_states = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if torch.compiler.is_compiling():
        y, end, *_ = rule_op(rule.name, q, k, v, gates, flags, state, save_states, float32_output)
    elif save_states:
        y, end = _EagerFunction.apply(rule.name, float32_output, flags, state, q, k, v, *gates)
    else:
        y, end, _ = launch.forward(
            _plan(rule.name, q, k, v, flags), q, k, v, gates, flags, state, False, float32_output
        )
    return y, end[:, ::groups]


def _plan(name: str, q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None) -> launch.Plan:
    return launch.plan_for(launch.problem_shape(name, q, k, v, flags))


def _unpack_saved(ctx: Any) -> tuple[Any, ...]:
    """q, k, v, gates, flags and the tensors of the forward pass, from what both kinds of autograd saved."""
    q, k, v, *rest = ctx.saved_tensors
    return q, k, v, list(rest[: ctx.gates]), rest[ctx.gates], list(rest[ctx.gates + 1 :])


class _EagerFunction(torch.autograd.Function):
    """The eager counterpart of rule_op: calling a custom operator takes longer than small kernels run."""

    @staticmethod
    def forward(ctx, name, float32_output, flags, state, q, k, v, *gates):
        ctx.plan, ctx.has_state, ctx.gates = _plan(name, q, k, v, flags), state is not None, len(gates)
        y, end, saved = launch.forward(ctx.plan, q, k, v, list(gates), flags, state, True, float32_output)
        ctx.save_for_backward(q, k, v, *gates, flags, *saved)
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dend):
        given = (*_unpack_saved(ctx), dy.contiguous(), dend.contiguous())
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
    save_states: bool,
    float32_output: bool,
) -> list[Tensor]:
    """A rule over a whole sequence as a custom operator, which torch.compile does not look into.

    Args:
        name: The rule.
        q: Queries [B,T,H,m].
        k: Keys [B,T,H,m].
        v: Values [B,T,H,d].
        gates: The logits of the rule's gates.
        flags: Which tokens are padding or start a document [B,T]; None: none.
        state: The state before the first token [B,H,d,m]; None: zeros.
        save_states: Whether to return what the backward pass needs.
        float32_output: Whether y is float32, else it has the dtype of v.

    Returns:
        y [B,T,H,d], the last state [B,H,d,m] and, with save_states, the tensors for `rule_backward_op`.
    """
    plan = _plan(name, q, k, v, flags)
    y, end, saved = launch.forward(plan, q, k, v, gates, flags, state, save_states, float32_output)
    return [y, end, *saved]


@rule_op.register_fake
def _(name, q, k, v, gates, flags, state, save_states, float32_output):
    plan = launch.Plan(launch.problem_shape(name, q, k, v, flags))  # sizes may be symbols, which no cache can look up
    shape = plan.shape
    end = v.new_empty(shape.batch, shape.heads, shape.d, shape.m, dtype=torch.float32)
    y = v.new_empty(v.shape, dtype=torch.float32 if float32_output else v.dtype)
    return [y, end, *(v.new_empty(size, dtype=dtype) for size, dtype in plan.saved() if save_states)]


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
    """The gradients of `rule_op`, as a custom operator.

    Args:
        name: The rule.
        q: As in `rule_op`, like k, v, gates and flags.
        saved: What it returned after the last state.
        dy: Gradient of y.
        dend: Gradient of the last state.

    Returns:
        The gradients of q, k, v, the first state and each gate.
    """
    return launch.backward(_plan(name, q, k, v, flags), q, k, v, gates, flags, saved, dy, dend)


@rule_backward_op.register_fake
def _(name, q, k, v, gates, flags, saved, dy, dend):
    return [x.new_empty(x.shape) for x in (q, k, v, dend, *gates)]


def _setup(ctx, inputs, output):
    name, q, k, v, gates, flags, state, _, _ = inputs
    ctx.name, ctx.has_state, ctx.gates = name, state is not None, len(gates)
    ctx.save_for_backward(q, k, v, *gates, flags, *output[2:])


def _backward(ctx, gradients):
    dy, dend, *_ = gradients
    dq, dk, dv, dstart, *dgates = rule_backward_op(ctx.name, *_unpack_saved(ctx), dy.contiguous(), dend.contiguous())
    return None, dq, dk, dv, dgates, None, dstart if ctx.has_state else None, None, None


rule_op.register_autograd(_backward, setup_context=_setup)
