"""On a GPU: converted models, the engine and measurements agree with the CPU, in every family. The outcome of the last
run is in results/gpu_parity.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches import batch_of, packed
from helpers.engine import LENGTHS, SETTINGS, converted, greedy, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens

import fastweights as fw
from fastweights.evaluation.layer_ranking import rank_layers
from fastweights.profiling.layer_cost import layer_cost

pytestmark = pytest.mark.gpu

VARIANTS = [
    dict(rule="decay", m=6),
    dict(rule="gated", m=6, window=5),
    dict(rule="delta", m=6),
    dict(rule="add", m=6, feature_map="elu", normalize="attention"),
    dict(rule="local", window=7),
]


@pytest.mark.parametrize("layers", [None, (1,)], ids=["full", "hybrid"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
def test_gpu_and_cpu_agree(settings: dict[str, Any], family: str, layers: tuple[int, ...] | None) -> None:
    model, ids = fw.convert(pretrained(family), fw.FastWeightsConfig(layers=layers, **settings)), tokens(2, 70)
    with torch.no_grad():
        expected = model(ids).logits
        greedy = model.generate(ids[:, :20], max_new_tokens=8, do_sample=False)
        model.cuda()
        found = model(ids.cuda()).logits
        split = model(ids[:, :33].cuda(), use_cache=True)
        rest = model(ids[:, 33:].cuda(), past_key_values=split.past_key_values).logits
    assert_close("logits", found.cpu(), expected, 2e-5)
    assert_close("logits, split", torch.cat([split.logits, rest], dim=1).cpu(), expected, 2e-5)
    assert torch.equal(model.generate(ids[:, :20].cuda(), max_new_tokens=8, do_sample=False).cpu(), greedy)


@pytest.mark.parametrize("rule", ["add", "gated", "delta", "decay"])
def test_bfloat16_trains_without_overflow(rule: str) -> None:
    torch.manual_seed(0)
    model = fw.convert(type(pretrained("llama"))(pretrained("llama").config), fw.FastWeightsConfig(rule=rule, m=8))
    model = model.to("cuda", torch.bfloat16).train()
    ids = tokens(4, 1024).cuda()
    model(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("family", CONFIGS)
def test_gpu_tokens_match_cpu_tokens(family: str, graph: bool) -> None:
    for settings in SETTINGS:
        model, prompts = converted(family, **settings), prompts_of(3, 11, 1, 6, 8)
        samplings = [fw.Sampling(), fw.Sampling(top_k=20, top_p=0.9, seed=6), fw.Sampling(repetition_penalty=1.3)]
        expected = [fw.Engine(model, 2).generate(prompts, 9, sampling) for sampling in samplings]
        engine = fw.Engine(model.cuda(), 2, graph=graph)
        assert [engine.generate(prompts, 9, sampling) for sampling in samplings] == expected
        assert fw.Engine(model, 20, graph=graph).generate(prompts, 9) == expected[0], "with another row tile"


def test_hybrid_in_a_cuda_graph_matches_the_model() -> None:
    model = converted(rule="delta", m=6, window=3, layers=(1,)).cuda()
    engine, prompts = fw.Engine(model, batch_size=2, max_length=30), prompts_of(*LENGTHS)
    assert engine.graphs is not None
    assert engine.generate(prompts, 7) == [greedy(model, prompt, 7) for prompt in prompts]


@pytest.mark.parametrize("family", CONFIGS)
def test_gpu_ranking_matches_cpu_ranking(family: str) -> None:
    student, teacher = converted(family, rule="decay", m=5, window=3), pretrained(family)
    batches = [batch_of(tokens(2, 20)), packed()[0]]
    expected = rank_layers(student, teacher, batches, fit=True, progress=False)
    found = rank_layers(student.cuda(), teacher.cuda(), batches, keep=2, fit=True, progress=False)
    # A GPU measures in bfloat16, whose noise counts where a model is close to its base (adaptive_input: 0.002).
    assert found.kl == pytest.approx(expected.kl, rel=0.1, abs=1e-3) and found.kl_after[-1] < 1e-3 * found.kl


def test_layer_cost_captures_every_contender_in_a_cuda_graph() -> None:
    result = layer_cost((128, 4096), device="cuda", repeats=2, progress=False)
    assert [entry.how for entry in result.models] == ["CUDA graph"] * 3
    assert all(point.kernel for entry in result.models if entry.name == "attention" for point in entry.points)
    assert all(point.peak_bytes > point.bytes for entry in result.models for point in entry.points)
