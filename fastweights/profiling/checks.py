"""What the arguments of a profile must be. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from fastweights.config import ConfigError
from fastweights.utils.errors import Argument


def check_lengths(lengths: Sequence[int]) -> None:
    """Refuse an empty list of lengths, and lengths below 1."""
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            Argument("lengths"), f" must be at least one length of 1 or more tokens, found {list(lengths)}"
        )


def check_counts(**counts: int) -> None:
    """Refuse counts below 1. The error names the argument."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(Argument(name), f" must be at least 1, found {count}")
