"""The decode engine generates the tokens of model.generate, whatever else is in the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from helpers.engine import LENGTHS, SETTINGS, converted, greedy, name, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, config_of, tokens

import fastweights as fw
from fastweights.decode.model import DecodeModel, ForwardDecodeModel
from fastweights.decode.prefill import prefill

# equality with the model


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_and_logits_match_the_model(family: str, settings: dict[str, Any]) -> None:
    """Three prompts of different lengths in two slots; then the decode model's logits against the model's forward."""
    model, prompts = converted(family, **settings), prompts_of(*LENGTHS)
    engine = fw.Engine(model, batch_size=2, prefill_chunk=5)
    assert isinstance(engine.decoder, DecodeModel)
    assert engine.generate(prompts, 7) == [greedy(model, prompt, 7) for prompt in prompts]
    new, sequence = tokens(8, seed=99), prompts[1]
    with torch.no_grad():
        engine.decoder.set_slot(1, prefill(model, sequence)[1])
        for token in new:
            engine.decoder.tokens[1] = token
            sequence = torch.cat([sequence, token[None]])
            assert_close("logits", engine.decoder.step()[1], model(sequence[None]).logits[0, -1], 1e-5)


def test_logits_match_with_different_rotary_frequencies_per_layer() -> None:
    kinds = ["full_attention", "sliding_attention"]
    torch.manual_seed(0)
    base = transformers.Gemma3ForCausalLM(config_of("gemma3_text", layer_types=kinds)).eval()
    model, prompt = fw.convert(base, fw.FastWeightsConfig(m=6, window=3)), tokens(40)
    engine = fw.Engine(model)
    engine.generate([prompt[:-1]], 1)
    engine.decoder.tokens.copy_(prompt[-1:])
    with torch.no_grad():
        assert_close("logits", engine.decoder.step(), model(prompt[None]).logits[:, -1], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_match_in_other_dtypes(dtype: torch.dtype) -> None:
    for family, settings in (("gemma3_text", SETTINGS[1]), ("gpt2", SETTINGS[3])):
        model = converted(family, **settings).to(dtype)
        engine, ids = fw.Engine(model), tokens(6)
        engine.generate([ids[:5]], 1)
        engine.decoder.tokens.copy_(ids[5:])
        with torch.no_grad():
            expected = model(ids[None]).logits[0, -1]
        assert_close("logits", engine.decoder.step()[0], expected, 2e-2 if dtype == torch.bfloat16 else 1e-6)


def test_unsupported_model_is_decoded_through_its_own_forward() -> None:
    """Post-norm OPT, rotary frequencies that depend on the length, an adapter on a projection."""
    torch.manual_seed(0)
    opt = transformers.OPTForCausalLM(config_of("opt", do_layer_norm_before=False))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    llama = transformers.LlamaForCausalLM(config_of("llama", rope_parameters=rope))
    adapted = converted("llama")

    class Adapter(torch.nn.Linear):
        pass

    old = adapted.model.layers[0].mlp.down_proj
    adapted.model.layers[0].mlp.down_proj = Adapter(*reversed(old.weight.shape), bias=False)
    models = [fw.convert(m.eval(), fw.FastWeightsConfig(m=6, window=3)) for m in (opt, llama)]
    for model in (*models, adapted):
        engine, prompts = fw.Engine(model, batch_size=2), prompts_of(*LENGTHS)
        assert isinstance(engine.decoder, ForwardDecodeModel)
        assert engine.generate(prompts, 6) == [greedy(model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_raise_past_the_table_unless_clamped(family: str) -> None:
    with pytest.raises(ValueError, match=r"reach 97: .* learned positions for 96 tokens"):
        fw.Engine(converted(family, m=4)).generate(prompts_of(90), 8)
    for count, settings in ((7, dict(m=4)), (20, dict(m=4, positions="clamp"))):
        model = converted(family, **settings)
        assert fw.Engine(model).generate(prompts_of(90), count) == [greedy(model, *prompts_of(90), count)]


def test_prefill_in_chunks_matches_forward_with_constant_state_size() -> None:
    for settings in (SETTINGS[0], SETTINGS[1]):
        model, sizes, engine = converted(**settings), set(), fw.Engine(converted(**settings), prefill_chunk=7)
        for length in (1, 40, 300):
            logits, state = prefill(model, *prompts_of(length), prefill_chunk=7)
            sizes.add(state.nbytes)
            with torch.no_grad():
                assert_close("logits", logits, model(prompts_of(length)[0][None]).logits[:, -1], 1e-5)
        assert len(sizes) == 1
        before = buffer_bytes(engine)
        engine.generate(prompts_of(300), 2)
        assert buffer_bytes(engine) == before


def buffer_bytes(engine: fw.Engine) -> int:
    return sum(block.inputs.packed.nbytes + block.recurrence.state.nbytes for block in engine.decoder.blocks)


def test_prefill_feeds_one_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = converted(), []
    forward = type(model).forward

    def spy(self: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
        lengths.append(ids.shape[1])
        assert kwargs["logits_to_keep"] == 1
        return forward(self, ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    prefill(model, tokens(100), prefill_chunk=16)
    assert lengths == [16] * 6 + [4]


# many sequences


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[3]], ids=name)
def test_tokens_do_not_depend_on_batch_size_when_slots_are_reused(settings: dict[str, Any]) -> None:
    """Sequences of different lengths end at different times; each has the tokens that it has alone."""
    model, prompts, limits = converted(**settings), prompts_of(3, 11, 1, 6, 8, 2, 5), [4, 1, 9, 2, 6, 3, 7]
    alone = [fw.Engine(model).generate([p], n)[0] for p, n in zip(prompts, limits, strict=True)]
    assert [len(new) for new in alone] == limits
    for batch_size in (1, 2, 3, 7, 9):
        assert fw.Engine(model, batch_size).generate(prompts, limits) == alone


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[3], SETTINGS[5]], ids=name)
def test_tokens_do_not_depend_on_stale_buffers_or_free_slots(settings: dict[str, Any]) -> None:
    """Buffers are filled with NaN, and earlier sequences left their states."""
    model, prompts = converted(**settings), prompts_of(*LENGTHS)
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    engine = fw.Engine(model, batch_size=4)
    sampled = engine.generate(prompts_of(7, 8, 9, 10), 5, fw.Sampling(temperature=2.0, seed=1))
    for block in engine.decoder.blocks:
        states = [] if block.recurrence is None else [block.recurrence.state]
        rings = [] if block.window is None else [block.window.keys, block.window.values]
        for tensor in (block.inputs.packed, block.inputs.logits, *states, *rings):
            tensor.fill_(math.nan)
    engine.decoder.hidden.fill_(math.nan)
    assert engine.generate(prompts, 6) == expected
    assert engine.generate(prompts[:1], 6) == expected[:1]
    assert engine.generate(prompts_of(7, 8, 9, 10), 5, fw.Sampling(temperature=2.0, seed=1)) == sampled


def test_generation_from_a_state_matches_the_whole_prompt() -> None:
    for settings in (SETTINGS[0], SETTINGS[1]):
        model, (first, more) = converted(**settings), prompts_of(7, 5)
        engine = fw.Engine(model, batch_size=2)
        whole = engine.generate([torch.cat([first, more])], 6)[0]
        _, state = prefill(model, first)
        assert engine.generate([more, more], 6, states=[state, None]) == [whole, *engine.generate([more], 6)]
        assert int(state.lengths) == int(state.seen) == 12, "the state is left as after the prompt"


def test_on_token_gets_every_token_and_stop_tokens_end_sequences() -> None:
    model, prompts = converted(), prompts_of(3, 11, 6)
    whole = fw.Engine(model).generate(prompts, 12)
    stop = whole[1][4]
    cut = [new[: new.index(stop) + 1] if stop in new else new for new in whole]
    assert len(cut[1]) <= 5
    events: list[tuple[int, int]] = []
    engine = fw.Engine(model, batch_size=2)
    assert engine.generate(prompts, 12, stop_tokens=[stop], on_token=lambda *event: events.append(event)) == cut
    assert [[token for i, token in events if i == own] for own in range(3)] == cut
    model.generation_config.eos_token_id = [stop, 0]
    assert engine.generate(prompts, 12) == cut
    assert engine.generate(prompts, 12, stop_tokens=()) == whole
    assert cut == [greedy(model, prompt, 12, eos_token_id=[stop]) for prompt in prompts]


def test_one_new_token_no_prompts_and_prompts_as_lists_are_accepted() -> None:
    model, prompts = converted(), prompts_of(3, 1, 6)
    assert fw.Engine(model, batch_size=2).generate(prompts, 1) == [greedy(model, prompt, 1) for prompt in prompts]
    assert fw.Engine(model).generate([]) == []
    assert fw.Engine(model).generate([prompts[0].tolist()], 2) == [greedy(model, prompts[0], 2)]
