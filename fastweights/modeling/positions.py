"""Learned position tables: how long they are, and what happens past their end.

The recurrent state has no end, but the position table of GPT-2 and OPT does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastweights.modeling.families import UnknownFamilyError, family_of
from fastweights.modeling.packing import inputs_are_checked
from fastweights.utils.errors import Call, FastWeightsError


class PositionError(FastWeightsError):
    """A sequence longer than the model's learned position table."""


def table_length(model: Any) -> int | None:
    """The length of a model's learned position table. None: it has no table, or its family is not known."""
    try:
        field = family_of(model).learned_positions
    except UnknownFamilyError:
        return None
    return None if field is None else int(getattr(model.config, field))


def position_limit(model: Any) -> int | None:
    """The number of tokens for which a model has positions.

    Returns:
        None where there is no table, where later tokens get the last position, or where the family is not known.
    """
    return None if _clamps(model) else table_length(model)


def check_length(model: Any, length: int, *what: str, fix: Sequence[str] = ()) -> None:
    """Refuse a sequence of `length` tokens that does not fit a model's position table.

    Args:
        model: Any causal model.
        length: Tokens of the sequence, also of those to generate: an error in the middle would lose what was generated.
        what: Parts of a message that say what has this length, such as an `Argument`.
        fix: Parts of a message that say what to do. By default: fewer tokens, or clamped positions.

    Raises:
        PositionError: The model has fewer positions.
    """
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise PositionError(
            *what or ("the sequence may reach",),
            f" {length}: {family_of(model).name} has learned positions for {limit} tokens. ",
            *fix or _usual_fix(model),
        )


def clamp_positions(model: Any, positions: Tensor) -> Tensor:
    """Positions of any shape, with the last one of the position table for those past its end."""
    length = table_length(model)
    return positions if length is None else positions.clamp(max=length - 1)


def limit_positions(model: Any, position_ids: Tensor) -> Tensor:
    """Positions [B,T] that the position table has: clamped, or checked."""
    if _clamps(model):
        return clamp_positions(model, position_ids)
    if table_length(model) is not None and not inputs_are_checked():
        check_length(model, int(position_ids.max()) + 1)
    return position_ids


def _clamps(model: Any) -> bool:
    return (getattr(model.config, "fastweights", None) or {}).get("positions") == "clamp"


def _usual_fix(model: Any) -> Sequence[str]:
    converted = getattr(model.config, "fastweights", None) is not None
    clamp = "set model.config.fastweights['positions'] = 'clamp'" if converted else "convert it with positions='clamp'"
    call = Call(clamp, "convert the model with --positions clamp")
    return "Use fewer tokens, or ", call, " to give every later token the last position"
