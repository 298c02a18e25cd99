"""One chunk of the rules with elementwise gates: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T,  y_t = S_t q_t.

decay has both gates; gated only f (one value per head, with its 1 - g already in k); add none. With the cumulative
products F, Z of a tile's gates the rule becomes matrix products,
    y_t = Z_t * sum_{s<t} (q_t F_t . k_s / F_s) v_s / Z_s  +  (q_t . k_t) v_t  +  Z_t * S_0 (F_t q_t),
and the gradients of the gates are running sums of q dq - k dk and y dy - v dv (docs/derivations.md). A token's own term
(q_t . k_t) v_t has no gate in it. It is left out of those sums, which would otherwise cancel badly.

Shapes: tiles [B,H,N,TILE,.]   f [..,TILE,m|1]   z [..,TILE,d]   states [B,H,N,d,m]
        document [B,1,N,TILE]: number of resets so far in the tile
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


class Tiles(NamedTuple):
    """The inputs of a chunk, cut into tiles."""

    q: Tensor
    k: Tensor
    v: Tensor
    f: CumulativeGate | None
    z: CumulativeGate | None
    document: Tensor | None


def forward(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """y [B,H,C,d] and the end state of a chunk, from its start state and [q, k, v, *gate logits]."""
    tiles = _prepare(inputs, pad, reset)
    q, k, v = _scale(tiles)
    states, end = _scan(state, *_transition(tiles, k, v))
    inner = pair_scores(q, k, tiles.document) @ v
    inner += middle_to_start(reads_start(middle_to_start(q, tiles.f), tiles.document) @ states[:, :, :-1].mT, tiles.z)
    own = (tiles.q * tiles.k).sum(-1, keepdim=True) * tiles.v
    return join(own.add_(multiply(inner, tiles.z)), inputs[0], pad), end


def backward(
    state: Tensor,
    inputs: list[Tensor],
    pad: Tensor | None,
    reset: Tensor | None,
    dy: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of the chunk's start state and of its inputs, from those of its output and end state."""
    tiles = _prepare(inputs, pad, reset)
    document = tiles.document
    dy = cut(dy if pad is None else dy.masked_fill(pad[..., None], 0), tiles.q.shape[-2])
    q, k, v = _scale(tiles)
    decay, update = _transition(tiles, k, v)
    states, _ = _scan(state, decay, update)
    dinner = multiply(dy, tiles.z)
    q_start, dy_start = reads_start(middle_to_start(q, tiles.f), document), middle_to_start(dinner, tiles.z)
    dstarts, dends = _scan_back(dstate, decay, dy_start.mT @ q_start)

    scores, dscores = pair_scores(q, k, document), pair_scores(dinner, v, document)
    dq = reads_start(middle_to_start(dy_start @ states[:, :, :-1], tiles.f), document) + dscores @ k
    dk_inner, dv_inner = dscores.mT @ q, scores.mT @ dinner
    dk_end = in_end(middle_to_end(middle_to_end(v, tiles.z) @ dends, tiles.f), document)
    dv_end = middle_to_end(in_end(middle_to_end(k, tiles.f), document) @ dends.mT, tiles.z)

    own = (tiles.q * tiles.k).sum(-1, keepdim=True)
    dgates = []
    if decay is not None:
        # the gradient that goes from the start state to the end state: every gate of the tile gets it
        crossing = states[:, :, :-1] * dends * decay
    if tiles.f is not None:
        # of the scaled q F, k / F and their gradients: the scales cancel
        flow, into_end, passing = (q * dq).sub_(k * dk_inner), k * dk_end, crossing.sum(-2, keepdim=True)
        if tiles.f.running.shape[-1] == 1:
            flow, into_end, passing = (x.sum(-1, keepdim=True) for x in (flow, into_end, passing))
        dgates.append(gate_gradient(flow, into_end, passing, inputs[3], pad, reset))
    if tiles.z is not None:
        inner = (q_start @ states[:, :, :-1].mT).mul_(tiles.z.middle).add_(scores @ v)
        flow = inner.mul_(dinner).sub_(v * dv_inner)
        dgates.append(gate_gradient(flow, v * dv_end, crossing.sum(-1)[..., None, :], inputs[4], pad, reset))

    # the tokens' own terms (q_t . k_t) v_t, added after the sums for the gates
    down = (dy * tiles.v).sum(-1, keepdim=True)
    dq = (down * tiles.k).add_(multiply(dq, tiles.f))
    dk = (down * tiles.q).add_(divide(dk_inner.add_(dk_end), tiles.f))
    dv = (own * dy).add_(divide(dv_inner.add_(dv_end), tiles.z))
    dinputs = [join(dq, inputs[0]), join(dk, inputs[0], pad), join(dv, inputs[0])]
    return dstarts, dinputs + dgates


def _prepare(inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> Tiles:
    """Cut a chunk into tiles and compute the cumulative products of its gates."""
    q, k, v, *logits = inputs
    if pad is not None:
        k = k.masked_fill(pad[..., None], 0)
    f, z = [*(cumulative_products(logit, pad, reset) for logit in logits), None, None][:2]
    tile = tile_length(q, gated=bool(logits))
    return Tiles(cut(q, tile), cut(k, tile), cut(v, tile), f, z, count_documents(reset, tile))


def _scale(tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """q F, k / F and v / Z."""
    return multiply(tiles.q, tiles.f), divide(tiles.k, tiles.f), divide(tiles.v, tiles.z)


def _transition(tiles: Tiles, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor]:
    """What a tile does to the state: S_end = decay * S_start + update."""
    update = middle_to_end(v, tiles.z).mT @ in_end(middle_to_end(k, tiles.f), tiles.document)
    decay = None if tiles.f is None else tiles.f.whole
    if tiles.z is not None and decay is not None:
        decay = tiles.z.whole.mT * decay
    decay = survives(decay, tiles.document)
    return (None if decay is None else decay.expand_as(update)), update


def _scan(state: Tensor, decay: Tensor | None, update: Tensor) -> tuple[Tensor, Tensor]:
    """The states [B,H,N+1,d,m] at the starts of the tiles and at the last one's end, and that last one alone.

    Alone, because a view of it, saved as a chunk boundary, would keep all of them in memory.
    """
    states = [state]
    for n, new in enumerate(update.unbind(2)):
        states.append(new + states[n] if decay is None else torch.addcmul(new, decay[:, :, n], states[n]))
    return torch.stack(states, dim=2), states[-1]


def _scan_back(dstate: Tensor, decay: Tensor | None, dstarts: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the state at the chunk's start, and those [B,H,N,d,m] of the states at the tiles' ends."""
    dends = []
    for n, new in reversed(list(enumerate(dstarts.unbind(2)))):
        dends.append(dstate)
        dstate = new + dstate if decay is None else torch.addcmul(new, decay[:, :, n], dstate)
    return dstate, torch.stack(dends[::-1], dim=2)
