"""Compiled blocks (with torch's own interpreter in place of a compiler): the same losses, gradients and hooks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import packed
from helpers.relative_error import assert_close
from helpers.tiny import pretrained
from helpers.training import STEP, make_recipe, make_train_config, train_in, training_files

import fastweights as fw
from fastweights.modeling.modes import without_window
from fastweights.training.losses import StageLoss, capture_attention
from fastweights.training.optimizer import compile_blocks, uncompile_blocks
from fastweights.training.recipe import Stage
from fastweights.training.trainer import Trainer

# the compiler looks at gradients of tensors that have none
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

STAGES = {
    "finetune": Stage(loss="finetune"),
    "transfer": Stage(loss="transfer"),
    "distill": Stage(loss="distill", hidden=1.0, cross_entropy=0.3),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


def converted() -> Any:
    return fw.convert(pretrained("llama"), fw.FastWeightsConfig(m=4, window=3))


def gradients(student: Any, teacher: Any, stage: Stage) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = StageLoss(student, teacher, stage)(packed()[0])
    loss.backward()
    return loss.detach(), [p.grad for p in student.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", STAGES)
def test_compiled_blocks_give_the_same_loss_and_gradients(name: str) -> None:
    expected = gradients(converted(), pretrained("llama"), STAGES[name])
    student, teacher = converted(), pretrained("llama")
    compile_blocks(student, teacher, STAGES[name])
    found = gradients(student, teacher, STAGES[name])
    assert len(found[1]) == len(expected[1]) > 0
    for one, other in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        assert_close(name, one, other, 1e-4)


@pytest.mark.parametrize("name", ["transfer", "distill"])
def test_compiled_blocks_leave_the_window_out_of_the_same_rows(name: str) -> None:
    rows, found = torch.tensor([False, True]), []
    for compiled in (False, True):
        student, teacher = converted(), pretrained("llama")
        if compiled:
            compile_blocks(student, teacher, STAGES[name])
        losses = [gradients(student, teacher, STAGES[name])[0]]
        for dropped in (rows, ~rows):
            with without_window(student, dropped):
                losses.append(gradients(student, teacher, STAGES[name])[0])
        assert len(set(map(float, losses))) == 3
        found.append(torch.stack(losses))
    assert_close(name, found[1], found[0], 1e-4)


def test_attention_of_uncompiled_teacher_is_captured_again() -> None:
    student, teacher = converted(), pretrained("llama")
    compile_blocks(student, teacher, STAGES["distill"])
    gradients(student, teacher, STAGES["distill"])
    uncompile_blocks(teacher)
    assert sorted(capture_attention(teacher, packed()[0])) == [0, 1]


def test_validation_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compiler(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    twice = torch.compile(lambda x: 2 * x, backend=compiler)
    monkeypatch.setattr(Trainer, "validation_loss", lambda run, score, what: float(twice(torch.ones(()))))
    with training_files(tmp_path) as files:
        recipe = make_recipe(({"loss": "finetune", "tokens": STEP},))
        result = train_in(tmp_path / "run", make_train_config(files, recipe))
    assert result["validation"][0]["loss"] == 2 and not compiled
    assert twice(torch.ones(())) == 2 and len(compiled) == 1
