"""One chunk of the rules whose gates are products: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T,  y_t = S_t q_t.

decay has both gates, gated only f (one number a head, its 1 - g already in k), add none. With running products F, Z of
a tile's gates the rule factors into matrix products,
    y_t = Z_t * sum_{s<t} (q_t F_t . k_s / F_s) v_s / Z_s  +  (q_t . k_t) v_t  +  Z_t * S_0 (F_t q_t),
and the gradients of the gates are running sums of q dq - k dk and y dy - v dv (rules/README.md). A token's own term
has no gate in it and is kept out of those sums, which would otherwise cancel badly.

Shapes: tiles [B,H,N,TILE,.]   f [..,TILE,m|1]   z [..,TILE,d]   states [B,H,N,d,m]
        segment [B,1,N,TILE]: resets so far in the tile
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.rules.base import MIN_GATE_LOGIT

CHUNK = 64
# Running products referenced to the middle of 16 tokens stay within e^80 even at the gates' floor, sigmoid(-10).
# Without gates there are none, and a tile is the whole chunk.
TILE = 16
TILE_MIDDLE = TILE // 2 - 1


class Gate(NamedTuple):
    """Running products of one gate over a tile, divided by the product at its middle, and that product."""

    running: Tensor
    middle: Tensor

    @property
    def end(self) -> Tensor:
        return self.running[..., -1:, :]

    @property
    def whole(self) -> Tensor:
        return self.end * self.middle


class Tiles(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    f: Gate | None
    z: Gate | None
    segment: Tensor | None


def forward(state: Tensor, inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    tiles = _prepare(inputs, pad, reset)
    q, k, v = _scale(tiles)
    states, end = _scan(state, *_transition(tiles, k, v))
    inner = _scores(q, k, tiles.segment) @ v
    inner += _outward(_first_segment(_outward(q, tiles.f), tiles.segment) @ states[:, :, :-1].mT, tiles.z)
    own = (tiles.q * tiles.k).sum(-1, keepdim=True) * tiles.v
    return _untile(own.add_(_times(inner, tiles.z)), inputs[0], pad), end


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
    segment = tiles.segment
    dy = _tiles(dy if pad is None else dy.masked_fill(pad[..., None], 0), tiles.q.shape[-2])
    q, k, v = _scale(tiles)
    kept, written = _transition(tiles, k, v)
    states, _ = _scan(state, kept, written)
    dinner = _times(dy, tiles.z)
    reader, dread = _first_segment(_outward(q, tiles.f), segment), _outward(dinner, tiles.z)
    dstarts, dends = _scan_back(dstate, kept, dread.mT @ reader)

    scores, dscores = _scores(q, k, segment), _scores(dinner, v, segment)
    dq = _first_segment(_outward(dread @ states[:, :, :-1], tiles.f), segment) + dscores @ k
    dk_inner, dv_inner = dscores.mT @ q, scores.mT @ dinner
    dk_end = _last_segment(_to_end(_to_end(v, tiles.z) @ dends, tiles.f), segment)
    dv_end = _to_end(_last_segment(_to_end(k, tiles.f), segment) @ dends.mT, tiles.z)

    own = (tiles.q * tiles.k).sum(-1, keepdim=True)
    dgates = []
    if kept is not None:
        crossing = states[:, :, :-1] * dends * kept
    if tiles.f is not None:
        flow, into_end, through = (q * dq).sub_(k * dk_inner), k * dk_end, crossing.sum(-2, keepdim=True)
        if tiles.f.running.shape[-1] == 1:
            flow, into_end, through = (x.sum(-1, keepdim=True) for x in (flow, into_end, through))
        dgates.append(_gate_gradient(flow, into_end, through, inputs[3], pad, reset))
    if tiles.z is not None:
        inner = (reader @ states[:, :, :-1].mT).mul_(tiles.z.middle).add_(scores @ v)
        flow = inner.mul_(dinner).sub_(v * dv_inner)
        dgates.append(_gate_gradient(flow, v * dv_end, crossing.sum(-1)[..., None, :], inputs[4], pad, reset))

    down = (dy * tiles.v).sum(-1, keepdim=True)
    dq = (down * tiles.k).add_(_times(dq, tiles.f))
    dk = (down * tiles.q).add_(_over(dk_inner.add_(dk_end), tiles.f))
    dv = (own * dy).add_(_over(dv_inner.add_(dv_end), tiles.z))
    dinputs = [_untile(dq, inputs[0]), _untile(dk, inputs[0], pad), _untile(dv, inputs[0])]
    return dstarts, dinputs + dgates


def _prepare(inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> Tiles:
    q, k, v, *logits = inputs
    if pad is not None:
        k = k.masked_fill(pad[..., None], 0)
    f, z = [*(_running_products(logit, pad, reset) for logit in logits), None, None][:2]
    tile = TILE if logits else min(CHUNK, q.shape[2])
    segment = None if reset is None else _tiles(reset[..., None].long(), tile)[..., 0].cumsum(-1)
    return Tiles(_tiles(q, tile), _tiles(k, tile), _tiles(v, tile), f, z, segment)


def _running_products(logit: Tensor, pad: Tensor | None, reset: Tensor | None) -> Gate:
    """Gates of padding, and of a document's first token (which finds nothing to forget), count as 1."""
    log_gate = F.logsigmoid(logit.clamp(min=MIN_GATE_LOGIT))
    for quiet in (pad, reset):
        if quiet is not None:
            log_gate = log_gate.masked_fill(quiet[..., None], 0)
    total = _tiles(log_gate, TILE).cumsum(-2)
    middle = total[..., TILE_MIDDLE, None, :]
    return Gate((total - middle).exp_(), middle.exp())


def _tiles(x: Tensor, tile: int) -> Tensor:
    """[B,H,C,.] -> [B,H,N,tile,.]; what is added at the end is zero: no key, and a log gate of 0."""
    missing = -x.shape[2] % tile
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (-1, tile))


def _untile(x: Tensor, like: Tensor, pad: Tensor | None = None) -> Tensor:
    x = x.flatten(2, 3)[:, :, : like.shape[2]]
    return x if pad is None else x.masked_fill(pad[..., None], 0)


def _times(x: Tensor, gate: Gate | None) -> Tensor:
    return x if gate is None else x * gate.running


def _over(x: Tensor, gate: Gate | None) -> Tensor:
    return x if gate is None else x / gate.running


def _outward(x: Tensor, gate: Gate | None) -> Tensor:
    """From the tile's middle to its start: what meets the state from before the tile."""
    return x if gate is None else x * gate.middle


def _to_end(x: Tensor, gate: Gate | None) -> Tensor:
    """From the tile's middle to its end: what goes into the state after the tile."""
    return x if gate is None else x * gate.end


def _scale(tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    return _times(tiles.q, tiles.f), _over(tiles.k, tiles.f), _over(tiles.v, tiles.z)


def _scores(a: Tensor, b: Tensor, segment: Tensor | None) -> Tensor:
    """a_t . b_s for s < t in the same document. Above the diagonal the scaled products may overflow: they are cut."""
    scores = (a @ b.mT).tril_(-1)
    return scores if segment is None else scores * (segment[..., :, None] == segment[..., None, :])


def _first_segment(x: Tensor, segment: Tensor | None) -> Tensor:
    """Only tokens that see the state from before the tile."""
    return x if segment is None else x * (segment == 0)[..., None]


def _last_segment(x: Tensor, segment: Tensor | None) -> Tensor:
    """Only tokens whose writes are in the state after the tile."""
    return x if segment is None else x * (segment == segment[..., -1:])[..., None]


def _transition(tiles: Tiles, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor]:
    """What a tile keeps of the state before it, and what it writes: S_end = kept * S_start + written."""
    written = _to_end(v, tiles.z).mT @ _last_segment(_to_end(k, tiles.f), tiles.segment)
    kept = None if tiles.f is None else tiles.f.whole
    if tiles.z is not None and kept is not None:
        kept = tiles.z.whole.mT * kept
    if tiles.segment is not None:
        survives = (tiles.segment[..., -1] == 0).to(k.dtype)[..., None, None]
        kept = survives if kept is None else kept * survives
    return (None if kept is None else kept.expand_as(written)), written


def _scan(state: Tensor, kept: Tensor | None, written: Tensor) -> tuple[Tensor, Tensor]:
    """The states [B,H,N+1,d,m] at the tiles' starts and at the last one's end; and that last one alone, since a view
    of it would keep all of them alive as a chunk boundary."""
    states = [state]
    for n, new in enumerate(written.unbind(2)):
        states.append(new + states[n] if kept is None else torch.addcmul(new, kept[:, :, n], states[n]))
    return torch.stack(states, dim=2), states[-1]


def _scan_back(dstate: Tensor, kept: Tensor | None, dstarts: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the state at the chunk's start, and those [B,H,N,d,m] of the states at the tiles' ends."""
    dends = []
    for n, new in reversed(list(enumerate(dstarts.unbind(2)))):
        dends.append(dstate)
        dstate = new + dstate if kept is None else torch.addcmul(new, kept[:, :, n], dstate)
    return dstate, torch.stack(dends[::-1], dim=2)


def _gate_gradient(
    flow: Tensor, into_end: Tensor, through: Tensor, logit: Tensor, pad: Tensor | None, reset: Tensor | None
) -> Tensor:
    """d logit from d log gate_t = sum_{s>=t} flow_s + sum_{s<t} into_end_s + through: what is read inside the tile,
    what earlier tokens wrote into its end state, and what came through from its start."""
    ones = torch.ones(TILE, TILE, dtype=flow.dtype, device=flow.device)
    dlog = (ones.triu() @ flow).add_(ones.tril(-1) @ into_end).add_(through)
    quiet = logit < MIN_GATE_LOGIT
    for flag in (pad, reset):
        if flag is not None:
            quiet = quiet | flag[..., None]
    return (_untile(dlog, logit) * (-logit).sigmoid()).masked_fill_(quiet, 0)
