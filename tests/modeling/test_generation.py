"""generate on converted models, and the state as a thing of its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens
from transformers import DynamicCache

import fastweights as fw
from fastweights.modeling.cache import StateError

GREEDY = dict(do_sample=False, pad_token_id=0)
VARIANTS = [
    dict(rule="decay", m=6),
    dict(rule="delta", m=6, window=3, sinks=2),
    dict(rule="local"),
    dict(m=4, layers=(0,)),
    dict(rule="gated_delta", m=8, window=3, mix="token", projections="shared", gate_rank=3),
]


def converted(family: str = "llama", **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings or dict(rule="decay", m=6)))


@pytest.fixture(params=VARIANTS, ids=lambda s: "-".join(map(str, s.values())))
def model(request: pytest.FixtureRequest) -> Any:
    return converted(**request.param)


def test_sampling_is_repeatable_and_the_same_with_and_without_the_state(model: Any) -> None:
    def sample(seed: int, **options: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        return model.generate(tokens(2, 6), do_sample=True, max_new_tokens=8, top_k=20, **options).tolist()

    assert sample(1) == sample(1) == sample(1, use_cache=False)
    assert sample(1) != sample(2)


@pytest.mark.parametrize("family", CONFIGS)
def test_chunked_prefill_generates_the_same_tokens(family: str) -> None:
    model, ids = converted(family, m=4, layers=(1,)), tokens(2, 23)
    whole = model.generate(ids, max_new_tokens=6, **GREEDY)
    assert torch.equal(whole, model.generate(ids, max_new_tokens=6, prefill_chunk_size=5, **GREEDY))


def test_beams_with_several_return_sequences_match_without_cache(model: Any) -> None:
    ids = tokens(1, 6)
    options = dict(max_new_tokens=5, num_beams=4, num_return_sequences=4, **GREEDY)
    beams = model.generate(ids, **options)
    assert len({tuple(row) for row in beams.tolist()}) == 4
    assert torch.equal(beams, model.generate(ids, use_cache=False, **options))


def test_second_turn_with_the_state_matches_the_whole_conversation(model: Any) -> None:
    first, more = tokens(2, 7), tokens(2, 5, seed=5)
    turn = model.generate(first, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
    text = torch.cat([turn.sequences, more], dim=1)
    options = dict(attention_mask=torch.ones_like(text), max_new_tokens=5, **GREEDY)
    fresh = model.generate(text, **options)
    assert torch.equal(fresh, model.generate(text, past_key_values=turn.past_key_values, **options))


def test_padding_between_turns_changes_nothing() -> None:
    """The second turn's padding stands between the turns: it must leave state, window and positions alone."""
    for settings in VARIANTS[:3]:
        model = converted(**settings)
        cache, mask = None, torch.zeros(2, 0, dtype=torch.long)
        for ids, padding in ((tokens(2, 8), 3), (tokens(2, 9, seed=4), 4)):
            real = torch.ones_like(ids)
            real[0, :padding] = 0
            mask = torch.cat([mask, real], dim=1)
            with torch.no_grad():
                out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
        alone = torch.cat([tokens(2, 8)[:1, 3:], tokens(2, 9, seed=4)[:1, 4:]], dim=1)
        with torch.no_grad():
            assert_close("last logits", out.logits[:1, -1], model(alone).logits[:, -1], 1e-5)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_tokens_past_learned_positions_are_refused_unless_clamped(family: str) -> None:
    model, ids = converted(family, m=4), tokens(1, 90)
    with pytest.raises(ValueError, match=r"learned positions for 96 tokens.*clamp"):
        model.generate(ids, max_new_tokens=20, **GREEDY)
    assert model.generate(ids, max_new_tokens=7, **GREEDY).shape == (1, 97), "the last token needs no position"
    with pytest.raises(ValueError, match="may reach 100"):
        model(tokens(1, 100))
    clamped = converted(family, m=4, positions="clamp")
    made = clamped.generate(ids, max_new_tokens=20, **GREEDY)
    assert made.shape == (1, 110)
    with torch.no_grad():
        assert made[0, 90:].tolist() == clamped(made).logits[0, 89:-1].argmax(-1).tolist()


def test_position_limit_counts_real_tokens_and_is_checked_before_generating() -> None:
    model, calls = converted("gpt2", m=4), []
    padded, mask = tokens(2, 94), torch.ones(2, 94, dtype=torch.long)
    mask[:, :84] = 0
    assert model.generate(padded, attention_mask=mask, max_new_tokens=8, **GREEDY).shape == (2, 102)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for cache in (None, fw.FastWeightsCache(model.config)):
        with pytest.raises(ValueError, match="may reach"):
            model.generate(tokens(1, 3), past_key_values=cache, max_new_tokens=200, **GREEDY)
    assert not calls


def test_mask_of_another_shape_than_the_tokens_is_refused() -> None:
    model, ids = converted(), tokens(2, 12)
    for shape in ((2, 5), (2, 20), (1, 12)):
        with pytest.raises(ValueError, match=r"attention_mask must be \[2,12\]"):
            model(ids, attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds"):
        model()


@pytest.mark.parametrize("rule", ["add", "gated", "delta", "decay", "gated_delta", "local", "abc", "linformer"])
def test_a_state_can_be_trained_from_and_made_in_inference_mode(rule: str) -> None:
    model, ids, more = converted(rule=rule, m=6), tokens(1, 8), tokens(1, 5, seed=2)
    cache = model(ids, use_cache=True).past_key_values
    model(more, past_key_values=cache, labels=more).loss.backward()
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    made = model.generate(torch.cat([ids, more], dim=1), past_key_values=cache, max_new_tokens=3, **GREEDY)
    assert torch.equal(made, model.generate(torch.cat([ids, more], dim=1), max_new_tokens=3, **GREEDY))


def test_rotary_models_generate_past_their_trained_length() -> None:
    made = converted().generate(tokens(1, 500), max_new_tokens=30, **GREEDY)
    assert made.shape == (1, 530)


@pytest.mark.parametrize("settings", VARIANTS[:3], ids=lambda s: s["rule"])
def test_state_has_a_constant_size(settings: dict[str, Any]) -> None:
    model, sizes = converted(**settings), set()
    for length in (1, 40, 300):
        with torch.no_grad():
            sizes.add(model(tokens(1, length), use_cache=True).past_key_values.nbytes)
    assert len(sizes) == 1


def test_state_bytes_match_the_shapes() -> None:
    with torch.no_grad():
        cache = converted(rule="decay", m=6)(tokens(3, 5), use_cache=True).past_key_values
    assert cache.nbytes == 2 * 3 * 4 * 8 * 6 * 4, "layers x batch x heads x d x m x 4 bytes"
    assert cache.attention_nbytes == 0
    assert "3 x 5 tokens" in repr(cache) and "4,608 bytes" in repr(cache) and "keys" not in repr(cache)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(map(str, s.values())))
def test_a_state_is_saved_loaded_and_forked(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, ids, more = converted(family, **settings), tokens(1, 11), tokens(3, 6, seed=9)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        cache.save(tmp_path / "state.safetensors", model)
        forked = fw.FastWeightsCache.load(tmp_path / "state.safetensors", model).fork(3)
        found = model(more, past_key_values=forked, attention_mask=forked.mask_for(more)).logits
        for row in range(3):
            expected = model(torch.cat([ids, more[row : row + 1]], dim=1)).logits[0, 11:]
            assert_close(f"continuation {row}", found[row], expected, 1e-5)
        again = model(more[:1], past_key_values=cache).logits
    assert_close("the state forked from", again[0], found[0], 1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


@pytest.mark.parametrize("settings", [*VARIANTS, dict(m=4, layers=(0,))], ids=lambda s: "-".join(map(str, s.values())))
def test_advancing_a_fork_leaves_the_original_unchanged(settings: dict[str, Any]) -> None:
    model, ids, more = converted("llama", **settings), tokens(1, 11), tokens(1, 6, seed=9)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        model(more, past_key_values=cache.fork())
        found = model(more, past_key_values=cache).logits
        expected = model(torch.cat([ids, more], dim=1)).logits[:, 11:]
    assert_close("logits of the original", found, expected, 1e-5)


def test_a_hybrids_state_with_gradients_is_forked() -> None:
    model, ids, more = converted(m=4, layers=(0,)), tokens(1, 5), tokens(2, 3, seed=9)
    cache = model(ids, use_cache=True).past_key_values
    assert any(layer.keys is not None and layer.keys.requires_grad for layer in cache.layers)
    forked = cache.fork(2)
    with torch.no_grad():
        found = model(more, past_key_values=forked, attention_mask=forked.mask_for(more)).logits
        expected = model(torch.cat([ids, more[1:]], dim=1)).logits[0, 5:]
    assert_close("continuation", found[1], expected, 1e-5)


def test_saved_state_loads_only_with_its_own_model(tmp_path: Path) -> None:
    model = converted()
    with torch.no_grad():
        model(tokens(1, 5), use_cache=True).past_key_values.save(tmp_path / "s", model)
    model.config.fastweights |= {"positions": "clamp", "seed": 9, "train_length": 77, "projection_init": "random"}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        fw.FastWeightsCache.load(tmp_path / "s", copy.deepcopy(model).to(dtype))
    other = converted()
    other.model.layers[0].mlp.up_proj.weight.data += 0.5
    for stranger in (other, converted(rule="gated", m=6), converted("qwen2")):
        with pytest.raises(StateError, match="belongs to another model"):
            fw.FastWeightsCache.load(tmp_path / "s", stranger)


def test_checkpoints_and_states_from_before_a_setting_still_load(tmp_path: Path) -> None:
    """A model whose config.json does not name the newer settings, and a state that was saved with it."""
    settings = dict(rule="gated", m=8, window=3)
    new, ids = converted(**settings), tokens(1, 5)
    new.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    for name in ("mix", "sinks", "projections", "gate_rank"):
        del config["fastweights"][name]
    path.write_text(json.dumps(config))
    old = fw.load(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(old(ids).logits, new(ids).logits)
        old(ids, use_cache=True).past_key_values.save(tmp_path / "state", old)
    for model in (old, new):
        assert int(fw.FastWeightsCache.load(tmp_path / "state", model).seen) == 5
    for other in (dict(mix="token"), dict(sinks=2), dict(projections="shared"), dict(gate_rank=2)):
        with pytest.raises(StateError, match="belongs to another model"):
            fw.FastWeightsCache.load(tmp_path / "state", converted(**settings | other))


def test_unsupported_uses_of_a_state_are_refused_with_the_reason() -> None:
    model, ids = converted(), tokens(1, 5)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(StateError, match="cannot forget"):
        cache.crop(2)
    with pytest.raises(StateError, match="at least one copy"):
        cache.fork(0)
    with pytest.raises(ValueError, match=r"has 1 rows and the input 3: fork it first, past_key_values=cache.fork\(3\)"):
        model(tokens(3, 2), past_key_values=cache)
    with pytest.raises(ValueError, match="assisted decoding"):
        model.generate(ids, assistant_model=model, max_new_tokens=2)
    foreign = DynamicCache(config=pretrained("llama").config)
    assert model.generate(ids, past_key_values=foreign, max_new_tokens=2, **GREEDY).shape == (1, 7)
    with torch.no_grad():
        foreign = pretrained("llama")(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="DynamicCache of another model"):
        model(ids, past_key_values=foreign)


def test_a_cache_for_packed_documents_is_refused() -> None:
    for model in (converted(m=4, layers=(0,)), converted()):
        with pytest.raises(ValueError, match="use_cache=False"):
            model(tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=True)
