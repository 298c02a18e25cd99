"""Choosing the next token of every slot on the device: penalty, temperature, top-k, top-p in transformers' order.

Shapes: logits, scores [B,V]   seen [B,V] bool   parameters and counters [B]   -> tokens [B]
A sequence's random numbers are a function of its seed, the place of the token in its text and the token's id, so they
do not depend on the slot, on the neighbours or on the kind of device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.config import Sampling

_LOW = 0xFFFFFFFF


class Mode(NamedTuple):
    """What of the choice is needed at all by the sequences at hand: each mode is a step, and a CUDA graph, of its
    own."""

    samples: bool
    filters: bool
    penalizes: bool

    @classmethod
    def of(cls, wanted: Sequence[Sampling]) -> Mode:
        return cls(
            any(not s.greedy for s in wanted),
            any(s.top_k is not None or s.top_p is not None for s in wanted),
            any(s.repetition_penalty != 1 for s in wanted),
        )


class Sampler:
    """The slots' parameters as tensors that stay where they are, and the choice made with them."""

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.samples = torch.zeros(batch, dtype=torch.bool, device=device)
        self.temperature, self.top_p, self.penalty = (
            torch.ones(batch, dtype=torch.float32, device=device) for _ in range(3)
        )
        self.top_k = torch.full((batch,), vocabulary, dtype=torch.long, device=device)
        self.key = torch.zeros_like(self.top_k)
        self.ids = _mixed(torch.arange(vocabulary, device=device))
        self.seen: Tensor | None = None

    def prepare(self, mode: Mode) -> None:
        """Before a graph is captured: what only this mode needs."""
        if mode.penalizes and self.seen is None:
            with torch.inference_mode(False):
                self.seen = torch.zeros(len(self.key), self.vocabulary, dtype=torch.bool, device=self.key.device)

    def fill(self, slot: int, sampling: Sampling, seed: int, text: Tensor) -> None:
        """Give a slot to a sequence whose text so far is `text` [T]."""
        self.samples[slot] = not sampling.greedy
        self.temperature[slot] = 1.0 if sampling.temperature is None else sampling.temperature
        self.top_p[slot] = 1.0 if sampling.top_p is None else sampling.top_p
        self.top_k[slot] = min(sampling.top_k or self.vocabulary, self.vocabulary)
        self.penalty[slot] = sampling.repetition_penalty
        self.key[slot] = _mix(_mix(seed & _LOW) ^ (seed >> 32))
        if self.seen is not None:
            self.seen[slot].zero_().index_fill_(0, text, True)

    def choose(self, logits: Tensor, places: Tensor, mode: Mode, slots: slice = slice(None)) -> Tensor:
        """The next tokens of some slots, whose places in their texts these are."""
        scores = logits.float() if mode.samples or mode.penalizes else logits
        seen = self.seen[slots] if mode.penalizes and self.seen is not None else None
        if seen is not None:
            penalty = self.penalty[slots, None]
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        tokens = scores.argmax(-1)
        if mode.samples:
            tokens = torch.where(self.samples[slots], self._sample(scores, places, mode, slots), tokens)
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens

    def _sample(self, scores: Tensor, places: Tensor, mode: Mode, slots: slice) -> Tensor:
        """The largest of log p + Gumbel noise is a sample of p."""
        scores = scores / self.temperature[slots, None]
        keys = _mixed(self.key[slots] ^ _mixed(places))[:, None]
        if not mode.filters:
            return (scores + _gumbel(self.ids ^ keys)).argmax(-1)
        scores, order = filtered(scores, self.top_k[slots], self.top_p[slots])
        best = (scores + _gumbel(self.ids[order] ^ keys)).argmax(-1, keepdim=True)
        return order.gather(1, best)[:, 0]


def filtered(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in rising order, with -inf for those left out, and whose they are."""
    scores, order = scores.sort(dim=-1)
    smallest = scores.gather(1, scores.shape[1] - top_k[:, None])
    scores = scores.masked_fill(scores < smallest, float("-inf"))
    unlikely = scores.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]
    unlikely[:, -1:].fill_(False)
    return scores.masked_fill(unlikely, float("-inf")), order


def _gumbel(bits: Tensor) -> Tensor:
    """From 32 random bits, fine where the noise is large: there a token is chosen."""
    uniform = ((_mixed(bits).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit hash, in int64 because torch has no unsigned shifts; both factors keep products below 2^63."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _LOW
    x = (x ^ (x >> 15)) * 0x735A2D97 & _LOW
    return x ^ (x >> 15)


def _mix(x: int) -> int:
    return int(_mixed(torch.tensor(x)))
