"""On a GPU: the same answers as on the CPU, in every family. Skipped where there is none; the last run's outcome is in
results/gpu_parity.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens

import fastweights as fw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VARIANTS = [
    dict(rule="decay", m=6),
    dict(rule="gated", m=6, window=5),
    dict(rule="delta", m=6),
    dict(rule="add", m=6, feature_map="elu", normalize="attention"),
    dict(rule="local", window=7),
]


@pytest.mark.parametrize("kept", [None, (1,)], ids=["full", "hybrid"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
def test_gpu_and_cpu_agree(settings: dict[str, Any], family: str, kept: tuple[int, ...] | None) -> None:
    model, ids = fw.convert(pretrained(family), fw.FastWeightsConfig(layers=kept, **settings)), tokens(2, 70)
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
