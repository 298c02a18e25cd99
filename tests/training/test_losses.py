"""What training minimizes, against equations written out, Hugging Face's own loss, and documents one by one.

Shapes: ids [B,T]   logits [B,T,V]   a layer's output [B,T,D]   y, the input of its output projection, [B,T,H*d]
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.batches import batch_of, packed
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import SequenceInfo, converted_layers
from fastweights.training.losses import (
    StageLoss,
    capture_attention,
    layer_output,
    next_tokens,
    run_model,
    sequence_info,
    without_plain_positions,
)
from fastweights.training.output_fit import fit_outputs
from fastweights.training.recipe import Stage

SETTINGS = dict(rule="decay", m=5, window=3)


def converted(family: str, **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings or SETTINGS))


def loss_of(student: Any, teacher: Any, batch: dict[str, Tensor], **stage: Any) -> Tensor:
    return StageLoss(student, teacher, Stage(**stage))(batch)


@pytest.mark.parametrize("family", CONFIGS)
def test_finetune_loss_equals_transformers(family: str) -> None:
    ids = tokens(2, 20)
    for model in (pretrained(family), converted(family)):
        with torch.no_grad():
            expected = model(ids, labels=ids).loss * 2 * 19
            assert_close("loss", loss_of(model, None, batch_of(ids)), expected, 1e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_loss_of_packed_rows_equals_that_of_separate_documents(family: str) -> None:
    """For teachers, whose families tell documents apart in different ways, converted models and hybrids."""
    rows, documents = packed()
    teacher = pretrained(family)
    students = [pretrained(family), converted(family), converted(family, **SETTINGS, layers=(1,))]
    for student in students:
        for stage in (dict(loss="finetune"), dict(loss="distill", temperature=2.0, cross_entropy=0.5)):
            with torch.no_grad():
                apart = sum(loss_of(student, teacher, document, **stage) for document in documents)
                together = loss_of(student, teacher, rows, **stage)
            assert_close(str(stage), together, apart, 1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_transfer_loss_of_packed_rows_equals_that_of_separate_documents(family: str) -> None:
    """Inputs and outputs of the teacher's attention, and outputs of the new layers."""
    rows, documents = packed()
    teacher, layers = pretrained(family), converted_layers(converted(family))
    with torch.no_grad():
        together, apart = (
            capture_attention(teacher, rows),
            [capture_attention(teacher, document) for document in documents],
        )
        for index, layer in layers.items():
            expected = torch.cat([captured[index].output for captured in apart], dim=1)
            assert_close("teacher", together[index].output, expected, 1e-5)
            outputs = [
                layer_output(layer, captured[index], sequence_info(part))
                for captured, part in zip(apart, documents, strict=True)
            ]
            assert_close(
                "student", layer_output(layer, together[index], sequence_info(rows)), torch.cat(outputs, dim=1), 1e-5
            )


def test_rows_of_one_document_need_no_positions() -> None:
    """Attention is then free of a mask of T x T."""
    given: list[set[str]] = []
    model = pretrained("llama")
    model.register_forward_pre_hook(lambda _m, _a, keywords: given.append(set(keywords)), with_kwargs=True)
    for batch in (batch_of(tokens(1, 8)), packed()[0]):
        loss_of(model, None, without_plain_positions(batch), loss="finetune")
    assert [names & {"position_ids", "attention_mask"} for names in given] == [set(), {"position_ids"}]


def test_distilling_a_model_into_itself_has_zero_loss_and_gradient() -> None:
    rows, _ = packed()
    teacher, student, other = pretrained("llama"), pretrained("llama"), converted("llama")

    def gradient(model: Any) -> tuple[float, float]:
        loss = loss_of(model, teacher, rows, loss="distill")
        loss.backward()
        return float(loss.detach()), sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5

    loss, norm = gradient(student)
    far, steep = gradient(other)
    assert abs(loss) < 1e-5 * far and norm < 1e-5 * steep
    assert far > 1 and steep > 1


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.0), (2.5, 0.0), (2.5, 0.3)])
def test_distill_loss_equals_the_formula(temperature: float, share: float) -> None:
    rows, _ = packed()
    teacher, student = pretrained("gpt2"), converted("gpt2")
    with torch.no_grad():
        found = loss_of(student, teacher, rows, loss="distill", temperature=temperature, cross_entropy=share)
        inputs = {name: rows[name] for name in ("input_ids", "position_ids")}
        p, q = (model(**inputs, use_cache=False).logits.double()[:, :-1] for model in (teacher, student))
    expected = 0.0
    for row, column in (rows["labels"][:, 1:] != -100).nonzero().tolist():
        target, predicted = (x[row, column] / temperature for x in (p, q))
        ratio = target.log_softmax(0) - predicted.log_softmax(0)
        expected += float((target.softmax(0) * ratio).sum()) * temperature**2
        expected -= share * float(q[row, column].log_softmax(0)[rows["labels"][row, column + 1]])
    assert_close("loss", found, expected, 1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_hidden_states_are_matched_block_by_block(family: str) -> None:
    """Each token's error in shares of its size, the mean over blocks; nothing for the teacher itself."""
    rows, _ = packed()
    teacher, student = pretrained(family), converted(family)
    with torch.no_grad():
        nothing = loss_of(pretrained(family), teacher, rows, loss="distill", hidden=2.0)
        plain, more = (loss_of(student, teacher, rows, loss="distill", hidden=weight) for weight in (0.0, 2.0))
        runs = []
        for model in (teacher, student):
            seen: list[Tensor] = []
            blocks = family_of(model).blocks(model)
            hooks = [b.register_forward_hook(lambda _m, _a, y, seen=seen: seen.append(y)) for b in blocks]
            run_model(model, rows)
            runs.append([y if isinstance(y, Tensor) else y[0] for y in seen])
            for hook in hooks:
                hook.remove()
    counted = next_tokens(rows).view(2, -1) != -100
    expected = 0.0
    for target, predicted in zip(*runs, strict=True):
        share = (predicted - target).double().square().sum(-1) / target.double().square().sum(-1)
        expected += float(share[counted].sum()) / len(runs[0])
    assert float(nothing.abs()) < 1e-6
    assert_close("hidden", more - plain, 2 * expected, 1e-4)
    assert not any(block._forward_hooks for block in family_of(teacher).blocks(teacher))


def test_score_is_cross_entropy_in_every_stage() -> None:
    rows, _ = packed()
    teacher, student = pretrained("gpt2"), converted("gpt2")
    with torch.no_grad():
        expected = loss_of(student, None, rows, loss="finetune")
        for loss in ("transfer", "distill"):
            assert torch.equal(StageLoss(student, teacher, Stage(loss=loss))(rows, score=True), expected)
            assert not torch.equal(StageLoss(student, teacher, Stage(loss=loss))(rows), expected)


@pytest.mark.parametrize("family", CONFIGS)
def test_transfer_loss_of_attention_itself_is_zero(family: str) -> None:
    """A local rule with a window as long as the text is the pretrained attention."""
    rows, _ = packed()
    with torch.no_grad():
        nothing = loss_of(converted(family, rule="local", window=64), pretrained(family), rows, loss="transfer")
        something = loss_of(converted(family), pretrained(family), rows, loss="transfer")
    assert float(nothing) < 1e-9 and float(something) > 0.01


@pytest.mark.parametrize("recompute", [False, True])
def test_transfer_loss_is_the_relative_error_of_each_layer(recompute: bool) -> None:
    """An output that is twice what it should be has an error of one, in every row."""
    rows, teacher = batch_of(tokens(3, 16)), pretrained("gpt2")
    student = converted("gpt2", rule="local", window=64)
    layer = converted_layers(student)[1]
    with torch.no_grad():
        layer.o_proj.weight *= 2
        layer.o_proj.bias *= 2
    loss = StageLoss(student, teacher, Stage(loss="transfer"), recompute=recompute)(rows)
    assert_close("loss", loss, 3 * 1 / 2, 1e-5)
    loss.backward()
    assert layer.o_proj.weight.grad is not None and teacher.lm_head.weight.grad is None
    assert student.transformer.wpe.weight.grad is None, "transfer runs the new layers alone"


def test_transfer_loss_of_a_hybrid_ignores_attention_layers() -> None:
    rows, teacher = batch_of(tokens(2, 16)), pretrained("llama")
    full, hybrid = converted("llama"), converted("llama", **SETTINGS, layers=(1,))
    assert list(converted_layers(hybrid)) == [1]
    with torch.no_grad():
        captured = capture_attention(teacher, rows)
        predicted, target = layer_output(converted_layers(full)[1], captured[1], SequenceInfo()), captured[1].output
        expected = ((predicted - target).square().sum((1, 2)) / target.square().sum((1, 2))).sum()
        assert_close("loss", loss_of(hybrid, teacher, rows, loss="transfer"), expected, 1e-5)


def squared_error(layer: Any, captured: Any, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float((layer_output(layer, captured, sequence_info(batch)) - captured.output).double().square().sum())


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("kind", ["full", "scale"])
def test_no_change_of_fitted_outputs_is_better(family: str, kind: str) -> None:
    """They lower the transfer loss, and no output projection (no scale of heads) nearby is better."""
    rows = batch_of(tokens(8, 32), starts=(0, 20))
    teacher, student = pretrained(family), converted(family, rule="decay", m=5)
    with torch.no_grad():
        before = loss_of(student, teacher, rows, loss="transfer")
        fit_outputs(student, teacher, _halves(rows), kind)
        after = loss_of(student, teacher, rows, loss="transfer")
    assert float(after) < 0.9 * float(before)
    captured = capture_attention(teacher, rows)
    draw = torch.Generator().manual_seed(0)
    for index, layer in converted_layers(student).items():
        best = squared_error(layer, captured[index], rows)
        shape = layer.o_proj.weight.shape if kind == "full" else (layer.shape.heads,)
        for _ in range(4):
            direction = torch.randn(shape, generator=draw)
            for sign in (1, -1):
                other = copy.deepcopy(layer)
                _change_outputs(other, 1 + 0.1 * sign * direction)
                assert squared_error(other, captured[index], rows) > best


def _halves(rows: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: x[part] for name, x in rows.items()} for part in (slice(0, 3), slice(3, None))]


def _change_outputs(layer: Any, factor: Tensor) -> None:
    if factor.ndim == 1:
        factor = factor.repeat_interleave(layer.shape.head_dim)
    layer.o_proj.weight.data *= factor


@pytest.mark.parametrize("kind", ["full", "scale"])
def test_fitted_outputs_equal_least_squares(kind: str) -> None:
    """But for the ridge, the error is the least there is."""
    rows = batch_of(tokens(8, 32))
    teacher, student = pretrained("gpt2"), converted("gpt2", rule="decay", m=5)
    before = copy.deepcopy(student)
    fit_outputs(student, teacher, _halves(rows), kind)
    captured = capture_attention(teacher, rows)
    for index, layer in converted_layers(student).items():
        old, seen = converted_layers(before)[index], []
        old.o_proj.register_forward_pre_hook(lambda _m, given, seen=seen: seen.append(given[0]))
        with torch.no_grad():
            layer_output(old, captured[index], SequenceInfo())
        y, target = seen[0].flatten(0, 1).double(), captured[index].output.flatten(0, 1).double()
        least = _least_error(y, target, old, kind)
        assert squared_error(layer, captured[index], rows) == pytest.approx(least, rel=1e-2 if kind == "full" else 1e-4)


def _least_error(y: Tensor, target: Tensor, layer: Any, kind: str) -> float:
    """The least squared error, with an unknown for each element of the projection and bias, or for each head."""
    if kind == "full":
        unknowns = torch.nn.functional.pad(y, (0, 1), value=1.0)
    else:
        weight = layer.o_proj.weight.detach().double()
        heads = [y[:, i : i + 8] @ weight[:, i : i + 8].T for i in range(0, 32, 8)]
        unknowns = torch.stack([head.flatten() for head in heads], dim=1)
        target = (target - layer.o_proj.bias.detach().double()).flatten()[:, None]
    solution = torch.linalg.lstsq(unknowns, target).solution
    return float((unknowns @ solution - target).square().sum())


def test_fitting_needs_no_gradient_and_changes_outputs_only() -> None:
    rows, teacher, student = batch_of(tokens(4, 32)), pretrained("llama"), converted("llama")
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    fit_outputs(student, teacher, [rows], "full")
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)}
    assert all(parameter.requires_grad and parameter.grad is None for parameter in student.parameters())
