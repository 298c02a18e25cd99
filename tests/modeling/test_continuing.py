"""Continuing from a state: with only the new tokens, or with the whole sequence, as transformers' generate has it.

Whatever was given, the result must be that of the whole sequence without a state.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights.modeling import generation
from fastweights.modeling.cache import StateError

GREEDY = dict(do_sample=False, pad_token_id=0, max_new_tokens=5)
MODELS = {
    "plain": ("llama", dict(rule="decay", m=6)),
    "learned positions": ("gpt2", dict(rule="gated", m=6)),
    "window": ("llama", dict(rule="delta", m=6, window=3)),
    "local": ("gpt2", dict(rule="local", window=4)),
    "hybrid": ("llama", dict(m=4, layers=(0,))),
    "hybrid, learned positions": ("gpt2", dict(m=4, layers=(1,))),
    "hybrid, sliding attention": ("gemma3_text", dict(m=4, layers=(1,), window=3)),
}
HYBRIDS = [name for name in MODELS if name.startswith("hybrid")]
FIRST, MORE = tokens(2, 9), tokens(2, 5, seed=5)


def converted(name: str) -> Any:
    family, settings = MODELS[name]
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return converted(request.param)


def state_after(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> fw.FastWeightsCache:
    cache = fw.FastWeightsCache(model.config, **options)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


def new_tokens(model: Any, ids: Tensor, **options: Any) -> list[list[int]]:
    return model.generate(ids, **GREEDY | options)[:, ids.shape[1] :].tolist()


def padded(ids: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """The same tokens with padding in front of the first row, in the place of its first tokens, and the mask."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return ids, mask


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(generation, "logger", logger := logging.getLogger("continuing"))
    monkeypatch.setattr(logger, "warning_once", logger.warning, raising=False)
    return caplog


@pytest.mark.parametrize("length", [1, 5, 9, 14])
def test_new_tokens_alone_generate_what_the_whole_sequence_does(model: Any, length: int) -> None:
    """Fewer tokens than the state has seen, as many, and more."""
    more = tokens(2, length, seed=5)
    expected = new_tokens(model, torch.cat([FIRST, more], dim=1))
    for mask in (None, torch.ones_like(more)):
        assert new_tokens(model, more, past_key_values=state_after(model, FIRST), attention_mask=mask) == expected
    chunked = new_tokens(model, more, past_key_values=state_after(model, FIRST), prefill_chunk_size=2)
    assert chunked == expected
    cache = state_after(model, FIRST)
    assert new_tokens(model, more, past_key_values=cache, attention_mask=cache.mask_for(more)) == expected


def test_the_whole_sequence_and_a_state_generate_as_without_it(model: Any) -> None:
    whole = torch.cat([FIRST, MORE], dim=1)
    expected = new_tokens(model, whole)
    for mask in (None, torch.ones_like(whole)):
        cache = state_after(model, FIRST)
        assert new_tokens(model, whole, past_key_values=cache, attention_mask=mask) == expected
        assert int(cache.get_seq_length()) == 18, "all tokens but the last were processed once"


def test_the_whole_sequence_after_a_padded_turn_generates_as_without_a_state(model: Any) -> None:
    first, mask = padded(FIRST, 3)
    turn = model.generate(first, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    whole = torch.cat([turn.sequences, MORE], dim=1)
    mask = torch.cat([mask, torch.ones(2, 10, dtype=torch.long)], dim=1)
    expected = new_tokens(model, whole, attention_mask=mask)
    assert new_tokens(model, whole, attention_mask=mask, past_key_values=turn.past_key_values.fork()) == expected
    inferred = new_tokens(model, whole, past_key_values=turn.past_key_values)
    assert inferred == expected, "the padding token says what is padding"


def test_forward_takes_a_mask_of_the_new_tokens_or_of_all_or_none(model: Any) -> None:
    masks = (None, torch.ones(2, 5), torch.ones(2, 14))
    with torch.no_grad():
        expected = model(torch.cat([FIRST, MORE], dim=1)).logits[:, 9:]
        for mask in masks:
            found = model(MORE, past_key_values=state_after(model, FIRST), attention_mask=mask).logits
            assert_close("logits", found, expected, 1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if "sliding" not in name])
def test_padded_new_tokens_are_those_of_the_row_alone(name: str) -> None:
    """Not for sliding attention: in transformers, padding between turns takes places of its window."""
    model, (more, mask) = converted(name), padded(MORE, 2)
    expected = [
        new_tokens(model, torch.cat([FIRST[row : row + 1], MORE[row : row + 1, skipped:]], dim=1))[0]
        for row, skipped in ((0, 2), (1, 0))
    ]
    for given in (mask, None):  # None: inferred from the padding token
        assert new_tokens(model, more, past_key_values=state_after(model, FIRST), attention_mask=given) == expected
    with torch.no_grad():
        last = model(more, past_key_values=state_after(model, FIRST), attention_mask=mask).logits[:, -1]
    assert last.argmax(-1).tolist() == [row[0] for row in expected]


def test_a_state_that_has_seen_padding_continues_with_new_tokens_alone() -> None:
    first, mask = padded(FIRST, 4)
    for name in MODELS.keys() - HYBRIDS:
        model = converted(name)
        alone = torch.cat([FIRST[:1, 4:], MORE[:1]], dim=1)
        found = new_tokens(model, MORE, past_key_values=state_after(model, first, mask))
        assert found[0] == new_tokens(model, alone)[0]


@pytest.mark.parametrize("name", HYBRIDS)
def test_attention_layers_that_have_seen_padding_need_the_whole_mask(name: str) -> None:
    model, (first, mask) = converted(name), padded(FIRST, 4)
    for given in (None, torch.ones_like(MORE)):
        with pytest.raises(StateError, match=r"padding.*attention_mask of the whole"):
            model.generate(MORE, past_key_values=state_after(model, first, mask), attention_mask=given, **GREEDY)
        with pytest.raises(StateError, match=r"padding.*attention_mask of the whole"):
            model(MORE, past_key_values=state_after(model, first, mask), attention_mask=given)
    whole = torch.cat([mask, torch.ones_like(MORE)], dim=1)
    found = new_tokens(model, MORE, past_key_values=state_after(model, first, mask), attention_mask=whole)
    assert found[0] == new_tokens(model, torch.cat([FIRST[:1, 4:], MORE[:1]], dim=1))[0]


@pytest.mark.parametrize("length", [5, 14])
def test_a_loaded_and_forked_state_continues_with_new_tokens_alone(model: Any, length: int, tmp_path: Path) -> None:
    state_after(model, FIRST[:1]).save(tmp_path / "state", model)
    more = tokens(3, length, seed=5)
    whole = torch.cat([FIRST[:1].expand(3, -1), more], dim=1)
    expected = new_tokens(model, whole)
    for given in (more, whole):
        cache = fw.FastWeightsCache.load(tmp_path / "state", model).fork(3)
        assert new_tokens(model, given, past_key_values=cache) == expected
    cache = fw.FastWeightsCache.load(tmp_path / "state", model).fork(3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert new_tokens(model, whole[[2, 0]], past_key_values=cache) == [expected[2], expected[0]]


def test_beams_and_several_sequences_continue_from_a_forked_state(model: Any) -> None:
    whole = torch.cat([FIRST, MORE], dim=1)
    options = dict(num_beams=3, num_return_sequences=2)
    expected = new_tokens(model, whole, **options)
    for given in (MORE, whole):
        cache = state_after(model, FIRST).fork(3)
        assert new_tokens(model, given, past_key_values=cache, **options) == expected
    with pytest.raises(StateError, match=r"has 2 rows and the input 6: .*cache\.fork\(3\)"):
        model.generate(MORE, past_key_values=state_after(model, FIRST), **GREEDY | options)
    found = []
    for given in (whole, MORE):
        torch.manual_seed(0)
        cache = state_after(model, FIRST).fork(2)
        found.append(new_tokens(model, given, past_key_values=cache, do_sample=True, num_return_sequences=2))
    assert found[0] == found[1] and len(found[0]) == 4


def test_static_caches_continue_with_new_tokens_alone(model: Any) -> None:
    whole = torch.cat([FIRST, MORE], dim=1)
    expected = new_tokens(model, whole)
    for given in (MORE, whole):
        cache = state_after(model, FIRST, max_cache_len=40)
        assert new_tokens(model, given, past_key_values=cache, disable_compile=True) == expected
    with torch.no_grad():
        logits = model(whole).logits[:, 9:]
        for mask in (None, torch.ones(2, 5)):
            cache = state_after(model, FIRST, max_cache_len=40)
            found = model(MORE, past_key_values=cache, attention_mask=mask).logits
            assert_close("logits", found, logits, 1e-5)


def test_an_input_longer_than_the_state_warns_unless_it_is_the_whole_sequence(
    warnings: pytest.LogCaptureFixture,
) -> None:
    model, more = converted("plain"), tokens(2, 14, seed=5)
    cache = state_after(model, FIRST)
    new_tokens(model, more, past_key_values=cache.fork(), attention_mask=cache.mask_for(more))
    new_tokens(model, torch.cat([FIRST, more], dim=1), past_key_values=cache.fork())
    new_tokens(model, MORE, past_key_values=cache.fork())
    assert not warnings.messages
    new_tokens(model, more, past_key_values=cache)
    assert len(warnings.messages) == 1 and "mask_for" in warnings.messages[0]


def test_tokens_that_the_state_has_seen_already_are_refused() -> None:
    model = converted("plain")
    for mask in (None, torch.ones_like(FIRST)):
        with pytest.raises(ValueError, match=r"input_ids are the 9 tokens .* seen already.*mask_for"):
            model.generate(FIRST, past_key_values=state_after(model, FIRST), attention_mask=mask, **GREEDY)
    cache = state_after(model, FIRST)
    again = new_tokens(model, FIRST, past_key_values=cache, attention_mask=cache.mask_for(FIRST))
    assert again == new_tokens(model, FIRST.repeat(1, 2))


def test_masks_of_neither_the_new_tokens_nor_all_are_refused(model: Any) -> None:
    for shape in ((2, 3), (2, 9), (2, 15), (1, 5)):
        with pytest.raises(ValueError, match=r"attention_mask must be \[2,5\].* or \[2,14\] .* found"):
            model.generate(MORE, past_key_values=state_after(model, FIRST), attention_mask=torch.ones(shape), **GREEDY)
        with pytest.raises(ValueError, match=r"attention_mask must be \[2,5\].* or \[2,14\] .* found"):
            model(MORE, past_key_values=state_after(model, FIRST), attention_mask=torch.ones(shape))


def test_embeddings_are_those_of_the_whole_sequence() -> None:
    model = converted("plain")
    embeddings = model.get_input_embeddings()(torch.cat([FIRST, MORE], dim=1))
    expected = model.generate(inputs_embeds=embeddings, **GREEDY)
    assert torch.equal(
        expected, model.generate(inputs_embeds=embeddings, past_key_values=state_after(model, FIRST), **GREEDY)
    )
    with pytest.raises(ValueError, match=r"inputs_embeds hold 5 tokens and the state has seen 9.*input_ids"):
        model.generate(inputs_embeds=embeddings[:, 9:], past_key_values=state_after(model, FIRST), **GREEDY)


def test_a_state_of_embeddings_takes_longer_inputs_as_the_whole_sequence() -> None:
    model, whole = converted("plain"), torch.cat([FIRST, MORE], dim=1)
    expected = new_tokens(model, whole)
    for given in (whole, MORE):
        cache = fw.FastWeightsCache(model.config)
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(FIRST), past_key_values=cache)
        assert new_tokens(model, given, past_key_values=cache) == expected


def test_learned_positions_count_what_the_state_has_seen_before_generating() -> None:
    model, calls = converted("learned positions"), []
    cache = state_after(model, tokens(1, 90))
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="may reach 97"):
        model.generate(MORE[:1, :3], past_key_values=cache, **GREEDY)
    assert not calls
    model.generate(MORE[:1, :2], past_key_values=cache, **GREEDY)
