"""The decode engine generates the tokens of model.generate for models with some layers still attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.engine import LENGTHS, converted, greedy, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, config_of, pretrained, tokens

import fastweights as fw
from fastweights.config import ConfigError
from fastweights.decode.generation import generate_sequence
from fastweights.decode.model import DecodeModel
from fastweights.decode.prefill import prefill
from fastweights.modeling.cache import StateError

SETTINGS = [
    dict(m=6, layers=(0,)),
    dict(rule="delta", m=6, window=3, layers=(1,)),
    dict(rule="gated_delta", m=6, window=3, layers=(0,)),
    dict(rule="local", layers=(1,)),
]


def logits_by_steps(engine: fw.Engine, model: Any, sequence: torch.Tensor, new: torch.Tensor, slot: int) -> Any:
    """The engine's and the model's logits after each new token."""
    with torch.no_grad():
        engine.decoder.set_slot(slot, prefill(model, sequence)[1])
        for token in new:
            engine.decoder.tokens[slot] = token
            sequence = torch.cat([sequence, token[None]])
            yield engine.decoder.step()[slot], model(sequence[None]).logits[0, -1]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_and_logits_match_the_model(family: str, settings: dict[str, Any]) -> None:
    """Three prompts of different lengths in two slots; the longest sequence has exactly max_length tokens."""
    model, prompts = converted(family, **settings), prompts_of(*LENGTHS)
    engine = fw.Engine(model, batch_size=2, prefill_chunk=5, max_length=max(LENGTHS) + 6)
    assert isinstance(engine.decoder, DecodeModel)
    assert engine.generate(prompts, 7) == [greedy(model, prompt, 7) for prompt in prompts]
    for found, expected in logits_by_steps(engine, model, prompts[1], tokens(6, seed=99), slot=1):
        assert_close("logits", found, expected, 1e-5)


@pytest.mark.parametrize("length", [3, 30])
def test_sliding_window_layer_matches_the_model(length: int) -> None:
    torch.manual_seed(0)
    base = transformers.MistralForCausalLM(config_of("mistral", sliding_window=5)).eval()
    model = fw.convert(base, fw.FastWeightsConfig(m=6, layers=(0,)))
    engine = fw.Engine(model, max_length=50)
    assert engine.decoder.blocks[1].window.width == 5
    for found, expected in logits_by_steps(engine, model, tokens(length), tokens(12, seed=9), slot=0):
        assert_close("logits", found, expected, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float64, 1e-6)])
def test_logits_match_in_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    for family in ("qwen3", "gpt2"):
        model = converted(family, m=6, layers=(0,)).to(dtype)
        engine = fw.Engine(model, max_length=10)
        for found, expected in logits_by_steps(engine, model, tokens(6), tokens(2, seed=9), slot=0):
            assert_close("logits", found, expected, tolerance)


def test_generation_from_a_state_matches_the_whole_prompt() -> None:
    model, (first, more) = converted(m=6, layers=(1,)), prompts_of(7, 5)
    engine = fw.Engine(model, max_length=20)
    whole = engine.generate([torch.cat([first, more])], 6)[0]
    _, state = prefill(model, first)
    assert engine.generate([more], 6, states=[state]) == [whole]
    assert int(state.lengths[0]) == 12


def test_max_length_is_required_checked_and_enforced() -> None:
    model = converted(m=4, layers=(0,))
    with pytest.raises(ConfigError, match=r"layers 1 are still attention.*max_length.*model\.generate"):
        fw.Engine(model)
    with pytest.raises(ConfigError, match="max_length must be at least 1, found 0"):
        fw.Engine(model, max_length=0)
    for wrong in (10.0, True, "10"):
        with pytest.raises(ConfigError, match=f"max_length must be a whole number, found {wrong!r}"):
            fw.Engine(model, max_length=wrong)
    engine = fw.Engine(model, max_length=10)
    assert len(engine.generate(prompts_of(7), 4, stop_tokens=())[0]) == 4
    with pytest.raises(ConfigError, match=r"prompts\[0\] may grow to 11 tokens, and max_length is 10"):
        engine.generate(prompts_of(7), 5)
    assert fw.Engine(converted(m=4), max_length=1).generate(prompts_of(7), 5), (
        "a model without attention layers ignores it"
    )


def test_attention_with_an_adapter_is_generated_by_transformers() -> None:
    model = converted(m=4, layers=(0,))
    attention = model.model.layers[1].self_attn

    class Adapter(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    attention.v_proj = Adapter(attention.v_proj)
    check_generated_by_transformers(model, "Adapter")


class Quantized(torch.nn.Module):
    """A linear layer whose weight is a buffer."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("quantized", inner.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.quantized.T


def test_quantized_attention_is_generated_by_transformers() -> None:
    model = converted(m=4, layers=(0,))
    attention = model.model.layers[1].self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, Quantized(getattr(attention, name)))
    check_generated_by_transformers(model, "Quantized")


def check_generated_by_transformers(model: Any, module: str) -> None:
    with pytest.raises(ConfigError, match=f"layers 1 are still attention.* {module}.*model.generate"):
        fw.Engine(model, max_length=20)
    prompt = tokens(5)
    found, _ = generate_sequence(model, prompt[None], fw.FastWeightsCache(model.config), fw.Sampling(), 6)
    assert found[0, 5:].tolist() == greedy(model, prompt, 6)


def test_generate_sequence_uses_transformers_beyond_the_reserved_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, engines, sizes = converted(m=4, layers=(0,)), tokens(5), [], []
    real = fw.Engine
    monkeypatch.setattr("fastweights.decode.generation.Engine", lambda *a, **k: engines.append(k) or real(*a, **k))
    for limit in (6, 5):
        monkeypatch.setattr("fastweights.decode.generation.MAX_RESERVED_TOKENS", limit)
        found, cache = generate_sequence(model, prompt[None], fw.FastWeightsCache(model.config), fw.Sampling(), 6)
        assert found[0, 5:].tolist() == greedy(model, prompt, 6)
        sizes.append((int(cache.seen), cache.attention_nbytes))
    assert engines == [{"max_length": 11, "weights": None}]
    assert sizes[0] == sizes[1], "either way the cache has seen all tokens but the last"


def test_state_that_has_seen_padding_is_refused() -> None:
    """The attention layers would attend to the padding."""
    model = converted(m=4, layers=(0,))
    ids, mask = tokens(1, 6), torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        state = model(ids, attention_mask=mask, use_cache=True).past_key_values
    with pytest.raises(StateError, match="has seen padding and has attention layers"):
        fw.Engine(model, max_length=30).generate([tokens(3)], 4, states=[state])


def test_engine_leaves_the_random_generator_unchanged() -> None:
    model, state = converted(m=4, layers=(0,)), torch.get_rng_state()
    fw.Engine(model, max_length=9)
    assert torch.equal(torch.get_rng_state(), state)


def test_engine_leaves_the_model_unchanged() -> None:
    model = converted(m=6, layers=(0,))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    fw.Engine(model, max_length=9).generate(prompts_of(4), 3)
    assert type(model.model.layers[1].self_attn) is type(pretrained("llama").model.layers[1].self_attn)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
