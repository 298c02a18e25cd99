"""A slot of the decode model, read back as a state, is the state that the model's forward has after the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.engine import SETTINGS, converted, name
from helpers.relative_error import assert_close
from helpers.tiny import config_of, tokens

import fastweights as fw
from fastweights.decode.model import DecodeModel, ForwardDecodeModel
from fastweights.decode.prefill import prefill
from fastweights.modeling.cache import FastWeightsCache

HYBRIDS = [
    dict(m=6, layers=(0,)),
    dict(rule="delta", m=6, window=3, sinks=2, layers=(1,)),
    dict(rule="local", window=4, sinks=3, layers=(0,)),
]
MORE = [dict(rule=rule, m=6, window=4, sinks=3) for rule in ("add", "delta", "gated", "gated_delta", "decay", "local")]
# Prompt and new tokens: shorter and longer than windows, with and without a wrapped ring.
LENGTHS = [(1, 1), (2, 3), (9, 12)]


def read(decoder: Any, slot: int, new: torch.Tensor) -> None:
    """Feed tokens to a slot. The others get the token 0."""
    for token in new:
        decoder.tokens.zero_()[slot] = token
        decoder.step()


def assert_same_state(model: Any, found: FastWeightsCache, ids: torch.Tensor) -> None:
    """Equal to a fresh state after ids [T], tensor by tensor."""
    _, expected = prefill(model, ids)
    assert torch.equal(found.seen, expected.seen) and torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.fingerprint, expected.fingerprint)
    own, other = found.named_tensors(), expected.named_tensors()
    assert own.keys() == other.keys()
    for key, tensor in own.items():
        assert tensor.shape == other[key].shape and tensor.dtype == other[key].dtype, key
        assert_close(key, tensor.double(), other[key].double(), 1e-4)


def check(model: Any, decoder: Any, folder: Path) -> None:
    for prompt_length, count in LENGTHS:
        ids, new = tokens(prompt_length, seed=prompt_length), tokens(count, seed=50 + count)
        decoder.set_slot(1, prefill(model, ids)[1])
        read(decoder, 1, new)
        found = decoder.get_slot(1, new.tolist())
        whole = torch.cat([ids, new])
        assert_same_state(model, found, whole)
        # It is a copy, can be continued and saved, and a slot can be set to it again.
        read(decoder, 1, new)
        found.save(folder / "state", model)
        loaded = FastWeightsCache.load(folder / "state", model)
        more = tokens(5, seed=7)
        expected = model(torch.cat([whole, more])[None]).logits[0, -1]
        for state in (found.fork(), loaded):
            assert_close("logits", prefill(model, more, state)[0][0], expected, 1e-4)
        decoder.set_slot(0, found)
        for token in more:
            decoder.tokens.zero_()[0] = token
            logits = decoder.step()[0]
        assert_close("logits of a slot", logits, expected, 1e-4)
        assert_same_state(model, decoder.get_slot(0, more.tolist()), torch.cat([whole, more]))


@pytest.mark.parametrize("settings", SETTINGS + MORE, ids=name)
@torch.no_grad()
def test_slot_read_back_is_the_state_of_the_model(settings: dict[str, Any], tmp_path: Path) -> None:
    model = converted(**settings)
    check(model, DecodeModel(model, 2), tmp_path)


@pytest.mark.parametrize("settings", HYBRIDS, ids=name)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@torch.no_grad()
def test_slot_of_a_hybrid_read_back_is_the_state_of_the_model(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = converted(family, **settings)
    check(model, DecodeModel(model, 2, max_length=60), tmp_path)


@torch.no_grad()
def test_slot_with_a_sliding_attention_layer_read_back_is_the_state_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = transformers.MistralForCausalLM(config_of("mistral", sliding_window=5)).eval()
    model = fw.convert(base, fw.FastWeightsConfig(m=6, layers=(0,)))
    check(model, DecodeModel(model, 2, max_length=60), tmp_path)


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[4]], ids=name)
@torch.no_grad()
def test_slot_decoded_through_the_own_forward_read_back_is_the_state_of_the_model(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = converted(**settings)
    check(model, ForwardDecodeModel(model, 2), tmp_path)


@torch.no_grad()
def test_slot_after_padding_or_embeddings_counts_as_the_model_does() -> None:
    model = converted(m=6, window=3)
    ids, mask, new = tokens(1, 6), torch.tensor([[0, 0, 1, 1, 1, 1]]), tokens(4, seed=9)
    padded = model(ids, attention_mask=mask, use_cache=True).past_key_values
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=True).past_key_values
    decoder = DecodeModel(model, 2)
    for state in (padded, embedded):
        decoder.set_slot(1, state)
        read(decoder, 1, new)
        found, expected = decoder.get_slot(1, new.tolist()), prefill(model, new, state)[1]
        assert (int(found.seen), found.lengths.tolist()) == (int(expected.seen), expected.lengths.tolist())
        assert (found.fingerprint is None) == (expected.fingerprint is None) == (state is embedded)
        if found.fingerprint is not None:
            assert torch.equal(found.fingerprint, expected.fingerprint)
