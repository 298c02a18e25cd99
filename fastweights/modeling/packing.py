"""Packed documents: several documents in one row of tokens, marked by positions that start again.

Shapes: position_ids, document starts [B,T]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

_checked: ContextVar[bool] = ContextVar("checked", default=False)


@contextmanager
def checked_inputs() -> Iterator[None]:
    """In its block, inputs of converted models are taken as they are: position_ids fit the model, and are given only
    where rows are packed. Nothing is then read from the device to check them, for which the host would have to wait."""
    before = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(before)


def inputs_are_checked() -> bool:
    """Whether inputs must not be read: they are checked, or torch.compile traces the model."""
    return torch.compiler.is_compiling() or _checked.get()


def document_mask(model: Any, position_ids: Tensor) -> Any:
    """The mask that restricts attention to each document, for families that do not read it from position_ids."""
    embeds = torch.empty(*position_ids.shape, 0, dtype=model.dtype, device=position_ids.device)
    return create_causal_mask(model.config, embeds, None, None, position_ids=position_ids)


def document_starts(position_ids: Tensor) -> Tensor:
    """True where position_ids [B,T] do not continue: a new document starts there."""
    return nn.functional.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))


def packed_starts(inputs: dict[str, Any], batch: int) -> Tensor | None:
    """Document starts [B,T] of a model's inputs by transformers' convention: packed rows have positions, but no
    attention mask and no past. None: the rows are not packed."""
    positions, cache = inputs.get("position_ids"), inputs.get("past_key_values")
    started = cache is not None and cache.batch_size > 0
    if positions is None or inputs.get("attention_mask") is not None or started or positions.shape[1] == 1:
        return None
    reset = document_starts(positions)
    if not inputs_are_checked() and not bool(reset.any()):
        return None
    return reset.expand(batch, -1)
