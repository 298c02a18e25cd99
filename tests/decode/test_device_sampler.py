"""The sampler: distributions of transformers' generate, and tokens that follow from the seed alone."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from helpers.engine import WIDE, converted, greedy, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import VOCAB, tokens
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.decode.device_sampler import Sampler, SamplerMode, filter_scores


def test_sampled_tokens_depend_only_on_the_seed_and_the_prompt() -> None:
    model, prompts = converted(), prompts_of(3, 11, 1, 6)
    samplings = [
        fw.Sampling(temperature=1.5, seed=5),
        fw.Sampling(top_k=20, seed=6),
        fw.Sampling(),
        fw.Sampling(top_p=0.9, repetition_penalty=1.3, seed=2**40 + 5),
    ]
    alone = [fw.Engine(model).generate([p], 12, [s])[0] for p, s in zip(prompts, samplings, strict=True)]
    assert alone[2] == greedy(model, prompts[2], 12)
    for batch_size in (1, 3, 4):
        assert fw.Engine(model, batch_size).generate(prompts, 12, samplings) == alone
    back = fw.Engine(model, 2).generate(prompts[::-1], 12, samplings[::-1])
    assert back[::-1] == alone
    one_for_all = fw.Engine(model, 2).generate([prompts[0]] * 3, 12, fw.Sampling(temperature=1.5, seed=5))
    assert one_for_all[0] == alone[0] and len({tuple(new) for new in one_for_all}) == 3
    high = fw.Engine(model).generate([prompts[0]], 12, fw.Sampling(temperature=1.5, seed=2**40 + 5))
    assert high[0] != alone[0], "the high bits of the seed matter"


def test_without_a_seed_torch_generator_is_used() -> None:
    engine, prompts = fw.Engine(converted(), 2), [prompts_of(4)[0]] * 2
    torch.manual_seed(3)
    first = engine.generate(prompts, 12, WIDE)
    assert first != engine.generate(prompts, 12, WIDE) and first[0] != first[1]
    torch.manual_seed(3)
    assert first == engine.generate(prompts, 12, WIDE)


@pytest.mark.parametrize("penalty", [1.4, 0.8])
def test_repetition_penalty_matches_transformers(penalty: float) -> None:
    model, prompts = converted(), prompts_of(3, 11, 6)
    found = fw.Engine(model, 2).generate(prompts, 15, fw.Sampling(repetition_penalty=penalty))
    assert found == [greedy(model, prompt, 15, repetition_penalty=penalty) for prompt in prompts]
    assert found != fw.Engine(model, 2).generate(prompts, 15)


SAMPLINGS = [
    fw.Sampling(temperature=0.7),
    fw.Sampling(top_k=7),
    fw.Sampling(top_k=500, top_p=0.6),
    fw.Sampling(temperature=1.7, top_k=9, top_p=0.8, repetition_penalty=1.5),
    fw.Sampling(top_p=0.0),
    fw.Sampling(top_p=1.0, repetition_penalty=0.7),
]


def transformers_probabilities(logits: torch.Tensor, prompt: torch.Tensor, sampling: fw.Sampling) -> torch.Tensor:
    """Probabilities [V] of the next token by transformers' own processors, in the order of its generate."""
    scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(prompt[None], logits[None].clone())
    for warper, value in (
        (TemperatureLogitsWarper, sampling.temperature),
        (TopKLogitsWarper, sampling.top_k),
        (TopPLogitsWarper, sampling.top_p),
    ):
        scores = scores if value is None else warper(value)(prompt[None], scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_sampled_frequencies_match_transformers_probabilities(sampling: fw.Sampling) -> None:
    count, prompt = 20_000, tokens(8, seed=3)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    sampler, mode = Sampler(count, VOCAB, torch.device("cpu")), SamplerMode.of([sampling])
    sampler.prepare(mode)
    sampler.set_slot(0, sampling, seed=17, prompt=prompt)
    for parameter in (sampler.samples, sampler.temperature, sampler.top_p, sampler.top_k, sampler.penalty, sampler.key):
        parameter.copy_(parameter[:1].clone().expand_as(parameter))
    if sampler.seen is not None:
        sampler.seen.copy_(sampler.seen[:1].clone().expand_as(sampler.seen))
    drawn = sampler.choose(logits.expand(count, -1), torch.arange(count), mode)
    found = torch.bincount(drawn, minlength=VOCAB) / count
    expected = transformers_probabilities(logits, prompt, sampling)
    assert not found[expected == 0].any(), "filtered tokens are never drawn"
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() <= 5 * spread + 1e-9).all()
    assert float((found - expected).square().sum() / spread.square().sum().clamp(min=1e-12)) < 2.5


def test_top_k_and_top_p_filters_match_transformers() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, VOCAB) * 2).round(decimals=1)  # with ties
    logits[1, 2:] = -math.inf
    logits[1, :2] = 0.0  # two tokens with half of the probability each
    top_k, top_p = torch.tensor([1, 5, VOCAB, 30, 9]), torch.tensor([1.0, 0.5, 0.9, 0.2, 0.99])
    scores, order = filter_scores(logits, top_k, top_p)
    filtered = torch.zeros_like(scores).scatter(1, order, scores)
    for row in range(5):
        expected = TopKLogitsWarper(int(top_k[row]))(None, logits[row : row + 1])
        expected = TopPLogitsWarper(float(top_p[row]))(None, expected)
        assert_close("probabilities", filtered[row].softmax(-1), expected[0].softmax(-1), 1e-6)


def test_noise_of_neighboring_positions_and_seeds_is_independent() -> None:
    """Two positions, and two seeds, choose the same token no more often than chance."""
    count, sampler = 3000, Sampler(3000, VOCAB, torch.device("cpu"))
    sampler.samples.fill_(True)
    drawn = []
    for seed in (0, 1):
        sampler.set_slot(0, fw.Sampling(seed=seed), seed, tokens(1))
        sampler.key.copy_(sampler.key[:1].clone().expand_as(sampler.key))
        drawn.append(sampler.choose(torch.zeros(count, VOCAB), torch.arange(count), SamplerMode(True, False, False)))
    for other in (drawn[1], drawn[0].roll(1)):
        assert abs(float((drawn[0] == other).float().mean()) - 1 / VOCAB) < 5 * (VOCAB * count) ** -0.5


BAD_SAMPLING = {
    "temperature": (0.0, 1e300, 1e-38, float("nan"), "1"),
    "top_k": (0, 2.5, float("inf")),
    "top_p": (1.1, "0.9"),
    "repetition_penalty": (0.0, None, float("inf")),
    "seed": (-1, 1.5, 2**63, True),
}


@pytest.mark.parametrize(("field", "value"), [(f, value) for f, values in BAD_SAMPLING.items() for value in values])
def test_sampling_value_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .*, found '?{re.escape(str(value))}"):
        fw.Sampling(**{field: value})


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_extreme_temperature_and_penalty_still_choose_valid_tokens(scale: float) -> None:
    """At the lowest temperature the tokens are the greedy ones."""
    engine, (prompt,) = fw.Engine(converted()), prompts_of(5)
    (likeliest,), (drawn,) = (engine.generate([prompt], 4, s) for s in (None, fw.Sampling(temperature=scale, seed=0)))
    (_,) = engine.generate([prompt], 4, fw.Sampling(repetition_penalty=scale))
    assert (drawn == likeliest) == (scale < 1)
