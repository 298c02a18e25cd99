"""How the next token is chosen. Importing this file does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastweights.config import ConfigError, is_number, is_whole
from fastweights.utils.errors import Argument

SCALES = (1e-30, 1e30)  # logits times these are still finite in float32


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily, unless a temperature, top_k, top_p or seed is given.

    The parameters have the same meaning, and are applied in the same order, as in transformers: repetition penalty,
    temperature, top_k, top_p.

    Args:
        temperature: Divides the logits.
        top_k: Sample from the k likeliest tokens only.
        top_p: Sample from the smallest set of likeliest tokens whose probabilities sum to p.
        repetition_penalty: Divides positive logits of tokens that were seen, and multiplies negative ones; 1 has no
            effect. It also applies to greedy decoding.
        seed: Seed of the random numbers; by default one is drawn from torch's generator.

    Raises:
        ConfigError: A value is outside its range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, is_kind, least, most, expected, hint in (
            ("temperature", is_number, *SCALES, "above 0", ": leave it out to decode greedily"),
            ("top_k", is_whole, 1, math.inf, "at least 1", ""),
            ("top_p", is_number, 0, 1, "from 0 to 1", ""),
            ("repetition_penalty", is_number, *SCALES, "above 0", ": 1 is no penalty"),
            ("seed", is_whole, 0, 2**63 - 1, "from 0 to 2^63 - 1", ""),
        ):
            value = getattr(self, name)
            if value is None and name != "repetition_penalty":
                continue
            if not is_kind(value):
                kind = "a whole number" if is_kind is is_whole else "a number"
                raise ConfigError(Argument(name), f" must be {kind}, found {value!r}{hint}")
            if not least <= value <= most:
                limits = f" ({least:g} to {most:g})" if value > 0 and least == SCALES[0] else ""
                raise ConfigError(Argument(name), f" must be {expected}{limits}, found {value}{hint}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature is None and self.top_k is None and self.top_p is None and self.seed is None
