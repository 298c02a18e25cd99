"""Softmax attention to the last w tokens, and to the first n of the document (sinks): a baseline of its own (rule
"local"), or mixed with a rule's output.

Shapes: q [B,T,H,d]   k, v [B,T,Hkv,d]   mask, reset [B,T]   cached k, v [B,n+w-1,Hkv,d] and their mask [B,n+w-1]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import ops
from fastweights.ops.window import Documents, documents_of, window_attention


class WindowCache(NamedTuple):
    """Keys and values of the first n and the last w - 1 tokens of a document: each token once, in order, real ones
    last. mask is True where there is a token.
    """

    k: Tensor
    v: Tensor
    mask: Tensor

    @classmethod
    def empty(cls, k: Tensor, window: int, sinks: int = 0) -> WindowCache:
        """A cache before the first token, for keys and values of the kind of k [B,T,H,d]."""
        zeros = k.new_zeros(k.shape[0], cached_tokens(window, sinks), *k.shape[2:])
        return cls(zeros, zeros, torch.zeros(zeros.shape[:2], dtype=torch.bool, device=k.device))


def cached_tokens(window: int, sinks: int) -> int:
    """How many tokens a WindowCache holds."""
    return sinks + window - 1


def whole_sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    softcap: float | None = None,
    sinks: int = 0,
    documents: Documents | None = None,
) -> Tensor:
    """`local_attention` of a sequence from its start on, without a cache: with kernels where they run.

    Args:
        documents: those of `reset`, where they are known already.
    """
    q, k, v = (x.to(autocast_dtype(x)) for x in (q, k, v))
    if not ops.runs_window_kernels(q, k, v):
        return local_attention(q, k, v, window, None, mask, reset, softcap, sinks)[0]
    if mask is None:
        documents = documents_of(reset) if documents is None and reset is not None else documents
        return window_attention(q, k, v, window, sinks, documents, softcap)
    document = torch.zeros_like(mask, dtype=torch.long) if reset is None else reset.cumsum(1)
    order = mask.int().argsort(dim=1, stable=True)
    q, k, v, real, document = (_reorder(x, order) for x in (q, k, v, mask, document))
    index = torch.arange(q.shape[1], device=q.device)
    documents = documents_of(~real | (_document_starts(real, document) == index))
    y = window_attention(q, k, v, window, sinks, documents, softcap)
    return _reorder(y, order.argsort(dim=1)).masked_fill(~mask[..., None, None], 0)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products with a tensor are computed: under autocast, that of autocast."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lower else x.dtype


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    past: WindowCache | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    softcap: float | None = None,
    sinks: int = 0,
) -> tuple[Tensor, WindowCache]:
    """Attend from each token to itself, to the w - 1 real tokens before it and to the first n, within its document.

    Args:
        q: queries [B,T,H,d]; the scale of the logits is already in q and k.
        k, v: keys and values [B,T,Hkv,d].
        window: w, the number of tokens that a token sees, including itself.
        past: the cache after the previous call. None: empty.
        mask: [B,T] bool, False at padding: its output is 0 and it is not cached. None: no padding.
        reset: [B,T] bool, True at document starts. None: no boundaries.
        softcap: cap of the logits. None: no cap.
        sinks: n, how many first tokens of a document all of its tokens see.

    Returns:
        y [B,T,H,d] and the cache for the next call.
    """
    past = WindowCache.empty(k, window, sinks) if past is None else past
    real = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if mask is None else mask
    document = torch.zeros_like(real, dtype=torch.long) if reset is None else reset.cumsum(1)
    if mask is not None:
        order = mask.int().argsort(dim=1, stable=True)
        q, k, v, real, document = (_reorder(x, order) for x in (q, k, v, real, document))
    keys, values, seen = (torch.cat(pair, dim=1) for pair in ((past.k, k), (past.v, v), (past.mask, real)))
    document = F.pad(document, (cached_tokens(window, sinks), 0))
    if mask is not None:
        order_with_past = seen.int().argsort(dim=1, stable=True)
        keys, values, seen, document = (_reorder(x, order_with_past) for x in (keys, values, seen, document))
    # To a single token, the cached sinks are only more of its window.
    near, far = (window + sinks, 0) if q.shape[1] == 1 else (window, sinks)
    y = _banded_softmax(q, keys, values, seen, document, near, softcap, far)
    if mask is not None:
        y = _reorder(y, order.argsort(dim=1)).masked_fill(~mask[..., None, None], 0)
    if reset is not None:
        seen = seen & (document == reset.sum(1, keepdim=True))
    return y, WindowCache(*(_cached(x, seen, window, sinks) for x in (keys, values, seen)))


def _cached(x: Tensor, seen: Tensor, window: int, sinks: int) -> Tensor:
    """The entries [B,n+w-1,...] that the cache retains of x [B,N,...]; seen [B,N]: the current document, at the end."""
    length = x.shape[1]
    last = x[:, length - (window - 1) :]
    if not sinks:
        return last
    # A document that is shorter than the cache is held as a whole.
    held = seen.sum(1).clamp(min=cached_tokens(window, sinks))
    return torch.cat([_entries(x, length - held[:, None], sinks), last], dim=1)


def _entries(x: Tensor, start: Tensor, count: int) -> Tensor:
    """`count` entries of x [B,N,...] from each start [B,n] on: [B,n*count,...].

    Indexing, and not gather: blocks of one document share their sinks, whose gradients gather would add up in no fixed
    order on a GPU.
    """
    index = (start[..., None] + torch.arange(count, device=x.device)).flatten(1).clamp(max=x.shape[1] - 1)
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Move padding to the front and real tokens to the end, so that a window is w real tokens wide."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _banded_softmax(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    document: Tensor,
    window: int,
    softcap: float | None,
    sinks: int,
) -> Tensor:
    """Blocks of w queries against the 2 w keys of their own block and the one before: the cost grows with T * w.

    Before these are the keys of the block's n sinks. A block has one set of them: a token whose document began before
    its window is in the document of the block's first token.
    """
    length, block = q.shape[1], min(window, q.shape[1])
    missing = -length % block
    sink_keys = sink_values = far = None
    if sinks:
        start = _document_starts(seen, document)[:, cached_tokens(window, sinks) :]
        first = start[:, ::block]
        sink_keys, sink_values = (_entries(x, first, sinks).unflatten(1, (-1, sinks)) for x in (keys, values))
        # Query i is entry n + w - 1 + i, and the last entry before its window n - 1 + i.
        gone = torch.arange(length, device=q.device) + sinks - start
        gone = F.pad(gone, (0, missing)).unflatten(1, (-1, block))
        far = torch.arange(sinks, device=q.device) < gone[..., None]
    keys, values, seen, document = (x[:, sinks:] for x in (keys, values, seen, document))
    keys, values = _spans(keys, window, missing, sink_keys), _spans(values, window, missing, sink_values)
    seen, document = _spans(seen, window, missing), _spans(document, window, missing)
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
    if far is not None:
        visible = torch.cat([far, visible], dim=-1)
    weights = logits.masked_fill(~visible[:, :, None, None], float("-inf")).softmax(-1).to(values.dtype)
    y = torch.einsum("bnhgij,bnjhd->bnihgd", weights, values)
    return y.flatten(3, 4).flatten(1, 2)[:, :length]


def _document_starts(seen: Tensor, document: Tensor) -> Tensor:
    """Where the document of each entry starts, [B,N]; without a meaning for entries that are not seen."""
    new = seen & (~F.pad(seen[:, :-1], (1, 0)) | (document != F.pad(document[:, :-1], (1, 0), value=-1)))
    index = torch.arange(seen.shape[1], device=seen.device)
    return torch.where(new, index, 0).cummax(1).values


def _spans(x: Tensor, window: int, missing: int, sinks: Tensor | None = None) -> Tensor:
    """Keys that the queries of each block can see, [B,w-1+T,...] -> [B,blocks,w+block,...], after the block's sinks.

    Neighboring blocks are concatenated, since the gradient of overlapping views (unfold) is slow.
    """
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (1, missing))
    if x.shape[1] <= 2 * window:
        parts = [x[:, None]]
    else:
        blocks = x.unflatten(1, (-1, window))
        parts = [blocks[:, :-1], blocks[:, 1:]]
    parts = parts if sinks is None else [sinks, *parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
