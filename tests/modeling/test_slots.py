"""Layers of the rules with slots: how they start, where linformer writes, and what of a state they continue from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from helpers.batches import packed
from helpers.relative_error import assert_close
from helpers.tiny import depend_on_input, pretrained, tokens
from torch import Tensor
from transformers import CompileConfig

import fastweights as fw
from fastweights.modeling.initialization import block_means
from fastweights.modeling.layer import PositionWeights, SequenceInfo, converted_layers, positions_after
from fastweights.training.losses import StageLoss, capture_attention, layer_output, sequence_info
from fastweights.training.recipe import Stage

HEAD_DIM = 8
every_rule = pytest.mark.parametrize("rule", ["abc", "linformer"])


def converted(family: str = "llama", **settings: Any) -> Any:
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**settings)).eval()
    depend_on_input(model)
    return model


def first_rule(family: str = "gpt2", **settings: Any) -> Any:
    return converted_layers(fw.convert(pretrained(family), fw.FastWeightsConfig(**settings)))[0].rule


# --- how the layers start


@every_rule
@pytest.mark.parametrize("m", [2, 19])
def test_queries_and_keys_are_the_pretrained_ones_for_any_number_of_slots(rule: str, m: int) -> None:
    pretrained_rows = pretrained("gpt2").transformer.h[0].attn.c_attn.weight.detach().T
    projections = first_rule(rule=rule, m=m).projections
    for name, rows in zip("qkv", pretrained_rows.chunk(3), strict=True):
        scale = 1 if name == "v" else HEAD_DIM**-0.25  # the square root of the logits' scale
        assert_close(name, getattr(projections, f"{name}_proj").weight, rows * scale, 1e-6)


@pytest.mark.parametrize("gate_rank", [None, 3])
def test_slots_of_abc_start_with_different_controls(gate_rank: int | None) -> None:
    """Slots with one control hold the same, and would learn the same."""
    control = first_rule(rule="abc", m=6, gate_rank=gate_rank).gates["s"]
    assert control.bias is None
    assert len(control.weight.unique(dim=0)) == len(control.weight)


@pytest.mark.parametrize(("length", "m"), [(12, 4), (13, 4), (3, 5)])
def test_slots_of_linformer_start_as_means_of_blocks(length: int, m: int) -> None:
    weights = block_means(length, m)
    assert weights.shape == (length, m) and ((weights > 0).sum(1) == 1).all()
    sums = weights.sum(0)
    assert_close("sums", sums[sums > 0], torch.ones(min(m, length)), 1e-6)
    assert (weights.argmax(1).diff() >= 0).all()
    assert torch.equal(first_rule(rule="linformer", m=m, train_length=length).gates["weight"].weight, weights)


# --- positions


def test_positions_count_the_real_tokens_of_each_document() -> None:
    generator, batch, length = torch.Generator().manual_seed(0), 4, 30
    mask, reset = (torch.rand(batch, length, generator=generator) < share for share in (0.7, 0.15))
    seen = torch.tensor([0, 3, 11, 0])
    for info in (SequenceInfo(), SequenceInfo(mask), SequenceInfo(None, reset), SequenceInfo(mask, reset)):
        found = positions_after(seen, batch, length, info)
        for b in range(batch):
            position = int(seen[b])
            for t in range(length):
                if info.reset is not None and info.reset[b, t]:
                    position = 0
                if info.mask is None or info.mask[b, t]:
                    assert found[b, t] == position
                    position += 1


def test_weights_past_the_last_position_are_zero() -> None:
    weights = PositionWeights(3, 2)
    torch.nn.init.normal_(weights.weight, generator=torch.Generator().manual_seed(0))
    found = weights(torch.tensor([[0, 2], [3, 100]]))
    assert torch.equal(found[0], weights.weight[[0, 2]]) and not found[1].any()


@torch.no_grad()
def test_tokens_past_train_length_are_counted_and_not_written() -> None:
    model, ids = converted(rule="linformer", m=3, train_length=6), tokens(2, 15)
    states = [model(ids[:, :length], use_cache=True).past_key_values.layers[0].get("state") for length in (5, 6, 15)]
    five, six, fifteen = (state[:, :, :-1] for state in states)
    assert not torch.equal(five, six)
    assert_close("slots", fifteen, six, 1e-6)
    assert [int(state[0, 0, -1, 0]) for state in states] == [5, 6, 15]


# --- states


@every_rule
@torch.no_grad()
def test_saved_state_continues_as_the_whole_text(rule: str, tmp_path: Path) -> None:
    model, ids = converted(rule=rule, m=5, window=3, train_length=9), tokens(2, 12)
    model(ids[:, :5], use_cache=True).past_key_values.save(tmp_path / "state", model)
    loaded = fw.FastWeightsCache.load(tmp_path / "state", model)
    expected = model(ids).logits[:, 5:]
    assert_close("logits", model(ids[:, 5:], past_key_values=loaded).logits, expected, 1e-5)


@every_rule
@torch.no_grad()
def test_reset_cache_is_an_empty_memory(rule: str) -> None:
    model, ids = converted(rule=rule, m=5), tokens(1, 6)
    cache = model(tokens(1, 9, seed=1), use_cache=True).past_key_values
    cache.reset()
    assert_close("logits", model(ids, past_key_values=cache).logits, model(ids).logits, 1e-6)


def test_compiled_step_has_no_graph_break() -> None:
    torch._dynamo.reset()
    model, ids, graphs = converted(rule="linformer", m=5, train_length=8), tokens(2, 5), []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    compiling = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiling._compile_all_devices = True  # also on a CPU
    found = model.generate(ids, cache_implementation="static", compile_config=compiling, **options)
    assert torch.equal(found, model.generate(ids, **options)) and len(graphs) == 1


# --- training


@every_rule
@pytest.mark.parametrize("loss", ["finetune", "transfer", "distill"])
def test_every_new_parameter_learns(rule: str, loss: str) -> None:
    rows, _ = packed()
    model = converted(rule=rule, m=5, window=3, state_heads="kv").train()
    StageLoss(model, pretrained("llama"), Stage(loss=loss))(rows).backward()
    for index, layer in converted_layers(model).items():
        for name, parameter in layer.named_parameters():
            if "o_proj" not in name or loss != "transfer":
                assert isinstance(parameter.grad, Tensor) and torch.isfinite(parameter.grad).all(), name
                assert parameter.grad.any(), f"layer {index}: {name}"


@every_rule
def test_packed_documents_train_as_separate_ones(rule: str) -> None:
    rows, documents = packed()
    model, teacher = converted(rule=rule, m=5), pretrained("llama")
    with torch.no_grad():
        stage = StageLoss(model, None, Stage(loss="finetune"))
        assert_close("loss", stage(rows), sum(stage(document) for document in documents), 1e-5)
        together, apart = capture_attention(teacher, rows), [capture_attention(teacher, each) for each in documents]
        for index, layer in converted_layers(model).items():
            outputs = [
                layer_output(layer, captured[index], sequence_info(document))
                for captured, document in zip(apart, documents, strict=True)
            ]
            output = layer_output(layer, together[index], sequence_info(rows))
            assert_close("output", output, torch.cat(outputs, dim=1), 1e-5)
