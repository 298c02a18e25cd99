"""Softmax attention to the last w tokens: a baseline of its own (rule "local"), or mixed with a rule's output.

Shapes: q [B,T,H,d]   k, v [B,T,Hkv,d]   mask, reset [B,T]   cached k, v [B,w-1,Hkv,d] and their mask [B,w-1]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class WindowCache(NamedTuple):
    """Keys and values of the last w - 1 tokens, real ones last; mask is True where there is a token."""

    k: Tensor
    v: Tensor
    mask: Tensor

    @classmethod
    def empty(cls, k: Tensor, window: int) -> WindowCache:
        zeros = k.new_zeros(k.shape[0], window - 1, *k.shape[2:])
        return cls(zeros, zeros, torch.zeros(zeros.shape[:2], dtype=torch.bool, device=k.device))


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    past: WindowCache | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, WindowCache]:
    """Attend from each token to itself and to the w - 1 real tokens before it, within its document.

    Args:
        q: queries [B,T,H,d]; the scale of the logits is already in q and k.
        k, v: keys and values [B,T,Hkv,d].
        window: w, the number of tokens that a token sees, including itself.
        past: the cache after the previous call. None: empty.
        mask: [B,T] bool, False at padding: its output is 0 and it is not cached. None: no padding.
        reset: [B,T] bool, True at document starts. None: no boundaries.
        softcap: cap of the logits. None: no cap.

    Returns:
        y [B,T,H,d] and the cache for the next call.
    """
    past = WindowCache.empty(k, window) if past is None else past
    real = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    document = torch.zeros_like(real, dtype=torch.long) if reset is None else reset.cumsum(1)
    if mask is not None:
        order = mask.int().argsort(dim=1, stable=True)
        q, k, v, real, document = (_reorder(x, order) for x in (q, k, v, real, document))
    keys, values, seen = (torch.cat(pair, dim=1) for pair in ((past.k, k), (past.v, v), (past.mask, real)))
    document = F.pad(document, (window - 1, 0))
    if mask is not None:
        order_with_past = seen.int().argsort(dim=1, stable=True)
        keys, values, seen, document = (_reorder(x, order_with_past) for x in (keys, values, seen, document))
    y = _banded_softmax(q, keys, values, seen, document, window, softcap)
    if mask is not None:
        y = _reorder(y, order.argsort(dim=1)).masked_fill(~mask[..., None, None], 0)
    if reset is not None:
        seen = seen & (document == reset.sum(1, keepdim=True))
    start = keys.shape[1] - (window - 1)
    return y, WindowCache(keys[:, start:], values[:, start:], seen[:, start:])


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Move padding to the front and real tokens to the end, so that a window is w real tokens wide."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _banded_softmax(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, document: Tensor, window: int, softcap: float | None
) -> Tensor:
    """Blocks of w queries against the 2 w keys of their own block and the one before: the cost grows with T * w."""
    length, block = q.shape[1], min(window, q.shape[1])
    missing = -length % block
    keys, values, seen, document = (_spans(x, window, missing) for x in (keys, values, seen, document))
    q = F.pad(q, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).unflatten(3, (keys.shape[3], -1))

    logits = torch.einsum("bnihgd,bnjhd->bnhgij", q, keys)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows, columns = torch.arange(block, device=q.device)[:, None], torch.arange(block + window, device=q.device)
    near = (columns > rows) & (columns <= rows + window)
    same = document[..., window:, None] == document[..., None, :]
    itself = columns == rows + window
    # a token always sees itself, so that the softmax of a padding token is not empty
    visible = (near & seen[:, :, None, :] & same) | itself
    weights = logits.masked_fill(~visible[:, :, None, None], float("-inf")).softmax(-1).to(values.dtype)
    y = torch.einsum("bnhgij,bnjhd->bnihgd", weights, values)
    return y.flatten(3, 4).flatten(1, 2)[:, :length]


def _spans(x: Tensor, window: int, missing: int) -> Tensor:
    """Keys that the queries of each block can see, [B,w-1+T,...] -> [B,n,w+block,...].

    Neighboring blocks are concatenated, since the gradient of overlapping views (unfold) is slow.
    """
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (1, missing))
    if x.shape[1] <= 2 * window:
        return x[:, None]
    blocks = x.unflatten(1, (-1, window))
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2)
