"""Continuing a text: sampling options, and the state before and after. The command `generate` is made of these."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.cache import FastWeightsCache
from fastweights.models import FastWeightsMixin


def sampling_options(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """What was asked for and nothing else: transformers' own default would be the 50 likeliest tokens."""
    if temperature is not None and temperature <= 0:
        raise ValueError(f"--temperature must be above 0, found {temperature}: leave it out to decode greedily")
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = {name: value for name, value in asked.items() if value is not None}
    if not sampling and seed is None:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | sampling


def start_state(model: Any, folder: Path, load: Path | None, save: Path | None) -> FastWeightsCache | None:
    """The state before the prompt; None for a model that has none."""
    if isinstance(model, FastWeightsMixin):
        return FastWeightsCache(model.config) if load is None else FastWeightsCache.load(load, model)
    if load is not None or save is not None:
        flag = "--save-state" if load is None else "--load-state"
        raise ValueError(f"{flag} needs a converted model, and {folder} is an ordinary one: run fastweights convert")
    return None


def prompt_tokens(tokenizer: Any, prompt: str, continues: bool) -> Tensor:
    """Tokens [1,T] of the prompt; in the middle of a text nothing marks a beginning."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=not continues).input_ids
    if ids.shape[1] == 0:
        raise ValueError("--prompt is empty: give at least one character to continue from")
    return ids


def continue_text(model: Any, prompt_ids: Tensor, state: FastWeightsCache | None, **options: Any) -> tuple[Tensor, Any]:
    """The prompt's tokens and the new ones, and the cache generate ended with; `state` itself is left alone."""
    if state is None:
        return model.generate(prompt_ids, attention_mask=torch.ones_like(prompt_ids), **options), None
    cache, mask = state.fork(options["num_beams"]), state.mask_for(prompt_ids)
    return model.generate(prompt_ids, attention_mask=mask, past_key_values=cache, **options), cache


def state_after(model: Any, before: FastWeightsCache, last: FastWeightsCache, ids: Tensor) -> FastWeightsCache:
    """The state that has seen all of `ids`. generate never takes in its last token, and leaves a state for each beam,
    in which case the text is read again from the start."""
    state = last if last.batch_size == 1 else before
    unseen = ids[:, int(state.seen - before.seen) :]
    with torch.no_grad():
        model(unseen, past_key_values=state, attention_mask=state.mask_for(unseen))
    return state


def memory_used(cache: FastWeightsCache | None) -> str:
    if cache is None:
        return "no state (not converted)"
    grown = f" and {cache.attention_nbytes:,} bytes of keys and values" if cache.kept else ""
    return f"state {cache.nbytes:,} bytes{grown}"
