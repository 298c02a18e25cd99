"""The teacher's attention distances against its own attention weights, and the gates that are set from them.

Shapes: attention [B,H,T,T]   distances [S]
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches import batch_of
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights.modeling.initialization import TEACHER_SPREAD
from fastweights.modeling.layer import converted_layers
from fastweights.training import attention_distance
from fastweights.training.attention_distance import FIRST_TOKENS, attention_distances
from fastweights.training.losses import run_model
from fastweights.training.output_fit import fit_outputs

LENGTH, STARTS = 40, (0, 17)
FAMILIES = list(CONFIGS)


def converted(family: str = "llama", **settings: Any) -> Any:
    usual = dict(rule="gated_delta", m=6, gate_init="teacher", train_length=256)
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**usual | settings))


def teacher_attention(family: str, batch: dict[str, Tensor]) -> list[Tensor]:
    """The weights of every layer, computed by transformers in float64."""
    teacher = pretrained(family).double()
    teacher.set_attn_implementation("eager")
    with torch.no_grad():
        return list(run_model(teacher, batch, output_attentions=True).attentions)


def mean_distance(attention: Tensor, batch: dict[str, Tensor], window: int, group: int, first: int) -> Tensor:
    """Written as loops over rows, heads and pairs of tokens."""
    heads, length = attention.shape[1], attention.shape[2]
    sums = torch.zeros(heads // group, 2, dtype=torch.float64)
    for row, places in zip(attention, batch["position_ids"], strict=True):
        for head in range(heads):
            for i in range(length):
                for j in range(i + 1 - window):
                    if places[j] >= first:
                        distance = i - j if window == 0 else i - window + 1 - j
                        sums[head // group] += torch.stack([row[head, i, j] * distance, row[head, i, j]])
    return torch.where(sums[:, 1] > 0, sums[:, 0] / sums[:, 1], 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_distances_equal_those_of_the_teachers_own_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every family, with packed documents, in blocks that do not divide the row, with and without a window."""
    monkeypatch.setattr(attention_distance, "BLOCK_WEIGHTS", 16 * 4 * LENGTH)
    batch = batch_of(tokens(2, LENGTH), STARTS)
    expected = teacher_attention(family, batch)
    for window, heads, sinks, first in ((0, "query", 0, FIRST_TOKENS), (5, "kv", 2, FIRST_TOKENS), (8, "query", 6, 6)):
        student = converted(family, window=window, state_heads=heads, sinks=sinks)
        found = attention_distances(converted_layers(student), pretrained(family), [batch])
        shape = converted_layers(student)[0].shape
        group = shape.heads // shape.kv_heads if heads == "kv" else 1
        assert len(found) == 2
        for index, distances in found.items():
            truth = mean_distance(expected[index], batch, window, group, first)
            assert_close(f"layer {index}, window {window}", distances, truth, 1e-4)


def test_distances_of_several_batches_are_those_of_all_rows_together() -> None:
    rows = batch_of(tokens(3, LENGTH), STARTS)
    parts = [{name: x[part] for name, x in rows.items()} for part in (slice(0, 1), slice(1, None))]
    layers = converted_layers(converted(window=5))
    together, apart = (attention_distances(layers, pretrained("llama"), x) for x in ([rows], parts))
    for index in together:
        assert_close(f"layer {index}", apart[index], together[index], 1e-6)


def test_only_converted_layers_are_measured_and_nothing_beyond_the_window_is_zero() -> None:
    batch = batch_of(tokens(2, LENGTH), STARTS)
    found = attention_distances(converted_layers(converted(window=30, layers=(1,))), pretrained("llama"), [batch])
    assert list(found) == [1] and not found[1].any()


def test_distances_of_a_bfloat16_teacher_are_close() -> None:
    batch, student = batch_of(tokens(2, LENGTH), STARTS), converted(window=5)
    expected = attention_distances(converted_layers(student), pretrained("llama"), [batch])
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_distances(converted_layers(student), pretrained("llama").bfloat16(), [batch])
    for index in expected:
        assert_close(f"layer {index}", found[index], expected[index], 0.05)


def forget_gates(student: Any, gate: str = "f") -> list[Tensor]:
    """Memory lengths of each layer's states, [S,m] in order."""
    rules = [layer.rule for layer in converted_layers(student).values()]
    return [rule.gates[gate].bias.detach().double().exp().view(rule.states, -1) for rule in rules]


@pytest.mark.parametrize("heads", ["query", "kv"])
@pytest.mark.parametrize("rule", ["decay", "gated_delta"])
def test_fit_spreads_memory_lengths_around_each_heads_distance(rule: str, heads: str) -> None:
    batch, teacher = batch_of(tokens(2, 96)), pretrained("llama")
    student, log = (converted(rule=rule, state_heads=heads, window=4, gate_init=init) for init in ("teacher", "log"))
    assert all(torch.equal(a, b) for a, b in zip(forget_gates(student), forget_gates(log), strict=True))
    distances = attention_distances(converted_layers(student), teacher, [batch])
    fit_outputs(student, teacher, [batch], "full")
    for index, lengths in enumerate(forget_gates(student)):
        layer = converted_layers(student)[index].rule
        pairs = layer.projections.planes.shape[1]
        assert pairs and torch.equal(lengths[:, :pairs], lengths[:, pairs : 2 * pairs])
        distinct = lengths[:, pairs:].sort(dim=1).values.log()
        low, high = ((distances[index] * factor).clamp(1, 256).log() for factor in (1 / TEACHER_SPREAD, TEACHER_SPREAD))
        steps = torch.linspace(0, 1, distinct.shape[1], dtype=torch.float64)
        assert_close("lengths", distinct, torch.lerp(low[:, None], high[:, None], steps), 1e-4)
        if rule == "decay":
            assert_close("scale of the keys", layer.key_scale.double(), 1 / (1 + lengths), 1e-5)
    before = {name: x.clone() for name, x in student.state_dict().items()}
    fit_outputs(student, teacher, [batch], "full")
    for name, tensor in student.state_dict().items():
        assert_close(f"{name} after another fit", tensor, before[name], 1e-4)


def test_a_gated_head_remembers_for_the_teachers_distance() -> None:
    batch, teacher, student = batch_of(tokens(2, 96)), pretrained("gpt2"), converted("gpt2", rule="gated", m=4)
    fit_outputs(student, teacher, [batch], "scale")
    for index, distances in attention_distances(converted_layers(student), teacher, [batch]).items():
        assert_close("lengths", forget_gates(student, "g")[index][:, 0], distances.clamp(1, 256), 1e-5)


@pytest.mark.parametrize("rule", ["decay", "gated", "gated_delta"])
def test_heads_without_distant_attention_keep_their_gates(rule: str) -> None:
    batch, student = batch_of(tokens(2, 20)), converted(rule=rule, window=30)
    before = [x.clone() for x in forget_gates(student, "g" if rule == "gated" else "f")]
    fit_outputs(student, pretrained("llama"), [batch], "full")
    after = forget_gates(student, "g" if rule == "gated" else "f")
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_fit_leaves_trained_gates_and_other_starts_alone() -> None:
    batch, teacher = batch_of(tokens(2, 96)), pretrained("llama")
    trained = converted(window=4)
    for layer in converted_layers(trained).values():
        layer.rule.gates["f"].weight.data[0, 0] = 1e-3
    half_trained = converted(window=4)
    converted_layers(half_trained)[0].rule.gates["g"].weight.data[0, 0] = 1e-3
    for student in (trained, converted(window=4, gate_init="log"), converted(window=4, gate_init="uniform")):
        before = [x.clone() for x in forget_gates(student)]
        fit_outputs(student, teacher, [batch], "full")
        assert all(torch.equal(a, b) for a, b in zip(forget_gates(student), before, strict=True))
    fit_outputs(half_trained, teacher, [batch], "full")
    start = forget_gates(converted(window=4))
    same = [torch.equal(a, b) for a, b in zip(forget_gates(half_trained), start, strict=True)]
    assert same == [True, False]


def test_distances_are_measured_on_the_first_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastweights.training.output_fit.DISTANCE_TOKENS", 100)
    batches, teacher = [batch_of(tokens(2, 40, seed=seed)) for seed in range(4)], pretrained("llama")
    found, expected = converted(window=4), converted(window=4)
    fit_outputs(found, teacher, iter(batches), "full")
    fit_outputs(expected, teacher, batches[:2], "full")
    assert all(torch.equal(a, b) for a, b in zip(forget_gates(found), forget_gates(expected), strict=True))
