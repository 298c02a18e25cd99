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
from torch.nn import functional as F

from fastweights.rules.base import MIN_GATE_LOGIT

CHUNK = 64
# Tokens per tile. Cumulative products relative to the middle of 16 tokens stay within e^80 even at the gates' floor,
# sigmoid(-10); float32 ends at e^88. Without gates there are no such products, and a tile is the whole chunk.
TILE = 16
TILE_MIDDLE = TILE // 2 - 1


class CumulativeGate(NamedTuple):
    """Cumulative products of one gate over a tile, divided by the product at its middle, and that product."""

    running: Tensor
    middle: Tensor

    @property
    def end(self) -> Tensor:
        """From the middle of the tile to its end."""
        return self.running[..., -1:, :]

    @property
    def whole(self) -> Tensor:
        """From the start of the tile to its end."""
        return self.end * self.middle


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
    inner = _scores(q, k, tiles.document) @ v
    inner += _middle_to_start(
        _reads_start(_middle_to_start(q, tiles.f), tiles.document) @ states[:, :, :-1].mT, tiles.z
    )
    own = (tiles.q * tiles.k).sum(-1, keepdim=True) * tiles.v
    return _untile(own.add_(_multiply(inner, tiles.z)), inputs[0], pad), end


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
    dy = _tiles(dy if pad is None else dy.masked_fill(pad[..., None], 0), tiles.q.shape[-2])
    q, k, v = _scale(tiles)
    decay, update = _transition(tiles, k, v)
    states, _ = _scan(state, decay, update)
    dinner = _multiply(dy, tiles.z)
    q_start, dy_start = _reads_start(_middle_to_start(q, tiles.f), document), _middle_to_start(dinner, tiles.z)
    dstarts, dends = _scan_back(dstate, decay, dy_start.mT @ q_start)

    scores, dscores = _scores(q, k, document), _scores(dinner, v, document)
    dq = _reads_start(_middle_to_start(dy_start @ states[:, :, :-1], tiles.f), document) + dscores @ k
    dk_inner, dv_inner = dscores.mT @ q, scores.mT @ dinner
    dk_end = _in_end(_middle_to_end(_middle_to_end(v, tiles.z) @ dends, tiles.f), document)
    dv_end = _middle_to_end(_in_end(_middle_to_end(k, tiles.f), document) @ dends.mT, tiles.z)

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
        dgates.append(_gate_gradient(flow, into_end, passing, inputs[3], pad, reset))
    if tiles.z is not None:
        inner = (q_start @ states[:, :, :-1].mT).mul_(tiles.z.middle).add_(scores @ v)
        flow = inner.mul_(dinner).sub_(v * dv_inner)
        dgates.append(_gate_gradient(flow, v * dv_end, crossing.sum(-1)[..., None, :], inputs[4], pad, reset))

    # the tokens' own terms (q_t . k_t) v_t, added after the sums for the gates
    down = (dy * tiles.v).sum(-1, keepdim=True)
    dq = (down * tiles.k).add_(_multiply(dq, tiles.f))
    dk = (down * tiles.q).add_(_divide(dk_inner.add_(dk_end), tiles.f))
    dv = (own * dy).add_(_divide(dv_inner.add_(dv_end), tiles.z))
    dinputs = [_untile(dq, inputs[0]), _untile(dk, inputs[0], pad), _untile(dv, inputs[0])]
    return dstarts, dinputs + dgates


def _prepare(inputs: list[Tensor], pad: Tensor | None, reset: Tensor | None) -> Tiles:
    """Cut a chunk into tiles and compute the cumulative products of its gates."""
    q, k, v, *logits = inputs
    if pad is not None:
        k = k.masked_fill(pad[..., None], 0)
    f, z = [*(_cumulative_products(logit, pad, reset) for logit in logits), None, None][:2]
    tile = TILE if logits else min(CHUNK, q.shape[2])
    document = None if reset is None else _tiles(reset[..., None].long(), tile)[..., 0].cumsum(-1)
    return Tiles(_tiles(q, tile), _tiles(k, tile), _tiles(v, tile), f, z, document)


def _cumulative_products(logit: Tensor, pad: Tensor | None, reset: Tensor | None) -> CumulativeGate:
    """Cumulative products of a gate. Padding and a document's first token, which has nothing to forget, count as 1."""
    log_gate = F.logsigmoid(logit.clamp(min=MIN_GATE_LOGIT))
    for no_gate in (pad, reset):
        if no_gate is not None:
            log_gate = log_gate.masked_fill(no_gate[..., None], 0)
    total = _tiles(log_gate, TILE).cumsum(-2)
    middle = total[..., TILE_MIDDLE, None, :]
    return CumulativeGate((total - middle).exp_(), middle.exp())


def _tiles(x: Tensor, tile: int) -> Tensor:
    """[B,H,C,.] -> [B,H,N,tile,.]. The last tile is filled with zeros: keys of 0 and log gates of 0 change nothing."""
    missing = -x.shape[2] % tile
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (-1, tile))


def _untile(x: Tensor, like: Tensor, pad: Tensor | None = None) -> Tensor:
    """The inverse of _tiles, as long as `like`, with padding set to 0."""
    x = x.flatten(2, 3)[:, :, : like.shape[2]]
    return x if pad is None else x.masked_fill(pad[..., None], 0)


def _multiply(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """x times the cumulative products."""
    return x if gate is None else x * gate.running


def _divide(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """x over the cumulative products."""
    return x if gate is None else x / gate.running


def _middle_to_start(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """Move the reference from the tile's middle to its start, for what reads the state before the tile."""
    return x if gate is None else x * gate.middle


def _middle_to_end(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """Move the reference from the tile's middle to its end, for what is written to the state after the tile."""
    return x if gate is None else x * gate.end


def _scale(tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """q F, k / F and v / Z."""
    return _multiply(tiles.q, tiles.f), _divide(tiles.k, tiles.f), _divide(tiles.v, tiles.z)


def _scores(a: Tensor, b: Tensor, document: Tensor | None) -> Tensor:
    """a_t . b_s for s < t in the same document, [..,TILE,TILE].

    Above the diagonal the scaled products may overflow. tril_ writes zeros there; a product with a mask would give NaN.
    """
    scores = (a @ b.mT).tril_(-1)
    return scores if document is None else scores * (document[..., :, None] == document[..., None, :])


def _reads_start(x: Tensor, document: Tensor | None) -> Tensor:
    """Zero all tokens except those that read the state before the tile."""
    return x if document is None else x * (document == 0)[..., None]


def _in_end(x: Tensor, document: Tensor | None) -> Tensor:
    """Zero all tokens except those that are in the state after the tile."""
    return x if document is None else x * (document == document[..., -1:])[..., None]


def _transition(tiles: Tiles, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor]:
    """What a tile does to the state: S_end = decay * S_start + update."""
    update = _middle_to_end(v, tiles.z).mT @ _in_end(_middle_to_end(k, tiles.f), tiles.document)
    decay = None if tiles.f is None else tiles.f.whole
    if tiles.z is not None and decay is not None:
        decay = tiles.z.whole.mT * decay
    if tiles.document is not None:
        survives = (tiles.document[..., -1] == 0).to(k.dtype)[..., None, None]
        decay = survives if decay is None else decay * survives
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


def _gate_gradient(
    flow: Tensor, into_end: Tensor, passing: Tensor, logit: Tensor, pad: Tensor | None, reset: Tensor | None
) -> Tensor:
    """d logit from d log gate_t = sum_{s>=t} flow_s + sum_{s<t} into_end_s + passing.

    `flow` is what reads inside the tile contribute, `into_end` what earlier tokens wrote into its end state, and
    `passing` what goes from its start state to its end state. It is zero where the gate counts as 1 and below the
    floor.
    """
    ones = torch.ones(TILE, TILE, dtype=flow.dtype, device=flow.device)
    dlog = (ones.triu() @ flow).add_(ones.tril(-1) @ into_end).add_(passing)
    no_gate = logit < MIN_GATE_LOGIT
    for flag in (pad, reset):
        if flag is not None:
            no_gate = no_gate | flag[..., None]
    return (_untile(dlog, logit) * (-logit).sigmoid()).masked_fill_(no_gate, 0)
