"""How a model is run: eval mode, without its window, and the precision of its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastweights.modeling.layer import converted_layers
from fastweights.utils.errors import FastWeightsError


class WindowError(FastWeightsError):
    """A model without a window that could be left out."""


@contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Eval mode and no gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_window(model: Any, rows: Tensor | None = None) -> Iterator[None]:
    """In its block, converted layers use the output of their rule alone, as if the window's share in the mix were 0.

    Layers that are still attention do not change. With gradient checkpointing the backward pass, which runs layers
    again, belongs into the block.

    Args:
        model: The model.
        rows: [B] bool, True for the rows of a batch to leave the window out of. None: all rows, of any batch.

    Raises:
        WindowError: The model has no window beside a state.
    """
    reason = no_window_reason(model)
    if reason is not None:
        raise WindowError(f"the window cannot be left out: the model {reason}")
    layers = converted_layers(model).values()
    try:
        for layer in layers:
            layer.rows_without_window = torch.ones(1, dtype=torch.bool) if rows is None else rows
        yield
    finally:
        for layer in layers:
            layer.rows_without_window = None


def no_window_reason(model: Any) -> str | None:
    """Why a model cannot run without its window, as what follows "the model"; None where it can."""
    layers = converted_layers(model).values()
    if not layers:
        return "is not converted"
    if any(layer.rule is None for layer in layers):
        return "has the rule local, which is the window alone"
    return None if all(layer.mix is not None for layer in layers) else "has no window"


def is_low_precision(device: torch.device, precision: str) -> bool:
    """Whether a recipe's `precision` means bfloat16 arithmetic on this device."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def autocast(device: torch.device, precision: str = "auto") -> Any:
    """The arithmetic of a model whose weights are in float32, by a recipe's `precision`."""
    return torch.autocast(device.type, torch.bfloat16) if is_low_precision(device, precision) else nullcontext()
