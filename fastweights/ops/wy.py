"""One chunk of the delta rule: S_t = S_{t-1} + u_t k_t^T with u_t = g_t (v_t - S_{t-1} k_t),  y_t = S_t q_t.

S_{t-1} holds every earlier u_s k_s^T, so the rows of U solve a unit lower triangular system (the WY form):
    (I + strictly lower(g K K^T)) U = g (V - K S_0^T).

Shapes: q,k [B,H,C,m]   v,u [B,H,C,d]   g [B,H,C,1]   S [B,H,d,m]   segment [B,1,C]: resets so far
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Solved(NamedTuple):
    q: Tensor
    k: Tensor
    g: Tensor
    error: Tensor
    overlap: Tensor
    system: Tensor
    u: Tensor
    scores: Tensor
    same: Tensor | None
    first: Tensor | None
    last: Tensor | None


def forward(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    s = _solve(state, inputs, pad, reset)
    y = s.scores @ s.u + _where(s.q, s.first) @ state.mT
    return _unpadded(y, pad), _survive(state, s.first) + s.u.mT @ _where(s.k, s.last)


def backward(
    state: Tensor,
    inputs: list[Tensor],
    pad: Tensor | None,
    reset: Tensor | None,
    dy: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the chunk's start state and of its inputs, from those of its output and end state."""
    s = _solve(state, inputs, pad, reset)
    dy = _unpadded(dy, pad)
    dscores = _where_pair((dy @ s.u.mT).tril_(), s.same)
    du = s.scores.mT @ dy + _where(s.k, s.last) @ dstate.mT
    dtarget = torch.linalg.solve_triangular(s.system.mT, du, upper=True, unitriangular=True)
    doverlap = _where_pair((dtarget @ s.u.mT).tril_(-1), s.same).neg_()
    dvalue = s.g * dtarget
    gated = s.g * doverlap

    dq = dscores @ s.k + _where(dy @ state, s.first)
    dk = dscores.mT @ s.q + _where(s.u @ dstate, s.last) - _where(dvalue @ state, s.first)
    dk += gated @ s.k + gated.mT @ s.k
    dg = (dtarget * s.error).sum(-1) + (doverlap * s.overlap).sum(-1)
    g = s.g[..., 0]
    dstart = _survive(dstate, s.first) + dy.mT @ _where(s.q, s.first) - dvalue.mT @ _where(s.k, s.first)
    return dstart, [dq, _unpadded(dk, pad), dvalue, dg * g * (-inputs[3]).sigmoid()]


def _solve(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> Solved:
    q, k, v, g_logit = inputs
    k = _unpadded(k, pad)
    g = g_logit.sigmoid()[..., None]
    same = first = last = None
    if reset is not None:
        segment = reset.cumsum(-1)
        same = segment[..., :, None] == segment[..., None, :]
        first, last = (segment == 0)[..., None], (segment == segment[..., -1:])[..., None]
    overlap = _where_pair((k @ k.mT).tril_(-1), same)
    system = g * overlap
    error = v - _where(k, first) @ state.mT
    # unitriangular: the diagonal of ones is not read
    u = torch.linalg.solve_triangular(system, g * error, upper=False, unitriangular=True)
    scores = _where_pair((q @ k.mT).tril_(), same)
    return Solved(q, k, g, error, overlap, system, u, scores, same, first, last)


def _unpadded(x: Tensor, pad: Tensor | None) -> Tensor:
    return x if pad is None else x.masked_fill(pad[..., None], 0)


def _where(x: Tensor, tokens: Tensor | None) -> Tensor:
    return x if tokens is None else x * tokens


def _where_pair(scores: Tensor, same: Tensor | None) -> Tensor:
    return scores if same is None else scores * same


def _survive(state: Tensor, first: Tensor | None) -> Tensor:
    """The state as it comes through the chunk: empty if a document began in it."""
    return state if first is None else state * first[..., -1:, :]
