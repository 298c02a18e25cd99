"""What the chunked forms share: tiles of a chunk, the cumulative products of a gate over them, and the gate's gradient.

Shapes: chunks [B,H,C,.]   tiles [B,H,N,TILE,.]   document [B,1,N,TILE]: number of resets so far in the tile
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


def cumulative_products(logit: Tensor, pad: Tensor | None, reset: Tensor | None) -> CumulativeGate:
    """Cumulative products of a gate. Padding and a document's first token, which has nothing to forget, count as 1."""
    log_gate = F.logsigmoid(logit.clamp(min=MIN_GATE_LOGIT))
    for no_gate in (pad, reset):
        if no_gate is not None:
            log_gate = log_gate.masked_fill(no_gate[..., None], 0)
    total = cut(log_gate, TILE).cumsum(-2)
    middle = total[..., TILE_MIDDLE, None, :]
    return CumulativeGate((total - middle).exp_(), middle.exp())


def tile_length(x: Tensor, gated: bool) -> int:
    """Tokens per tile of a chunk x [B,H,C,.] of a rule with or without forget gates."""
    return TILE if gated else min(CHUNK, x.shape[2])


def count_documents(reset: Tensor | None, tile: int) -> Tensor | None:
    """For each token the number of resets so far in its tile, [B,1,C] -> [B,1,N,tile]; None: no resets."""
    return None if reset is None else cut(reset[..., None].long(), tile)[..., 0].cumsum(-1)


def cut(x: Tensor, tile: int) -> Tensor:
    """[B,H,C,.] -> [B,H,N,tile,.]. The last tile is filled with zeros: keys of 0 and log gates of 0 change nothing."""
    missing = -x.shape[2] % tile
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (-1, tile))


def join(x: Tensor, like: Tensor, pad: Tensor | None = None) -> Tensor:
    """The inverse of cut, as long as `like`, with padding set to 0."""
    x = x.flatten(2, 3)[:, :, : like.shape[2]]
    return x if pad is None else x.masked_fill(pad[..., None], 0)


def multiply(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """x times the cumulative products."""
    return x if gate is None else x * gate.running


def divide(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """x over the cumulative products."""
    return x if gate is None else x / gate.running


def middle_to_start(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """Move the reference from the tile's middle to its start, for what reads the state before the tile."""
    return x if gate is None else x * gate.middle


def middle_to_end(x: Tensor, gate: CumulativeGate | None) -> Tensor:
    """Move the reference from the tile's middle to its end, for what is written to the state after the tile."""
    return x if gate is None else x * gate.end


def pair_scores(a: Tensor, b: Tensor, document: Tensor | None, own: bool = False) -> Tensor:
    """a_t . b_s for s < t (with `own` also s = t) in the same document, [..,TILE,TILE].

    Above the diagonal the scaled products may overflow. tril_ writes zeros there; a product with a mask would give NaN.
    """
    scores = (a @ b.mT).tril_(0 if own else -1)
    return scores if document is None else scores * (document[..., :, None] == document[..., None, :])


def reads_start(x: Tensor, document: Tensor | None) -> Tensor:
    """Zero all tokens except those that read the state before the tile."""
    return x if document is None else x * (document == 0)[..., None]


def in_end(x: Tensor, document: Tensor | None) -> Tensor:
    """Zero all tokens except those that are in the state after the tile."""
    return x if document is None else x * (document == document[..., -1:])[..., None]


def survives(decay: Tensor | None, document: Tensor | None) -> Tensor | None:
    """What a tile multiplies the state by: its gates' product, and 0 if a document starts in it. None: 1."""
    if document is None:
        return decay
    no_reset = (document[..., -1] == 0)[..., None, None]
    return no_reset if decay is None else decay * no_reset


def gate_gradient(
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
    return (join(dlog, logit) * (-logit).sigmoid()).masked_fill_(no_gate, 0)
