"""How far back a teacher's heads attend.

Shapes: x [B,T,D]   q [B,T,H,d]   k [B,T,Hkv,d]   place [B,T]: a token's place in its document, from 0
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastweights.modeling.attention_weights import attention_weights, queries_and_keys
from fastweights.modeling.layer import AttentionShape, FastWeightsAttention
from fastweights.training.losses import Batch, CapturedAttention, capture_attention, sequence_info

# Attention weights that are computed at once, at most (but for one query): they bound the memory that it takes.
BLOCK_WEIGHTS = 2**24
# A document's first tokens get attention at any distance, whatever they are: it says nothing about memory.
FIRST_TOKENS = 4


@torch.no_grad()
def attention_distances(
    layers: dict[int, FastWeightsAttention], teacher: Any, batches: Iterable[Batch]
) -> dict[int, Tensor]:
    """Measure how far back the teacher attends to what the states of new layers have to remember.

    That is the attention to tokens that have left the layer's window and are not among the document's first ones. Its
    mean distance counts from the window's oldest token: a state that forgets at a constant rate needs to remember for
    that long, whatever the window holds.

    Args:
        layers: Converted layers with a state, by their number.
        teacher: The model that they come from.
        batches: Tokens to measure on.

    Returns:
        For each layer the distances [S] of its states in float64, in tokens. Heads that share a state count by how much
        of their attention is that far. 0: none is.
    """
    sums: dict[int, Tensor] = {}
    for batch in batches:
        captured = capture_attention(teacher, batch)
        for index, layer in layers.items():
            sums[index] = sums.get(index, 0) + _layer_sums(layer, teacher, index, captured[index], batch)
    distances = {}
    for index, layer in layers.items():
        assert layer.rule is not None
        weighted, mass = sums[index].unflatten(1, (layer.rule.states, -1)).sum(2)
        distances[index] = torch.where(mass > 0, weighted / mass.clamp(min=1e-300), 0.0)
    return distances


def _layer_sums(
    layer: FastWeightsAttention, teacher: Any, index: int, captured: CapturedAttention, batch: Batch
) -> Tensor:
    """far_attention of one layer of the teacher: its queries and keys, computed again from the layer's input."""
    keywords = captured.keywords
    x = captured.arguments[0] if captured.arguments else keywords["hidden_states"]
    q, k, shape = queries_and_keys(teacher, index, x, keywords.get("position_embeddings"))
    starts = sequence_info(batch).reset
    return far_attention(q, k, shape, starts, shape.window(layer.config), max(FIRST_TOKENS, layer.config.sinks))


def far_attention(
    q: Tensor, k: Tensor, shape: AttentionShape, starts: Tensor | None, window: int, first: int
) -> Tensor:
    """Sum the attention to tokens at least `window` tokens back, without each document's first ones.

    Args:
        q: Queries [B,T,H,d]; the scale of the logits is in q and k.
        k: Keys [B,T,Hkv,d].
        shape: The attention's options.
        starts: [B,T], True at the document starts inside a row. None: there are none.
        window: Last tokens that do not count. Distances count from the oldest of them, without a window from the query.
        first: How many first tokens of a document do not count.

    Returns:
        [2,H] in float64: the sum of attention times distance, and that of attention.
    """
    sums = torch.zeros(2, shape.heads, dtype=torch.float64, device=q.device)
    columns = torch.arange(q.shape[1], device=q.device)
    size = max(1, BLOCK_WEIGHTS // (shape.heads * len(columns)))
    starts = torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device) if starts is None else starts
    for queries, keys, row_starts in zip(q, k, starts, strict=True):
        place = columns - torch.where(row_starts, columns, 0).cummax(0).values
        for rows in columns.split(size):
            weights = attention_weights(queries, keys, shape, rows, place)
            seen = columns[: weights.shape[-1]]
            distance = rows[:, None] - seen
            far = weights * ((distance >= window) & (place[seen] >= first))
            beyond = far * (distance - max(window - 1, 0))
            sums += torch.stack([x.sum((1, 2), dtype=torch.float64) for x in (beyond, far)])
    return sums
