"""Continuous batching pages keys and values, which converted models do not have: every path to it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiny import pretrained, tokens
from transformers import GenerationConfig
from transformers.generation.continuous_batching import continuous_api

import fastweights as fw

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return fw.convert(pretrained(request.param), fw.FastWeightsConfig(m=4))


def paged(**options: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0, **options)


PATHS: dict[str, Callable[[Any], Any]] = {
    "generate_batch": lambda model: model.generate_batch(PROMPTS, generation_config=paged()),
    "generate": lambda model: model.generate(tokens(2, 5), cache_implementation="paged", max_new_tokens=3),
    "generation_config": lambda model: model.generate(tokens(2, 5), paged(cache_implementation="paged")),
    "manager": lambda model: model.init_continuous_batching(generation_config=paged()),
    "context": lambda model: model.continuous_batching_context_manager(generation_config=paged()),
    "forward": lambda model: model(tokens(1, 5), write_index=[torch.arange(5)], cache=object(), use_cache=False),
    "backbone": lambda model: model.base_model(tokens(1, 5), write_index=[torch.arange(5)], cache=object()),
}


@pytest.mark.parametrize("path", PATHS)
def test_continuous_batching_is_refused_with_what_to_use_instead(model: Any, path: str) -> None:
    with pytest.raises(ValueError, match=r"continuous batching.*use generate.*fastweights\.Engine"):
        PATHS[path](model)


def test_a_manager_made_by_hand_fails_its_requests() -> None:
    """The manager's worker calls the model, which refuses: no request may end with text."""
    model = fw.convert(pretrained("llama"), fw.FastWeightsConfig(m=4))
    config = continuous_api.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    manager = continuous_api.ContinuousBatchingManager(model, paged(), config)
    manager.start()
    try:
        request = manager.add_request(PROMPTS[0], max_new_tokens=3)
        result = manager.get_result(request_id=request, timeout=60)
    finally:
        manager.stop(block=True, timeout=60)
    assert result is not None and "continuous batching" in str(result.error)
    assert not result.generated_tokens
