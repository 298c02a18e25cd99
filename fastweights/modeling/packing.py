"""Packed documents: several texts in one row of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from fastweights.modeling.cache import FastWeightsCache


def document_mask(model: Any, position_ids: Tensor) -> Any:
    """The mask that keeps each document's attention to itself, for families that do not see it in position_ids."""
    embeds = torch.empty(*position_ids.shape, 0, dtype=model.dtype, device=position_ids.device)
    return create_causal_mask(model.config, embeds, None, None, position_ids=position_ids)


def document_starts(position_ids: Tensor) -> Tensor:
    """Where position_ids [B,T] start again, a new document begins."""
    return nn.functional.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))


def _document_starts(inputs: dict[str, Any], batch: int) -> Tensor | None:
    """transformers' own convention for packed documents, which have no mask and no past."""
    positions, cache = inputs.get("position_ids"), inputs.get("past_key_values")
    started = cache is not None and cache.batch_size > 0
    if positions is None or inputs.get("attention_mask") is not None or started or positions.shape[1] == 1:
        return None
    reset = document_starts(positions)
    if not torch.compiler.is_compiling() and not bool(reset.any()):
        return None
    return reset.expand(batch, -1)


def _positions(
    batch: int, length: int, mask: Tensor | None, cache: FastWeightsCache | None, device: torch.device
) -> Tensor:
    """Each token's number among the real tokens of its row, those seen before included."""
    seen = cache.lengths[:, None] if cache is not None and cache.lengths is not None else 0
    if mask is None:
        return torch.arange(length, device=device).expand(batch, -1) + seen
    return (mask.long().cumsum(1) - 1 + seen).clamp(min=0)
