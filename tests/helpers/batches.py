"""Batches of tokens for the tests of losses."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.tiny import tokens

LENGTHS = (9, 14, 4)


def batch_of(ids: Tensor, starts: tuple[int, ...] = (0,)) -> dict[str, Tensor]:
    """Rows with documents at the same places: positions count from 0 again, a document's first token has no label."""
    places = torch.zeros(ids.shape[1], dtype=torch.long)
    for start in starts:
        places[start:] = torch.arange(ids.shape[1] - start)
    labels = ids.clone()
    labels[:, list(starts)] = -100
    return {"input_ids": ids, "position_ids": places.expand_as(ids), "labels": labels}


def packed(seed: int = 0) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Two rows of three documents, and the same documents by themselves."""
    ids = tokens(2, sum(LENGTHS), seed=seed)
    starts = tuple(sum(LENGTHS[:i]) for i in range(len(LENGTHS)))
    return batch_of(ids, starts), [batch_of(part) for part in ids.split(LENGTHS, dim=1)]
