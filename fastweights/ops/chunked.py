"""Chunked forms of the rules: matrix products over tiles of tokens instead of one outer product a token.

The forward pass keeps the states at chunk boundaries only; the backward pass walks the chunks in reverse and computes
again what happened inside, so training memory does not grow with T*d*m. Derivations: rules/README.md.

This file cuts sequences into chunks; tiled.py (add, gated, decay) and wy.py (delta) say what happens in one.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.ops import tiled, wy
from fastweights.rules import Rule
from fastweights.rules.base import MIN_GATE_LOGIT, zero_state


def chunked(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: tuple[Tensor, ...],
    state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as rules.loop."""
    state = zero_state(k, v) if state is None else state
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v, *repeated = (x.repeat_interleave(groups, dim=2) for x in (k, v, *gate_logits))
        gate_logits = tuple(repeated)
        state = state.repeat_interleave(groups, dim=1)
    form = wy if rule.name == "delta" else tiled
    if rule.name == "gated":
        logit = gate_logits[0][..., None].clamp(min=MIN_GATE_LOGIT)
        k, gate_logits = k * (-logit).sigmoid(), (logit,)
    pad = None if mask is None else ~mask
    y, state = _Chunks.apply(form, pad, reset, state, q, k, v, *gate_logits)
    return y, state[:, ::groups]


class _Chunks(torch.autograd.Function):
    """Walks the chunks. A form (tiled or wy) has CHUNK, its length, and works on [B,H,C,.]; pad and reset [B,1,C]:
    forward(state, inputs, pad, reset) -> (y, end state)
    backward(state, inputs, pad, reset, dy, d end state) -> (d state, d inputs)"""

    @staticmethod
    def forward(ctx, form, pad, reset, state, *inputs):
        y = torch.empty_like(inputs[2])
        boundaries = []
        for piece in _pieces(y, form):
            boundaries.append(state)
            out, state = form.forward(state, _cut(inputs, piece), *_cut_flags(pad, reset, piece))
            y[:, piece] = out.transpose(1, 2)
        ctx.form, ctx.flags = form, (pad, reset)
        ctx.save_for_backward(*inputs, *boundaries)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dstate):
        form, pieces, saved = ctx.form, _pieces(dy, ctx.form), ctx.saved_tensors
        inputs, boundaries = saved[: -len(pieces)], saved[-len(pieces) :]
        grads = [torch.empty_like(x) for x in inputs]
        # backward() may be called inside the caller's autocast
        with torch.autocast(dy.device.type, enabled=False):
            for piece, state in reversed(list(zip(pieces, boundaries, strict=True))):
                (dout,) = _cut((dy,), piece)
                flags = _cut_flags(ctx.flags[0], ctx.flags[1], piece)
                dstate, dinputs = form.backward(state, _cut(inputs, piece), *flags, dout, dstate)
                for grad, dx in zip(grads, dinputs, strict=True):
                    grad[:, piece] = dx.transpose(1, 2)
        return None, None, None, dstate, *grads


def _pieces(x: Tensor, form: ModuleType) -> list[slice]:
    return [slice(start, start + form.CHUNK) for start in range(0, x.shape[1], form.CHUNK)]


def _cut(inputs: tuple[Tensor, ...], piece: slice) -> list[Tensor]:
    """A chunk [B,C,H,.] of each input as [B,H,C,.]."""
    return [x[:, piece].transpose(1, 2).contiguous() for x in inputs]


def _cut_flags(pad: Tensor | None, reset: Tensor | None, piece: slice) -> list[Tensor | None]:
    return [None if x is None else x[:, None, piece] for x in (pad, reset)]
