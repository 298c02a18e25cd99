"""One chunk of the delta rules: S_t = S' + u_t k_t^T with S' = S_{t-1} diag(f_t) and u_t = g_t (v_t - S' k_t).

delta has no gate f. With the cumulative products F of a tile's gates, S' is S_0 diag(F_t) plus every earlier
u_s (k_s F_t / F_s)^T, so the rows of U solve a unit lower triangular system (the WY form):
    (I + strictly lower(g (K F) (K / F)^T)) U = g (V - (K F) S_0^T).
A tile is the whole chunk for delta and 16 tokens for gated_delta (tiles.py). The gradient of f is a running sum of
q dq + k dk where the state is read, minus k dk where it is written (docs/derivations.md).

Shapes: tiles q,k [B,H,N,C,m]   v,u [B,H,N,C,d]   g [B,H,N,C,1]   states [B,H,N,d,m]
        document [B,1,N,C]: number of resets so far in the tile
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops.tiles import (
    CumulativeGate,
    count_documents,
    cumulative_products,
    cut,
    divide,
    gate_gradient,
    in_end,
    join,
    middle_to_end,
    middle_to_start,
    multiply,
    pair_scores,
    reads_start,
    survives,
    tile_length,
)


class Solved(NamedTuple):
    """The tiles of a chunk with their solved systems.

    q_in, k_in and k_read are q F, k / F and k F: products of the first and last with k_in are what tokens read of each
    other. The others are scaled for what reads the start state of the tile (q_start, k_start) and what is in its end
    state (k_end). decay is what a tile multiplies the state by (None: 1), error is V - (K F) S_0^T, overlap is what
    keys read of earlier ones, scores what queries read. states are those at the tiles' starts.
    """

    q: Tensor
    k: Tensor
    g: Tensor
    f: CumulativeGate | None
    document: Tensor | None
    q_in: Tensor
    k_in: Tensor
    k_read: Tensor
    q_start: Tensor
    k_start: Tensor
    k_end: Tensor
    decay: Tensor | None
    overlap: Tensor
    system: Tensor
    scores: Tensor
    states: Tensor
    error: Tensor
    u: Tensor


def forward(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """y [B,H,C,d] and the end state of a chunk, from its start state and [q, k, v, *f_logit, g_logit]."""
    s, end = _solve(state, inputs, pad, reset)
    return join(s.scores @ s.u + s.q_start @ s.states.mT, inputs[0], pad), end


def backward(
    state: Tensor,
    inputs: list[Tensor],
    pad: Tensor | None,
    reset: Tensor | None,
    dy: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the chunk's start state and of its inputs, from those of its output and end state."""
    s, _ = _solve(state, inputs, pad, reset)
    dy = cut(dy if pad is None else dy.masked_fill(pad[..., None], 0), s.q.shape[-2])
    dstarts, dends, dtarget = _solve_back(s, dy, dstate)
    dvalue = s.g * dtarget
    # without the tokens' own terms (q_t . k_t) u_t, which have no gate in them
    dscores, doverlap = pair_scores(dy, s.u, s.document), pair_scores(dtarget, s.u, s.document).neg_()
    gated = s.g * doverlap

    dq = dscores @ s.k_in + reads_start(middle_to_start(dy @ s.states, s.f), s.document)
    dk_read = gated @ s.k_in - reads_start(middle_to_start(dvalue @ s.states, s.f), s.document)
    dk_inner = dscores.mT @ s.q_in + gated.mT @ s.k_read
    dk_end = in_end(middle_to_end(s.u @ dends, s.f), s.document)
    dgates = []
    if s.f is not None and s.decay is not None:
        # of the scaled q F, k F, k / F and their gradients: the scales cancel
        flow = (s.q_in * dq).add_(s.k_read * dk_read).sub_(s.k_in * dk_inner)
        passing = (s.states * dends * s.decay).sum(-2, keepdim=True)
        dgates.append(gate_gradient(flow, s.k_in * dk_end, passing, inputs[3], pad, reset))
    dg = (dtarget * s.error).sum(-1, keepdim=True) + (doverlap * s.overlap).sum(-1, keepdim=True)
    g_logit = inputs[-1]
    dgates.append(join(dg * s.g, inputs[0])[..., 0] * (-g_logit).sigmoid())

    own = (dy * s.u).sum(-1, keepdim=True)
    dq = (own * s.k).add_(multiply(dq, s.f))
    dk = (own * s.q).add_(multiply(dk_read, s.f)).add_(divide(dk_inner.add_(dk_end), s.f))
    dinputs = [join(dq, inputs[0]), join(dk, inputs[0], pad), join(dvalue, inputs[0])]
    return dstarts, dinputs + dgates


def _solve(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> tuple[Solved, Tensor]:
    """Cut a chunk into tiles and solve their systems one after the other; also returns the end state."""
    q, k, v, *f_logit, g_logit = inputs
    if pad is not None:
        k = k.masked_fill(pad[..., None], 0)
    f = cumulative_products(f_logit[0], pad, reset) if f_logit else None
    tile = tile_length(q, gated=f is not None)
    document = count_documents(reset, tile)
    q, k, v, g = (cut(x, tile) for x in (q, k, v, g_logit.sigmoid()[..., None]))
    q_in, k_in, k_read = multiply(q, f), divide(k, f), multiply(k, f)
    q_start, k_start = (reads_start(middle_to_start(x, f), document) for x in (q_in, k_read))
    k_end = in_end(middle_to_end(k_in, f), document)
    decay = survives(None if f is None else f.whole, document)
    overlap = pair_scores(k_read, k_in, document)
    system = g * overlap

    states, errors, u = [state], [], []
    for n in range(q.shape[2]):
        errors.append(v[:, :, n] - k_start[:, :, n] @ states[n].mT)
        # unitriangular: the diagonal of ones is not read
        target = g[:, :, n] * errors[n]
        u.append(torch.linalg.solve_triangular(system[:, :, n], target, upper=False, unitriangular=True))
        states.append(_decayed(states[n], decay, n) + u[n].mT @ k_end[:, :, n])
    starts, error, u_all = (_stack(x) for x in (states[:-1], errors, u))
    scores = pair_scores(q_in, k_in, document, own=True)
    parts = (q, k, g, f, document, q_in, k_in, k_read, q_start, k_start, k_end, decay, overlap, system, scores)
    return Solved(*parts, starts, error, u_all), states[-1]


def _solve_back(s: Solved, dy: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Go back through the tiles, with the transposed systems.

    Returns the gradients of the state at the chunk's start, of the states [B,H,N,d,m] at the tiles' ends, and of the
    right-hand sides [B,H,N,C,d].
    """
    du = s.scores.mT @ dy
    from_outputs = dy.mT @ s.q_start
    dends, dtargets = [], []
    for n in reversed(range(dy.shape[2])):
        dends.append(dstate)
        right = du[:, :, n] + s.k_end[:, :, n] @ dstate.mT
        dtargets.append(torch.linalg.solve_triangular(s.system[:, :, n].mT, right, upper=True, unitriangular=True))
        dvalue = s.g[:, :, n] * dtargets[-1]
        dstate = _decayed(dstate, s.decay, n) + from_outputs[:, :, n] - dvalue.mT @ s.k_start[:, :, n]
    return dstate, _stack(dends[::-1]), _stack(dtargets[::-1])


def _stack(tiles: list[Tensor]) -> Tensor:
    """Tiles [B,H,.,.] as [B,H,N,.,.]; a single one is not copied."""
    return tiles[0].unsqueeze(2) if len(tiles) == 1 else torch.stack(tiles, dim=2)


def _decayed(state: Tensor, decay: Tensor | None, n: int) -> Tensor:
    """A state, or its gradient, as it passes through tile n."""
    return state if decay is None else state * decay[:, :, n]
