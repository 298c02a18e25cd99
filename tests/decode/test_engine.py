"""The decode engine: the tokens of model.generate, whatever shares the batch; and how it chooses tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from helpers.engine import LENGTHS, SETTINGS, WIDE, converted, greedy, name, texts
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, VOCAB, config_of, tokens
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import fastweights as fw
from fastweights.decode.engine import prefill
from fastweights.decode.model import DecodeModel, ForwardDecodeModel
from fastweights.decode.sampling import Mode, Sampler, filtered

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# the same as the model


@pytest.mark.parametrize("settings", SETTINGS, ids=name)
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_and_logits_are_the_models(family: str, settings: dict[str, Any]) -> None:
    """Three texts of different lengths in two slots, and the lean stepper's logits beside the model's forward."""
    model, prompts = converted(family, **settings), texts(*LENGTHS)
    engine = fw.Engine(model, batch_size=2, piece=5)
    assert isinstance(engine.decoder, DecodeModel)
    assert engine.generate(prompts, 7) == [greedy(model, prompt, 7) for prompt in prompts]
    new, text = tokens(8, seed=99), prompts[1]
    with torch.no_grad():
        engine.decoder.fill(1, prefill(model, text)[1])
        for token in new:
            engine.decoder.tokens[1] = token
            text = torch.cat([text, token[None]])
            assert_close("logits", engine.decoder.step()[1], model(text[None]).logits[0, -1], 1e-5)


def test_layers_with_different_rotary_frequencies() -> None:
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
def test_other_dtypes(dtype: torch.dtype) -> None:
    for family, settings in (("gemma3_text", SETTINGS[1]), ("gpt2", SETTINGS[3])):
        model = converted(family, **settings).to(dtype)
        engine, text = fw.Engine(model), tokens(6)
        engine.generate([text[:5]], 1)
        engine.decoder.tokens.copy_(text[5:])
        with torch.no_grad():
            expected = model(text[None]).logits[0, -1]
        assert_close("logits", engine.decoder.step()[0], expected, 2e-2 if dtype == torch.bfloat16 else 1e-6)


def test_a_model_of_unknown_parts_runs_by_its_own_forward() -> None:
    """OPT-350M's order of norms, frequencies that depend on the length, an adapter on a projection."""
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
        engine, prompts = fw.Engine(model, batch_size=2), texts(*LENGTHS)
        assert isinstance(engine.decoder, ForwardDecodeModel)
        assert engine.generate(prompts, 6) == [greedy(model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_end_or_are_clamped(family: str) -> None:
    with pytest.raises(ValueError, match=r"learned positions for 96 tokens and this text may reach 97"):
        fw.Engine(converted(family, m=4)).generate(texts(90), 8)
    assert fw.Engine(converted(family, m=4)).generate(texts(90), 7) == [greedy(converted(family, m=4), *texts(90), 7)]
    model = converted(family, m=4, positions="clamp")
    assert fw.Engine(model).generate(texts(90), 20) == [greedy(model, *texts(90), 20)]


def test_prefill_in_pieces_and_its_memory() -> None:
    for settings in (SETTINGS[0], SETTINGS[1]):
        model, sizes, engine = converted(**settings), set(), fw.Engine(converted(**settings), piece=7)
        for length in (1, 40, 300):
            logits, state = prefill(model, *texts(length), piece=7)
            sizes.add(state.nbytes)
            with torch.no_grad():
                assert_close("logits", logits, model(texts(length)[0][None]).logits[:, -1], 1e-5)
        assert len(sizes) == 1
        held = sum(t.nbytes for block in engine.decoder.blocks for t in (block.packed, block.rule.state))
        engine.generate(texts(300), 2)
        assert held == sum(t.nbytes for block in engine.decoder.blocks for t in (block.packed, block.rule.state))


def test_a_prompt_of_many_pieces_never_is_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = converted(), []
    forward = type(model).forward

    def spy(self: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
        lengths.append(ids.shape[1])
        assert kwargs["logits_to_keep"] == 1
        return forward(self, ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    prefill(model, tokens(100), piece=16)
    assert lengths == [16] * 6 + [4]


# many texts


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[3]], ids=name)
def test_slots_are_taken_over_by_the_next_text(settings: dict[str, Any]) -> None:
    """Texts of different lengths end at different times: each has the tokens that it has alone."""
    model, prompts, limits = converted(**settings), texts(3, 11, 1, 6, 8, 2, 5), [4, 1, 9, 2, 6, 3, 7]
    alone = [fw.Engine(model).generate([p], n)[0] for p, n in zip(prompts, limits, strict=True)]
    assert [len(new) for new in alone] == limits
    for batch_size in (1, 2, 3, 7, 9):
        assert fw.Engine(model, batch_size).generate(prompts, limits) == alone


@pytest.mark.parametrize("settings", [SETTINGS[1], SETTINGS[3], SETTINGS[5]], ids=name)
def test_what_is_in_the_other_slots_does_not_matter(settings: dict[str, Any]) -> None:
    """Free slots hold numbers that are none, and texts before left their states."""
    model, prompts = converted(**settings), texts(*LENGTHS)
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    engine = fw.Engine(model, batch_size=4)
    sampled = engine.generate(texts(7, 8, 9, 10), 5, fw.Sampling(temperature=2.0, seed=1))
    for block in engine.decoder.blocks:
        states = [] if block.rule is None else [block.rule.state]
        for tensor in (block.packed, *states, *([] if block.window is None else block.window.rings)):
            tensor.fill_(math.nan)
    engine.decoder.hidden.fill_(math.nan)
    assert engine.generate(prompts, 6) == expected
    assert engine.generate(prompts[:1], 6) == expected[:1]
    assert engine.generate(texts(7, 8, 9, 10), 5, fw.Sampling(temperature=2.0, seed=1)) == sampled


def test_a_text_goes_on_from_its_state() -> None:
    for settings in (SETTINGS[0], SETTINGS[1]):
        model, (first, more) = converted(**settings), texts(7, 5)
        engine = fw.Engine(model, batch_size=2)
        whole = engine.generate([torch.cat([first, more])], 6)[0]
        _, state = prefill(model, first)
        assert engine.generate([more, more], 6, states=[state, None]) == [whole, *engine.generate([more], 6)]
        assert int(state.lengths) == int(state.seen) == 12, "the state is left as after the prompt"


def test_tokens_come_one_by_one_and_end_with_a_stop_token() -> None:
    model, prompts = converted(), texts(3, 11, 6)
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


def test_one_token_each_and_no_prompts() -> None:
    model, prompts = converted(), texts(3, 1, 6)
    assert fw.Engine(model, batch_size=2).generate(prompts, 1) == [greedy(model, prompt, 1) for prompt in prompts]
    assert fw.Engine(model).generate([]) == []
    assert fw.Engine(model).generate([prompts[0].tolist()], 2) == [greedy(model, prompts[0], 2)]


# sampling


def test_a_sequences_tokens_follow_from_its_seed_alone() -> None:
    model, prompts = converted(), texts(3, 11, 1, 6)
    asked = [
        fw.Sampling(temperature=1.5, seed=5),
        fw.Sampling(top_k=20, seed=6),
        fw.Sampling(),
        fw.Sampling(top_p=0.9, repetition_penalty=1.3, seed=2**40 + 5),
    ]
    alone = [fw.Engine(model).generate([p], 12, [s])[0] for p, s in zip(prompts, asked, strict=True)]
    assert alone[2] == greedy(model, prompts[2], 12)
    for batch_size in (1, 3, 4):
        assert fw.Engine(model, batch_size).generate(prompts, 12, asked) == alone
    back = fw.Engine(model, 2).generate(prompts[::-1], 12, asked[::-1])
    assert back[::-1] == alone
    one_for_all = fw.Engine(model, 2).generate([prompts[0]] * 3, 12, fw.Sampling(temperature=1.5, seed=5))
    assert one_for_all[0] == alone[0] and len({tuple(new) for new in one_for_all}) == 3
    high = fw.Engine(model).generate([prompts[0]], 12, fw.Sampling(temperature=1.5, seed=2**40 + 5))
    assert high[0] != alone[0], "all of the seed counts"


def test_without_a_seed_torchs_generator_decides() -> None:
    engine, prompts = fw.Engine(converted(), 2), [texts(4)[0]] * 2
    torch.manual_seed(3)
    first = engine.generate(prompts, 12, WIDE)
    assert first != engine.generate(prompts, 12, WIDE) and first[0] != first[1]
    torch.manual_seed(3)
    assert first == engine.generate(prompts, 12, WIDE)


@pytest.mark.parametrize("penalty", [1.4, 0.8])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    model, prompts = converted(), texts(3, 11, 6)
    found = fw.Engine(model, 2).generate(prompts, 15, fw.Sampling(repetition_penalty=penalty))
    assert found == [greedy(model, prompt, 15, repetition_penalty=penalty) for prompt in prompts]
    assert found != fw.Engine(model, 2).generate(prompts, 15)


CHOICES = [
    fw.Sampling(temperature=0.7),
    fw.Sampling(top_k=7),
    fw.Sampling(top_k=500, top_p=0.6),
    fw.Sampling(temperature=1.7, top_k=9, top_p=0.8, repetition_penalty=1.5),
    fw.Sampling(top_p=0.0),
    fw.Sampling(top_p=1.0, repetition_penalty=0.7),
]


def by_transformers(logits: torch.Tensor, text: torch.Tensor, asked: fw.Sampling) -> torch.Tensor:
    """Probabilities [V] of the next token by transformers' own processors, in the order of its generate."""
    scores = RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(text[None], logits[None].clone())
    for warper, value in (
        (TemperatureLogitsWarper, asked.temperature),
        (TopKLogitsWarper, asked.top_k),
        (TopPLogitsWarper, asked.top_p),
    ):
        scores = scores if value is None else warper(value)(text[None], scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("asked", CHOICES, ids=str)
def test_tokens_have_transformers_probabilities(asked: fw.Sampling) -> None:
    count, text = 20_000, tokens(8, seed=3)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    chooser, mode = Sampler(count, VOCAB, torch.device("cpu")), Mode.of([asked])
    chooser.prepare(mode)
    chooser.fill(0, asked, seed=17, text=text)
    for held in (chooser.samples, chooser.temperature, chooser.top_p, chooser.top_k, chooser.penalty, chooser.key):
        held.copy_(held[:1].clone().expand_as(held))
    if chooser.seen is not None:
        chooser.seen.copy_(chooser.seen[:1].clone().expand_as(chooser.seen))
    drawn = chooser.choose(logits.expand(count, -1), torch.arange(count), mode)
    found = torch.bincount(drawn, minlength=VOCAB) / count
    expected = by_transformers(logits, text, asked)
    assert not found[expected == 0].any(), "tokens that are left out are never drawn"
    spread = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() <= 5 * spread + 1e-9).all()
    assert float((found - expected).square().sum() / spread.square().sum().clamp(min=1e-12)) < 2.5


def test_the_filters_keep_what_transformers_keep() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(5, VOCAB) * 2).round(decimals=1)  # with ties
    logits[1, 2:] = -math.inf
    logits[1, :2] = 0.0  # with two that have half of the probability each
    top_k, top_p = torch.tensor([1, 5, VOCAB, 30, 9]), torch.tensor([1.0, 0.5, 0.9, 0.2, 0.99])
    scores, order = filtered(logits, top_k, top_p)
    kept = torch.zeros_like(scores).scatter(1, order, scores)
    for row in range(5):
        expected = TopKLogitsWarper(int(top_k[row]))(None, logits[row : row + 1])
        expected = TopPLogitsWarper(float(top_p[row]))(None, expected)
        assert_close("probabilities", kept[row].softmax(-1), expected[0].softmax(-1), 1e-6)


def test_neighbouring_places_and_seeds_draw_independently() -> None:
    """The noise of two places, and of two seeds, agrees no more often than chance."""
    count, chooser = 3000, Sampler(3000, VOCAB, torch.device("cpu"))
    chooser.samples.fill_(True)
    drawn = []
    for seed in (0, 1):
        chooser.fill(0, fw.Sampling(seed=seed), seed, tokens(1))
        chooser.key.copy_(chooser.key[:1].clone().expand_as(chooser.key))
        drawn.append(chooser.choose(torch.zeros(count, VOCAB), torch.arange(count), Mode(True, False, False)))
    for other in (drawn[1], drawn[0].roll(1)):
        assert abs(float((drawn[0] == other).float().mean()) - 1 / VOCAB) < 5 * (VOCAB * count) ** -0.5


# on a GPU


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("family", [pytest.param(family, marks=gpu) for family in CONFIGS])
def test_the_gpus_tokens_are_the_cpus(family: str, graph: bool) -> None:
    for settings in SETTINGS:
        model, prompts = converted(family, **settings), texts(3, 11, 1, 6, 8)
        asked = [fw.Sampling(), fw.Sampling(top_k=20, top_p=0.9, seed=6), fw.Sampling(repetition_penalty=1.3)]
        expected = [fw.Engine(model, 2).generate(prompts, 9, sampling) for sampling in asked]
        engine = fw.Engine(model.cuda(), 2, graph=graph)
        assert [engine.generate(prompts, 9, sampling) for sampling in asked] == expected
        assert fw.Engine(model, 20, graph=graph).generate(prompts, 9) == expected[0], "another tile of rows"
