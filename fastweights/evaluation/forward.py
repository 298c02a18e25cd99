"""What perplexity and the recall probe share: forward passes of any causal model.

Shapes: B windows or samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


def call_model(model: Any, tokens: Tensor, logits_to_keep: int, **arguments: Any) -> Any:
    """The outputs of a model for tokens [B,T]. Where it can, it computes only the last logits [B,logits_to_keep,V]."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = logits_to_keep
    return model(input_ids=tokens.to(getattr(model, "device", "cpu")), **arguments)


def output_layer(model: Any) -> Any:
    """The layer that computes the logits; None where a model does not say."""
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()
