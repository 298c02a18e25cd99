"""What perplexity and the recall probe share: forward passes of any causal model, and the check of its positions.

Shapes: B windows or samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from fastweights.evaluation.checks import EvaluationError
from fastweights.modeling.positions import position_limit
from fastweights.utils.errors import Argument


def call_model(model: Any, tokens: Tensor, logits_to_keep: int, **arguments: Any) -> Any:
    """The outputs of a model for tokens [B,T]. Where it can, it computes only the last logits [B,logits_to_keep,V]."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = logits_to_keep
    return model(input_ids=tokens.to(getattr(model, "device", "cpu")), **arguments)


def check_positions(model: Any, length: int, *what: str) -> None:
    """Refuse sequences that are longer than the model's position table.

    Args:
        model: Any causal model.
        length: Tokens of a sequence.
        what: Parts of a message that say what has this length.

    Raises:
        EvaluationError: If the model has fewer positions.
    """
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise EvaluationError(
            *what,
            f" {length}: {type(model).__name__} has learned positions for {limit} tokens; convert it with ",
            Argument("positions"),
            " clamp to read past them",
        )
