"""Chunked forms of the rules: matrix products over chunks of tokens instead of one outer product per token.

The forward pass saves only the states at chunk boundaries. The backward pass goes through the chunks in reverse order
and recomputes what happened inside, so training memory does not grow with T*d*m. Derivations: docs/derivations.md.

This file cuts sequences into chunks; tiled.py (add, gated, decay) and wy.py (delta, gated_delta) compute one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.ops import tiled, wy
from fastweights.ops.tiles import CHUNK
from fastweights.rules import DELTA_RULES, Rule
from fastweights.rules.base import MIN_GATE_LOGIT


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
    """Run a rule over sequences; arguments and results are those of rules.loop."""
    state = rule.zero_state(k, v, gate_logits) if state is None else state
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v, *repeated = (x.repeat_interleave(groups, dim=2) for x in (k, v, *gate_logits))
        gate_logits = tuple(repeated)
        state = state.repeat_interleave(groups, dim=1)
    form = wy if rule.name in DELTA_RULES else tiled
    if rule.name == "gated":
        logit = gate_logits[0][..., None].clamp(min=MIN_GATE_LOGIT)
        k, gate_logits = k * (-logit).sigmoid(), (logit,)
    pad = None if mask is None else ~mask
    y, state = _Chunks.apply(form, pad, reset, state, q, k, v, *gate_logits)
    return y, state[:, ::groups]


class _Chunks(torch.autograd.Function):
    """The loop over chunks. `form` is the module tiled or wy; it works on [B,H,C,.], with pad and reset [B,1,C]:

    forward(state, inputs, pad, reset) -> (y, end state)
    backward(state, inputs, pad, reset, dy, d end state) -> (d state, d inputs)
    """

    @staticmethod
    def forward(ctx, form, pad, reset, state, *inputs):
        y = torch.empty_like(inputs[2])
        boundaries = []
        for chunk in _chunk_slices(y):
            boundaries.append(state)
            out, state = form.forward(state, _chunk_of(inputs, chunk), *_flag_chunks(pad, reset, chunk))
            y[:, chunk] = out.transpose(1, 2)
        ctx.form, ctx.flags = form, (pad, reset)
        ctx.save_for_backward(*inputs, *boundaries)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dstate):
        form, chunks, saved = ctx.form, _chunk_slices(dy), ctx.saved_tensors
        inputs, boundaries = saved[: -len(chunks)], saved[-len(chunks) :]
        grads = [torch.empty_like(x) for x in inputs]
        # backward() may be called inside autocast, which must not change the precision here
        with torch.autocast(dy.device.type, enabled=False):
            for chunk, state in reversed(list(zip(chunks, boundaries, strict=True))):
                (dout,) = _chunk_of((dy,), chunk)
                flags = _flag_chunks(ctx.flags[0], ctx.flags[1], chunk)
                dstate, dinputs = form.backward(state, _chunk_of(inputs, chunk), *flags, dout, dstate)
                for grad, dx in zip(grads, dinputs, strict=True):
                    grad[:, chunk] = dx.transpose(1, 2)
        return None, None, None, dstate, *grads


def _chunk_slices(x: Tensor) -> list[slice]:
    """The chunks of x [B,T,...] as slices of T."""
    return [slice(start, start + CHUNK) for start in range(0, x.shape[1], CHUNK)]


def _chunk_of(inputs: tuple[Tensor, ...], chunk: slice) -> list[Tensor]:
    """One chunk [B,C,H,.] of each input as [B,H,C,.]."""
    return [x[:, chunk].transpose(1, 2).contiguous() for x in inputs]


def _flag_chunks(pad: Tensor | None, reset: Tensor | None, chunk: slice) -> list[Tensor | None]:
    """One chunk of pad and reset, [B,1,C]."""
    return [None if x is None else x[:, None, chunk] for x in (pad, reset)]
