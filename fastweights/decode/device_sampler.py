"""The sampler: chooses the next token of every slot on the device, in the order of transformers' generate.

Shapes: logits, scores [B,V]   seen [B,V] bool   parameters of the slots, positions [B]   -> tokens [B]
The random numbers of a sequence are a function of its seed, the position of the token and the token's id. So they do
not depend on the slot, on the other sequences or on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.decode.sampling import Sampling

_LOW = 0xFFFFFFFF


class SamplerMode(NamedTuple):
    """Which steps of the sampler the current sequences need. Each mode has a CUDA graph of its own."""

    samples: bool
    filters: bool
    penalizes: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> SamplerMode:
        """The mode that all of these together need."""
        return cls(
            any(not s.greedy for s in samplings),
            any(s.top_k is not None or s.top_p is not None for s in samplings),
            any(s.repetition_penalty != 1 for s in samplings),
        )

    def covers(self, other: SamplerMode) -> bool:
        """Whether this mode does all that the other one does."""
        return all(own or not needed for own, needed in zip(self, other, strict=True))


GREEDY = SamplerMode(False, False, False)
# All modes that sequences can need, those that do less before those that do more: only sampling filters.
MODES = [
    SamplerMode(samples, filters, penalizes)
    for penalizes in (False, True)
    for samples, filters in ((False, False), (True, False), (True, True))
]


class Sampler:
    """The sampling parameters of all slots as static tensors, and the choice of the next tokens."""

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.samples = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self.temperature, self.top_p, self.penalty = (
            torch.ones(batch_size, dtype=torch.float32, device=device) for _ in range(3)
        )
        self.top_k = torch.full((batch_size,), vocab_size, dtype=torch.long, device=device)
        self.key = torch.zeros_like(self.top_k)
        self.ids = _hash(torch.arange(vocab_size, device=device))
        self.scores = torch.zeros_like(self.top_p)  # logits of the chosen tokens: NaN where any logit of a row is
        self.seen: Tensor | None = None

    def prepare(self, mode: SamplerMode) -> None:
        """Allocate what only this mode needs, before a graph is captured."""
        if mode.penalizes and self.seen is None:
            with torch.inference_mode(False):
                self.seen = torch.zeros(len(self.key), self.vocab_size, dtype=torch.bool, device=self.key.device)

    def set_slot(self, slot: int, sampling: Sampling, seed: int, prompt: Tensor) -> None:
        """Set the parameters of a slot for a new sequence with this prompt [T]."""
        self.samples[slot] = not sampling.greedy
        self.temperature[slot] = 1.0 if sampling.temperature is None else sampling.temperature
        self.top_p[slot] = 1.0 if sampling.top_p is None else sampling.top_p
        self.top_k[slot] = min(sampling.top_k or self.vocab_size, self.vocab_size)
        self.penalty[slot] = sampling.repetition_penalty
        self.key[slot] = _hash_int(_hash_int(seed & _LOW) ^ (seed >> 32))
        if self.seen is not None:
            self.seen[slot].zero_().index_fill_(0, prompt, True)

    def choose(self, logits: Tensor, positions: Tensor, mode: SamplerMode, slots: slice = slice(None)) -> Tensor:
        """Choose the next token of some slots.

        Args:
            logits: [B,V] of these slots.
            positions: Positions of the new tokens in their sequences [B].
            mode: What the sequences need.
            slots: The slots; all by default.

        Returns:
            Tokens [B].
        """
        scores = logits.float() if mode.samples or mode.penalizes else logits
        seen = self.seen[slots] if mode.penalizes and self.seen is not None else None
        if seen is not None:
            penalty = self.penalty[slots, None]
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        tokens = scores.argmax(-1)
        if mode.samples:
            tokens = torch.where(self.samples[slots], self._sample(scores, positions, mode, slots), tokens)
        # argmax and sort take NaN for the largest value, so a row that has one is chosen there.
        self.scores[slots] = scores.gather(1, tokens[:, None])[:, 0].float()
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)
        return tokens

    def _sample(self, scores: Tensor, positions: Tensor, mode: SamplerMode, slots: slice) -> Tensor:
        """The Gumbel-max trick: the argmax of log p + Gumbel noise is a sample of p."""
        scores = scores / self.temperature[slots, None]
        keys = _hash(self.key[slots] ^ _hash(positions))[:, None]
        if not mode.filters:
            return (scores + _gumbel(self.ids ^ keys)).argmax(-1)
        scores, order = filter_scores(scores, self.top_k[slots], self.top_p[slots])
        best = (scores + _gumbel(self.ids[order] ^ keys)).argmax(-1, keepdim=True)
        return order.gather(1, best)[:, 0]


def filter_scores(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Apply top-k and top-p [B] to scores [B,V]: the scores in rising order, -inf for removed ones, and their ids."""
    scores, order = scores.sort(dim=-1)
    smallest = scores.gather(1, scores.shape[1] - top_k[:, None])
    scores = scores.masked_fill(scores < smallest, float("-inf"))
    unlikely = scores.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]
    unlikely[:, -1:].fill_(False)
    return scores.masked_fill(unlikely, float("-inf")), order


def _gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise from 32 bits. Its resolution is finest for large values, which decide the argmax."""
    uniform = ((_hash(bits).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


def _hash(x: Tensor) -> Tensor:
    """A 32-bit hash, in int64 because torch has no unsigned shifts; both factors keep products below 2^63."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _LOW
    x = (x ^ (x >> 15)) * 0x735A2D97 & _LOW
    return x ^ (x >> 15)


def _hash_int(x: int) -> int:
    return int(_hash(torch.tensor(x)))
