"""Static caches: the state has a constant size, so generate's step compiles once; keys and values of attention layers
are allocated for the whole sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens
from transformers import AutoModelForCausalLM, CompileConfig

import fastweights as fw

GREEDY = dict(do_sample=False, pad_token_id=0)
VARIANTS = [
    dict(rule="decay", m=6),
    dict(rule="delta", m=6, window=3, sinks=2),
    dict(rule="gated_delta", m=8, window=3, mix="token", projections="shared", gate_rank=3),
    dict(rule="local", window=4),
    dict(m=4, layers=(0,)),
    dict(m=4, layers=(1,)),
]
NAMES = ["decay", "delta-window", "shared", "local", "first", "second"]


def converted(family: str = "llama", **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings or VARIANTS[0]))


def left_padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": tokens(2, 9), "attention_mask": mask}


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("family", CONFIGS)
def test_static_cache_generates_the_same_tokens(family: str, settings: dict[str, Any]) -> None:
    """Past the end of sliding windows, with padding, and with beams."""
    model = converted(family, **settings)
    for options in (dict(max_new_tokens=12), dict(max_new_tokens=4, num_beams=3)):
        expected = model.generate(**left_padded(), **options, **GREEDY)
        found = model.generate(**left_padded(), **options, **GREEDY, cache_implementation="static")
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_checkpoint_that_asks_for_a_static_cache_generates(family: str, tmp_path: Path) -> None:
    model = converted(family)
    expected = model.generate(tokens(2, 5), max_new_tokens=6, **GREEDY)
    model.generation_config.cache_implementation = "static"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.cache_implementation == "static"
    assert torch.equal(loaded.generate(tokens(2, 5), max_new_tokens=6, **GREEDY), expected)
    cache = fw.FastWeightsCache(loaded.config)
    assert torch.equal(loaded.generate(tokens(2, 5), past_key_values=cache, max_new_tokens=6, **GREEDY), expected)


@pytest.mark.parametrize("settings", VARIANTS, ids=NAMES)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "opt"])
def test_compiled_generation_gives_the_same_tokens_without_a_graph_break(family: str, settings: dict[str, Any]) -> None:
    """Compiled once, or a few times where a sliding window fills up; `fullgraph` fails on a graph break."""
    torch._dynamo.reset()
    model, graphs = converted(family, **settings), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = model.generate(**left_padded(), max_new_tokens=14, **GREEDY)
    compiling = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiling._compile_all_devices = True  # also on a CPU
    options = dict(cache_implementation="static", compile_config=compiling, **GREEDY)
    assert torch.equal(model.generate(**left_padded(), max_new_tokens=14, **options), expected)
    assert 1 <= len(graphs) <= (3 if model.config.fastweights["layers"] else 1)


@pytest.mark.parametrize("kind", ["offloaded", "quantized", "offloaded_static"])
def test_caches_for_attention_are_ignored(kind: str) -> None:
    model, ids = converted(), tokens(2, 5)
    expected = model.generate(ids, max_new_tokens=4, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=4, cache_implementation=kind, **GREEDY), expected)


@pytest.mark.parametrize("length", [4, 12])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("settings", [VARIANTS[0], *VARIANTS[4:]], ids=["decay", "first", "second"])
@torch.no_grad()
def test_a_static_cache_is_saved_and_continued_without_its_empty_end(
    family: str, settings: dict[str, Any], length: int, tmp_path: Path
) -> None:
    model, ids, more = converted(family, **settings), tokens(1, length), tokens(1, 5, seed=4)
    cache = fw.FastWeightsCache(model.config, max_cache_len=30)
    model.generate(ids, past_key_values=cache, max_new_tokens=1, **GREEDY)
    cache.save(tmp_path / "state", model)
    expected = model(torch.cat([ids, more], dim=1)).logits[:, length:]
    loaded = fw.FastWeightsCache.load(tmp_path / "state", model)
    for name, state in (("loaded", loaded), ("forked", cache.fork())):
        assert_close(name, model(more, past_key_values=state).logits, expected, 1e-5)
