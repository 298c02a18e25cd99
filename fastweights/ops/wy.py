"""One chunk of the delta rule: S_t = S_{t-1} + u_t k_t^T with u_t = g_t (v_t - S_{t-1} k_t),  y_t = S_t q_t.

S_{t-1} is S_0 plus every earlier u_s k_s^T, so the rows of U solve a unit lower triangular system (the WY form):
    (I + strictly lower(g K K^T)) U = g (V - K S_0^T).

Shapes: q,k [B,H,C,m]   v,u [B,H,C,d]   g [B,H,C,1]   S [B,H,d,m]   document [B,1,C]: number of resets so far
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Solved(NamedTuple):
    """A chunk with its solved system.

    error is V - K S_0^T, overlap is K K^T below the diagonal, scores Q K^T up to it. The masks are None without resets:
    pairs of one document (same), tokens that read the start state, tokens that are in the end state.
    """

    q: Tensor
    k: Tensor
    g: Tensor
    error: Tensor
    overlap: Tensor
    system: Tensor
    u: Tensor
    scores: Tensor
    same: Tensor | None
    reads_start: Tensor | None
    in_end: Tensor | None


def forward(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """y [B,H,C,d] and the end state of a chunk, from its start state and [q, k, v, g_logit]."""
    s = _solve(state, inputs, pad, reset)
    y = s.scores @ s.u + _where(s.q, s.reads_start) @ state.mT
    return _zero_padding(y, pad), _if_no_reset(state, s.reads_start) + s.u.mT @ _where(s.k, s.in_end)


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
    dy = _zero_padding(dy, pad)
    dscores = _where_pair((dy @ s.u.mT).tril_(), s.same)
    du = s.scores.mT @ dy + _where(s.k, s.in_end) @ dstate.mT
    dtarget = torch.linalg.solve_triangular(s.system.mT, du, upper=True, unitriangular=True)
    doverlap = _where_pair((dtarget @ s.u.mT).tril_(-1), s.same).neg_()
    dvalue = s.g * dtarget
    gated = s.g * doverlap

    dq = dscores @ s.k + _where(dy @ state, s.reads_start)
    dk = dscores.mT @ s.q + _where(s.u @ dstate, s.in_end) - _where(dvalue @ state, s.reads_start)
    dk += gated @ s.k + gated.mT @ s.k
    dg = (dtarget * s.error).sum(-1) + (doverlap * s.overlap).sum(-1)
    g = s.g[..., 0]
    dstart = (
        _if_no_reset(dstate, s.reads_start)
        + dy.mT @ _where(s.q, s.reads_start)
        - dvalue.mT @ _where(s.k, s.reads_start)
    )
    return dstart, [dq, _zero_padding(dk, pad), dvalue, dg * g * (-inputs[3]).sigmoid()]


def _solve(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> Solved:
    """Solve the triangular system of a chunk."""
    q, k, v, g_logit = inputs
    k = _zero_padding(k, pad)
    g = g_logit.sigmoid()[..., None]
    same = reads_start = in_end = None
    if reset is not None:
        document = reset.cumsum(-1)
        same = document[..., :, None] == document[..., None, :]
        reads_start, in_end = (document == 0)[..., None], (document == document[..., -1:])[..., None]
    overlap = _where_pair((k @ k.mT).tril_(-1), same)
    system = g * overlap
    error = v - _where(k, reads_start) @ state.mT
    # unitriangular: the diagonal of ones is not read
    u = torch.linalg.solve_triangular(system, g * error, upper=False, unitriangular=True)
    scores = _where_pair((q @ k.mT).tril_(), same)
    return Solved(q, k, g, error, overlap, system, u, scores, same, reads_start, in_end)


def _zero_padding(x: Tensor, pad: Tensor | None) -> Tensor:
    """x [B,H,C,.] with 0 at padding tokens."""
    return x if pad is None else x.masked_fill(pad[..., None], 0)


def _where(x: Tensor, tokens: Tensor | None) -> Tensor:
    """x with 0 at other tokens; None: all tokens."""
    return x if tokens is None else x * tokens


def _where_pair(scores: Tensor, same: Tensor | None) -> Tensor:
    """Scores with 0 at pairs of different documents; None: one document."""
    return scores if same is None else scores * same


def _if_no_reset(state: Tensor, reads_start: Tensor | None) -> Tensor:
    """The state as it passes through the chunk: zero if a document started in it."""
    return state if reads_start is None else state * reads_start[..., -1:, :]
