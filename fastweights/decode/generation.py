"""Generating one sequence with any model: by the decode engine where it can, by transformers' generate otherwise.

Shapes: prompt_ids [1,T]   ids, prompt and new tokens [1,T+N]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, set_seed

from fastweights.config import ConfigError
from fastweights.decode.batch import GenerationError, nan_error
from fastweights.decode.engine import Engine
from fastweights.decode.packing import UnsupportedModel
from fastweights.decode.prefill import PREFILL_CHUNK, prefill
from fastweights.decode.sampling import Sampling
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.positions import check_length
from fastweights.utils.errors import Argument, FastWeightsError

# A hybrid's attention layers reserve memory for all new tokens, and every step attends to all of it. For more new
# tokens than this, transformers' growing cache is used instead.
MAX_RESERVED_TOKENS = 4096


def generate_sequence(
    model: Any,
    prompt_ids: Tensor,
    state: FastWeightsCache | None,
    sampling: Sampling | None = None,
    max_new_tokens: int = 100,
    num_beams: int = 1,
    streamer: Any = None,
    weights: str | None = None,
) -> tuple[Tensor, FastWeightsCache | None]:
    """Generate the continuation of one prompt.

    The engine is used for converted models. transformers' generate is used for unconverted models, for beam search, and
    for attention layers that the engine does not support or for which it would have to reserve much memory.

    Args:
        model: A causal language model, converted or not.
        prompt_ids: Token ids [1,T].
        state: The state before the prompt, which is not changed; None only for a model that is not converted.
        sampling: How tokens are chosen; greedily by default.
        max_new_tokens: Number of tokens to generate unless an end-of-text token comes first.
        num_beams: Number of beams.
        streamer: A streamer of transformers that receives the tokens as they are generated.
        weights: As for `Engine`; only where the engine is used.

    Returns:
        Prompt and new tokens [1,T+N], and the cache afterwards: of `num_beams` rows, without the last token.

    Raises:
        PositionError: The sequence may become longer than the model's position table.
        GenerationError: Logits are NaN.
        ConfigError: `weights` cannot be used here.
    """
    sampling = Sampling() if sampling is None else sampling
    cache = None if state is None else state.fork(num_beams)
    engine = None
    if cache is not None and num_beams == 1 and (not cache.attention_layers or max_new_tokens <= MAX_RESERVED_TOKENS):
        seen = 0 if cache.lengths is None else int(cache.lengths[0])
        engine = _engine_for(model, seen + prompt_ids.shape[1] + max_new_tokens, weights)
    if engine is None and weights is not None:
        reason = "is for the decode engine, and transformers generates with an unconverted model, with several beams"
        raise ConfigError(
            Argument("weights"), f"={weights!r} {reason}, or with attention layers that need much memory: leave it out"
        )
    if engine is None or cache is None:
        return _generate_with_transformers(
            model, prompt_ids, state, cache, sampling, max_new_tokens, num_beams, streamer
        )
    new_tokens = _generate_with_engine(engine, prompt_ids, cache, sampling, max_new_tokens, streamer)
    if cache.attention_layers and len(new_tokens) > 1:  # the engine leaves the cache as it was after the prompt
        prefill(model, prompt_ids.new_tensor(new_tokens[:-1]), cache)
    return torch.cat([prompt_ids, prompt_ids.new_tensor([new_tokens])], dim=1), cache


def state_after(model: Any, before: FastWeightsCache, cache: FastWeightsCache, ids: Tensor) -> FastWeightsCache:
    """Return the state that has seen all of a generated sequence.

    Generation does not feed its last token to the model. After beam search `cache` has a row for each beam, so the
    sequence is read again from `before`.

    Args:
        model: The converted model.
        before: The state before the prompt.
        cache: The cache that `generate_sequence` returned.
        ids: The tokens that `generate_sequence` returned [1,T].
    """
    state = cache if cache.batch_size == 1 else before
    unseen = ids[:, int(state.seen - before.seen) :]
    with torch.no_grad():
        for chunk in unseen.split(PREFILL_CHUNK, dim=1):
            model(chunk, past_key_values=state)
    return state


def _engine_for(model: Any, max_length: int, weights: str | None) -> Engine | None:
    try:
        return Engine(model, max_length=max_length, weights=weights)
    except UnsupportedModel:
        return None


def _generate_with_engine(
    engine: Engine,
    prompt_ids: Tensor,
    state: FastWeightsCache,
    sampling: Sampling,
    max_new_tokens: int,
    streamer: Any,
) -> list[int]:
    put = (lambda ids: None) if streamer is None else streamer.put
    put(prompt_ids)
    options: dict[str, Any] = {"states": [state], "on_token": lambda _, token: put(torch.tensor([token]))}
    (new_tokens,) = engine.generate([prompt_ids[0]], max_new_tokens, sampling, progress=True, **options)
    if streamer is not None:
        streamer.end()
    return new_tokens


def _generate_with_transformers(
    model: Any,
    prompt_ids: Tensor,
    state: FastWeightsCache | None,
    cache: FastWeightsCache | None,
    sampling: Sampling,
    max_new_tokens: int,
    num_beams: int,
    streamer: Any,
) -> tuple[Tensor, FastWeightsCache | None]:
    if state is None:  # converted models check it themselves
        length = prompt_ids.shape[1]
        what = Argument("max_new_tokens"), f" {max_new_tokens} after {length} tokens makes a sequence of"
        check_length(model, length + max_new_tokens - 1, *what)
    options = generate_arguments(sampling) | {"max_new_tokens": max_new_tokens, "num_beams": num_beams}
    mask = torch.ones_like(prompt_ids) if state is None else state.mask_for(prompt_ids)
    if cache is not None:
        options["past_key_values"] = cache
    if sampling.seed is not None:
        set_seed(sampling.seed)
    options["logits_processor"] = [_RefuseNaN(prompt_ids.shape[1])]
    try:
        ids = model.generate(prompt_ids, attention_mask=mask, streamer=streamer, trust_remote_code=False, **options)
    except FastWeightsError:
        raise
    except (ValueError, TypeError) as error:  # such as a mode that needs code of the hub
        place = f"the generation_config of {model.config._name_or_path}"
        raise GenerationError(f"transformers cannot generate with {place}: {error}") from error
    return ids, cache


class _RefuseNaN(LogitsProcessor):
    """Raises GenerationError when scores [B,V] contain NaN; transformers' own generate would print nothing."""

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if bool(scores.isnan().any()):
            raise nan_error(input_ids.shape[1] - self.prompt_length)
        return scores


def generate_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the same sampling as arguments of transformers' generate, whose own default is top_k=50."""
    penalty = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.greedy:
        return {"do_sample": False} | penalty
    given = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return {"do_sample": True} | neutral | {k: v for k, v in given.items() if v is not None} | penalty
