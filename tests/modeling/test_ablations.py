"""Ablations of the decay rule: the paper's equations in a plain float64 loop, and the same on every path of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine import greedy, prompts_of
from helpers.relative_error import assert_close
from helpers.tiny import depend_on_input, pretrained, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

import fastweights as fw
from fastweights.modeling.ablations import gated_write, linear_gates
from fastweights.rules.base import MIN_GATE_LOGIT

B, S, G, D, M = 2, 2, 3, 5, 4
RUNS = {"linear_gates": linear_gates, "gated_write": gated_write}


def equation(ablation: str, inputs: list[Tensor], mask: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, as the paper writes it: one head at a time, G = z f^T as a matrix."""
    q, k, v, f, z, start = inputs
    states = [[start[b, s] for s in range(S)] for b in range(B)]
    rows = []
    for t in range(q.shape[1]):
        for b in range(B):
            for s in range(S):
                old = states[b][s] * (0.0 if reset[b, t] else 1.0)
                write = v[b, t, s][:, None] * k[b, t, s][None, :]
                if ablation == "linear_gates":
                    new = z[b, t, s][:, None] * f[b, t, s][None, :] * old + write
                else:
                    gate = torch.sigmoid(z[b, t, s])[:, None] * torch.sigmoid(f[b, t, s])[None, :]
                    new = gate * old + (1 - gate) * write
                states[b][s] = new if mask[b, t] else old
                heads = [new @ q[b, t, s * G + g] if mask[b, t] else torch.zeros(D).double() for g in range(G)]
                rows.append(torch.stack(heads))
    y = torch.stack(rows).unflatten(0, (q.shape[1], B, S)).permute(1, 0, 2, 3, 4).flatten(2, 3)
    return y, torch.stack([torch.stack(of_row) for of_row in states])


def random_inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(B, length, G * S, M), (B, length, S, M), (B, length, S, D), (B, length, S, M), (B, length, S, D)]
    return [torch.randn(*shape, generator=generator).double() for shape in (*shapes, (B, S, D, M))]


@pytest.mark.parametrize("ablation", RUNS)
@pytest.mark.parametrize("length", [1, 19])
@pytest.mark.parametrize("backend", ["loop", "chunked"])
def test_outputs_state_and_gradients_match_the_equation(ablation: str, length: int, backend: str) -> None:
    inputs = [x.requires_grad_() for x in random_inputs(length)]
    mask, reset = torch.ones(B, length, dtype=torch.bool), torch.zeros(B, length, dtype=torch.bool)
    mask[0, 3:5], reset[1, 7:8] = False, True
    found = []
    for run in (lambda: equation(ablation, inputs, mask, reset), lambda: ours(ablation, inputs, mask, reset, backend)):
        y, state = run()
        weights = torch.Generator().manual_seed(1)
        loss = sum((x * torch.randn(x.shape, generator=weights).double()).sum() for x in (y, state))
        found.append([y, state, *torch.autograd.grad(loss, inputs)])
    for name, expected, own in zip(("y", "state", "dq", "dk", "dv", "df", "dz", "dS"), *found, strict=True):
        assert_close(f"{name}, {ablation}", own, expected, 1e-10)


def ours(ablation: str, inputs: list[Tensor], mask: Tensor, reset: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v, f, z, start = inputs
    with fw.ops.use_backend(backend):
        return RUNS[ablation](q, k, v, (f, z), start, mask=mask, reset=reset)


def test_gated_write_has_the_floor_of_the_gates() -> None:
    q, k, v, f, z, start = random_inputs(3)
    floor = torch.full_like(f, MIN_GATE_LOGIT)
    below = gated_write(q, k, v, (floor - 5, z), start)
    assert_close("y", below[0], gated_write(q, k, v, (floor, z), start)[0], 1e-12)


def converted(**settings: Any) -> Any:
    return fw.convert(pretrained("llama"), fw.FastWeightsConfig(**dict(rule="decay", m=6) | settings)).eval()


@pytest.mark.parametrize("ablation", [*RUNS, "one_gate"])
@torch.no_grad()
def test_cached_padded_and_saved_passes_agree(ablation: str, tmp_path: Path) -> None:
    settings = dict(rule="gated" if ablation == "one_gate" else "decay", window=3, state_heads="kv")
    model, ids = converted(ablation=ablation, **settings), tokens(2, 13)
    depend_on_input(model)
    if ablation == "linear_gates":  # gates of several times the state would leave float32 nothing to compare
        for name, parameter in model.named_parameters():
            parameter.mul_(0.1 if ".gates." in name else 1)
    expected = model(ids).logits
    plain = converted(**settings)
    depend_on_input(plain)
    assert not torch.allclose(expected, plain(ids).logits, rtol=1e-3)
    cache, logits = None, []
    for size in (1, 5, 1, 6):
        seen = sum(x.shape[1] for x in logits)
        out = model(ids[:, seen : seen + size], past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, [*logits, out.logits]
    assert_close("logits, split", torch.cat(logits, 1), expected, 1e-5)
    padded = torch.nn.functional.pad(ids, (4, 0))
    mask = (torch.arange(17) >= 4).long().expand(2, -1)
    assert_close("logits, padded", model(padded, attention_mask=mask).logits[:, 4:], expected, 1e-5)
    model.save_pretrained(tmp_path)
    assert_close("logits, loaded", AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, expected, 1e-6)
    (prompt,) = prompts_of(7)
    engine = fw.Engine(model, batch_size=1)
    assert engine.generate([prompt], max_new_tokens=6) == [greedy(model, prompt, 6)]
    assert f"ablation {ablation}" in engine.batch.decoder.unsupported_reason


@torch.no_grad()
def test_linear_gates_start_as_the_gates_of_the_rule() -> None:
    plain, linear, ids = converted(), converted(ablation="linear_gates"), tokens(1, 11)
    assert_close("logits", linear(ids).logits, plain(ids).logits, 1e-5)
    gates = [layer.rule.gates["z"].bias for layer in (attention_of(plain), attention_of(linear))]
    assert_close("gates", gates[1], gates[0].sigmoid(), 1e-6)


def test_pretrained_values_are_not_rescaled() -> None:
    for rule, ablation in (("decay", "pretrained_values"), ("decay", "gated_write+pretrained_values"), ("add", None)):
        settings = fw.FastWeightsConfig(rule=rule, m=6, ablation=ablation or "pretrained_values", state_heads="kv")
        base = pretrained("llama")
        values = base.model.layers[0].self_attn.v_proj.weight.detach().clone()
        changed = attention_of(fw.convert(base, settings)).rule.projections.v_proj.weight
        assert torch.equal(changed, values)
        plain = fw.convert(pretrained("llama"), fw.FastWeightsConfig(rule=rule, m=6, state_heads="kv"))
        assert not torch.equal(attention_of(plain).rule.projections.v_proj.weight, values)


def test_one_gate_is_that_of_all_heads() -> None:
    rule = attention_of(converted(rule="gated", ablation="one_gate")).rule
    rule.gates["g"].weight.data.normal_(generator=torch.Generator().manual_seed(0))
    (logit,) = rule.gate_logits(torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)))
    assert logit.shape == (2, 5, 4) and logit.std() > 0.1 and torch.equal(logit, logit[..., :1].expand_as(logit))
    assert rule.gates["g"].bias.tolist() == [0.0]


def attention_of(model: Any) -> Any:
    return model.family.attention_of(model.family.blocks(model)[0])
