"""How a model is run: eval mode and the precision of its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


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


def is_low_precision(device: torch.device, precision: str) -> bool:
    """Whether a recipe's `precision` means bfloat16 arithmetic on this device."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def autocast(device: torch.device, precision: str = "auto") -> Any:
    """The arithmetic of a model whose weights are in float32, by a recipe's `precision`."""
    return torch.autocast(device.type, torch.bfloat16) if is_low_precision(device, precision) else nullcontext()
