"""The recall probe finds what a model remembers, and draws its sequences as it should."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny import pretrained
from torch import nn

from fastweights import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.evaluation.checks import EvaluationError
from fastweights.evaluation.recall import recall_probe
from fastweights.modeling.positions import PositionError

QUIET = dict(progress=False)


def converted(family: str = "llama", **settings: Any) -> Any:
    return convert(pretrained(family), FastWeightsConfig(**dict(rule="decay", m=4) | settings))


def _spoil(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        module.weight.data.fill_(math.nan)


class Fake(nn.Module):
    """A causal model without weights, which returns `logits_of(tokens)` and records its inputs."""

    def __init__(self, logits_of: Any) -> None:
        super().__init__()
        self.logits_of = logits_of
        self.config = SimpleNamespace(vocab_size=400, bos_token_id=2, eos_token_id=[3, 4])
        self.asked: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        self.asked.append(input_ids)
        return SimpleNamespace(logits=self.logits_of(input_ids))


def looks_up(tokens: torch.Tensor) -> torch.Tensor:
    """The token that followed the last token when it was there before."""
    logits = torch.zeros(*tokens.shape, 400)
    for row, scores in zip(tokens.tolist(), logits, strict=True):
        followers: dict[int, int] = {}
        for i, token in enumerate(row):
            if token in followers:
                scores[i, followers[token]] = 1.0
            if i + 1 < len(row):
                followers[token] = row[i + 1]
    return logits


def test_recall_is_perfect_for_lookup_and_chance_for_guessing() -> None:
    distances = (16, 33, 70)
    found = recall_probe(Fake(looks_up), distances=distances, samples=16, **QUIET)
    for kind, chance in (("pairs", 1 / 8), ("copy", 1 / 200)):
        assert [row.distance for row in getattr(found, kind)] == list(distances)
        assert all(row.accuracy == 1.0 and row.chance == pytest.approx(chance) for row in getattr(found, kind))
    assert all(row.accuracy_vocabulary == 1.0 for row in found.pairs)

    generator = torch.Generator().manual_seed(0)
    guesses = Fake(lambda tokens: torch.rand(*tokens.shape, 400, generator=generator))
    found = recall_probe(guesses, distances=(16,), samples=512, batch_size=64, **QUIET)
    assert found.pairs[0].accuracy == pytest.approx(1 / 8, abs=0.05)
    assert found.pairs[0].accuracy_vocabulary < 0.02
    assert found.copy[0].accuracy < 0.02


def test_recall_sequences_have_the_stated_distance() -> None:
    model = Fake(looks_up)
    recall_probe(model, distances=(40,), pairs=4, samples=6, batch_size=6, **QUIET)
    pairs, copies = model.asked
    assert bool((pairs[:, 0] == 2).all()) and bool(((pairs[:, 1:] >= 100) & (pairs[:, 1:] < 300)).all())
    for row in pairs[:, 1:]:
        same = (row == row[-1]).nonzero()[:, 0].tolist()
        assert same == [len(row) - 1 - 40, len(row) - 1]
    assert torch.equal(copies[:, 1:16], copies[:, 41:56])
    assert not torch.equal(pairs[0], pairs[4])


def test_sequences_start_with_the_bos_token_that_is_given() -> None:
    model = Fake(looks_up)
    recall_probe(model, distances=(40,), samples=2, bos=9, **QUIET)
    assert all(bool((asked[:, 0] == 9).all()) for asked in model.asked)


def test_recall_is_deterministic_given_the_seed() -> None:
    model = converted()
    first, again, other = (
        recall_probe(model, distances=(16, 32), samples=32, seed=seed, **QUIET) for seed in (0, 0, 1)
    )
    assert first == again and first != other
    alone = recall_probe(model, distances=(32,), samples=32, **QUIET)
    assert alone.pairs[0] == first.pairs[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    (
        (dict(distances=(8,)), "distances of at least 16 tokens.*found distances .8."),
        (dict(distances=()), "found distances"),
        (dict(vocabulary=range(10)), "found .* and 10 tokens"),
        (dict(pairs=20), "and 30 tokens"),
    ),
)
def test_recall_with_too_few_positions_or_tokens_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(EvaluationError, match=reason):
        recall_probe(converted(), samples=2, **settings, **QUIET)


def test_recall_respects_the_position_table() -> None:
    with pytest.raises(PositionError, match=r"sequences of 97: .* positions for 96 tokens"):
        recall_probe(converted("gpt2"), distances=(81,), samples=2, **QUIET)
    found = recall_probe(converted("gpt2"), samples=2, **QUIET)
    assert [row.distance for row in found.pairs] == [16, 32, 64]
    spoilt = converted().apply(_spoil)
    with pytest.raises(EvaluationError, match="not a number"):
        recall_probe(spoilt, samples=2, **QUIET)
