"""Learned position tables: how long they are, and what happens past their end.

The recurrent state has no end, but the position table of GPT-2 and OPT does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.modeling.families import UnknownFamilyError, family_of
from fastweights.utils.errors import Call, FastWeightsError


class PositionError(FastWeightsError):
    """A sequence longer than the model's learned position table."""


def position_limit(model: Any) -> int | None:
    """The length of a model's learned position table.

    Returns:
        None where there is no table, where later tokens get the last position, or where the family is not known.
    """
    try:
        field = family_of(model).learned_positions
    except UnknownFamilyError:
        return None
    clamped = (getattr(model.config, "fastweights", None) or {}).get("positions") == "clamp"
    return None if field is None or clamped else int(getattr(model.config, field))


def check_length(model: Any, length: int) -> None:
    """Refuse a sequence of `length` tokens that does not fit the position table.

    Raises:
        PositionError: also before generating; an error in the middle of a sequence would lose what was generated.
    """
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise PositionError(
            f"{model.family.name} has learned positions for {limit} tokens and this sequence may reach {length}. The "
            "state has no end, but the position table does: ask for fewer tokens, or ",
            Call("set model.config.fastweights['positions'] = 'clamp'", "convert the model with --positions clamp"),
            " to give every later token the last position",
        )


def limit_positions(model: Any, position_ids: Tensor) -> Tensor:
    """Positions [B,T] that the position table has: clamped, or checked."""
    if not model.family.learned_positions:
        return position_ids
    if model.config.fastweights.get("positions") == "clamp":
        return position_ids.clamp(max=getattr(model.config, model.family.learned_positions) - 1)
    if not torch.compiler.is_compiling():
        check_length(model, int(position_ids.max()) + 1)
    return position_ids
