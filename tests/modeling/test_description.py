"""The numbers in a description are those that real models and real caches have."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers.cli import save_model
from helpers.tiny import CONFIGS, pretrained, tokens
from transformers.cache_utils import DynamicCache

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.loading import load
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.description import SEQUENCE_LENGTHS, describe, describe_source, summarize
from fastweights.modeling.families import UnknownFamilyError
from fastweights.utils.errors import CheckpointError

SETTINGS: dict[str, dict[str, Any]] = {
    "decay": dict(m=8),
    "windowed": dict(m=8, window=5),
    "window of one": dict(m=8, window=1),
    "sinks": dict(m=8, window=5, sinks=3),
    "local with sinks": dict(rule="local", window=9, sinks=8),
    "normalized": dict(rule="add", feature_map="relu", normalize="attention+sum", m=6),
    "delta, shared states": dict(rule="delta", normalize="attention", state_heads="kv", m=8),
    "shared projections": dict(rule="gated", m=8, window=5, projections="shared", gate_rank=2),
    "shared projections, shared states": dict(
        rule="gated_delta", m=8, window=5, projections="shared", state_heads="kv"
    ),
    "slots": dict(rule="abc", m=5, state_heads="kv", window=3),
    "slots by position": dict(rule="linformer", m=5),
    "local": dict(rule="local", window=7),
    "hybrid": dict(m=8, layers=(1,), window=3),
}


def converted(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    return convert(pretrained(family).to(dtype), FastWeightsConfig(**settings))


def cache_after(model: Any, length: int) -> FastWeightsCache:
    with torch.no_grad():
        return model(tokens(1, length), use_cache=True).past_key_values


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_state_bytes_match_a_real_state(family: str, settings: dict[str, Any]) -> None:
    model = converted(family, **settings)
    for length in (2, 20):
        assert describe(model).state_bytes == cache_after(model, length).nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_bytes_depend_on_dtype(dtype: torch.dtype) -> None:
    model = converted("llama", dtype, m=8, window=5)
    assert describe(model).state_bytes == cache_after(model, 9).nbytes


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_attention_bytes_match_a_real_cache(family: str) -> None:
    model, length = pretrained(family), 20
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    for row in describe(model).memory:
        assert row.attention * length == real * row.tokens
        assert row.here == row.attention


def test_sliding_layers_cache_at_most_their_window() -> None:
    model = pretrained("mistral")
    (first, *others) = describe(model).memory
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens(1, 20), past_key_values=cache)
    assert first.attention == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert all(row.attention == first.attention for row in others)


def test_memory_of_mixed_sliding_and_full_layers() -> None:
    model = pretrained("gemma2")
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    for row in describe(model).memory:
        assert row.attention == 2 * 2 * 8 * 4 * (6 + row.tokens)


def test_fully_converted_model_has_constant_memory() -> None:
    described = describe(converted("llama", m=8))
    assert [row.tokens for row in described.memory] == list(SEQUENCE_LENGTHS) == [1024, 8192, 65536]
    assert {row.here for row in described.memory} == {described.state_bytes}


def test_hybrid_memory_is_state_plus_attention_of_other_layers() -> None:
    model = converted("llama", m=8, layers=(1,))
    described, cache = describe(model), cache_after(model, 20)
    for row in described.memory:
        assert row.here == described.state_bytes + cache.attention_nbytes * row.tokens // 20
        assert row.attention == describe(pretrained("llama")).memory[SEQUENCE_LENGTHS.index(row.tokens)].attention
    assert described.converted == (1,)
    assert summarize(described)["layers converted"] == "1 of 2: 1"


@pytest.mark.parametrize("family", CONFIGS)
def test_added_parameters_are_relative_to_base_model(family: str) -> None:
    model = converted(family, m=8)
    described = describe(model)
    assert described.parameters == sum(p.numel() for p in model.parameters())
    assert described.base_parameters == sum(p.numel() for p in pretrained(family).parameters())
    assert described.added_parameters == described.parameters - described.base_parameters


@pytest.mark.parametrize("family", CONFIGS)
def test_folder_description_matches_model_without_reading_weights(family: str, tmp_path: Any) -> None:
    save_model(tmp_path, family, rule="gated", m=8, window=4)
    expected = describe(load(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert describe_source(tmp_path) == expected


def test_folder_description_has_its_saved_dtype(tmp_path: Any) -> None:
    converted("llama", torch.bfloat16, m=8).save_pretrained(tmp_path)
    assert describe_source(tmp_path).dtype == "bfloat16"


def test_describe_model_that_is_not_converted(tmp_path: Any) -> None:
    described = describe_source(save_model(tmp_path))
    assert (described.settings, described.converted, described.state_bytes) == (None, (), 0)
    assert described.added_parameters == 0
    assert "not converted" in summarize(described)["rule"]


def test_describe_does_not_change_the_model() -> None:
    model = converted("llama", m=8)
    before = model.config.to_dict()
    describe(model)
    assert model.config.to_dict() == before
    assert model.device.type == "cpu"


def test_folder_without_config_is_an_error(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        describe_source(tmp_path)


@pytest.mark.parametrize(
    "change", [{"fastweights": {"rule": "nonsense"}}, {"model_type": "nonsense"}, {"fastweights": {"widht": 3}}]
)
def test_config_that_describes_no_model_is_an_error(tmp_path: Any, change: dict[str, Any]) -> None:
    config = save_model(tmp_path, m=8) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        describe_source(tmp_path)


def test_config_that_is_not_json_is_an_error(tmp_path: Any) -> None:
    (save_model(tmp_path) / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        describe_source(tmp_path)


def test_unknown_family_is_an_error() -> None:
    with pytest.raises(UnknownFamilyError, match="cannot convert a Linear"):
        describe(torch.nn.Linear(2, 2))
