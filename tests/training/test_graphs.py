"""Micro-batches as graphs, here with what would be captured run again: the same run, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import (
    CHAIN,
    STEP,
    Files,
    assert_same_run,
    crash_after,
    losses_of,
    make_recipe,
    make_train_config,
    resume_in,
    save_converted,
    train_in,
    training_files,
)
from torch import Tensor

from fastweights.training import graphs, step
from fastweights.training.graphs import GraphedBackward
from fastweights.training.losses import StageLoss
from fastweights.training.recipe import RecipeError
from fastweights.training.trainer import TrainingError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("graphs")) as made:
        yield made


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """In place of a capture; counts what is captured and what is run again."""
    counts = [0, 0]

    def capture(run: Callable[[], None], pool: list[object]) -> Callable[[], None]:
        counts[0] += 1

        def replay() -> None:
            counts[1] += 1
            run()

        return replay

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(step, "GRAPH_DEVICES", ("cpu",))
    return counts


def test_run_with_graphs_is_the_run_without_and_resumes_to_the_bit(
    files: Files, tmp_path: Path, replayed: list[int]
) -> None:
    """Micro-batches of two sizes, rows without the window, both stages."""
    student = str(save_converted(tmp_path / "student", files.base, window=4, gate_init="log"))
    stages = tuple(dict(stage, tokens=4 * STEP, window_dropout=0.5, weight_decay=0.1) for stage in CHAIN)
    runs = {}
    for name, use in (("without", False), ("with", True), ("crashed", True)):
        recipe = make_recipe(stages, micro_batch=3, cuda_graphs=use)
        runs[name] = make_train_config(files, recipe, model=student)
    train_in(tmp_path / "without", runs["without"])
    assert replayed == [0, 0]
    train_in(tmp_path / "with", runs["with"])
    assert replayed[1] == 2 * 8 and 4 <= replayed[0] <= 8, "a graph for each shape, with positions and without"
    crash_after(tmp_path / "crashed", runs["crashed"], 6)
    resume_in(tmp_path / "crashed")
    for name in ("with", "crashed"):
        assert_same_run(tmp_path / name, tmp_path / "without")


def test_captures_leave_loss_and_gradients_as_they_were(replayed: list[int]) -> None:
    weight, unused = torch.nn.Parameter(torch.tensor([2.0, 3.0])), torch.nn.Parameter(torch.ones(1))

    def backward(batch: dict[str, Tensor], total: Tensor) -> None:
        loss = (weight * batch["x"].sum(0)).sum()
        loss.backward()
        total += loss.detach()

    graphed = GraphedBackward(backward, [weight, unused], torch.device("cpu"))
    x, y, z = torch.randn(3, 2), torch.randn(1, 2), torch.randn(3, 2)
    for _ in range(2):
        graphed.start()
        for rows in (x, y, z):
            graphed({"x": rows})
        expected = torch.cat([x, y, z]).sum(0)
        assert weight.grad is not None and torch.allclose(weight.grad, expected) and unused.grad is None
        assert torch.allclose(graphed.total, (weight * expected).sum())
    assert replayed == [2, 6]


@pytest.mark.parametrize("setting", ["dropout", "gradient_checkpointing"])
def test_what_graphs_cannot_repeat_is_refused(setting: str) -> None:
    with pytest.raises(RecipeError, match=f"cuda_graphs cannot be used with {setting}: leave one out"):
        make_recipe(cuda_graphs=True, **{setting: True})


@pytest.mark.gpu
def test_captured_step_equals_the_step_itself() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))

    def backward(batch: dict[str, Tensor], total: Tensor) -> None:
        loss = (batch["x"] @ weight).square().mean()
        loss.backward()
        total += loss.detach()

    graphed = GraphedBackward(backward, [weight], torch.device("cuda"))
    for _ in range(3):
        parts: list[Any] = [torch.randn(n, 64).pin_memory() for n in (8, 8, 3)]
        graphed.start()
        for part in parts:
            graphed({"x": part})
        found, loss = weight.grad.clone(), graphed.total.clone()  # type: ignore[union-attr]
        expected = sum((part.cuda() @ weight).square().mean() for part in parts)
        (gradient,) = torch.autograd.grad(expected, weight)
        assert torch.allclose(found, gradient, rtol=1e-4, atol=1e-6) and torch.allclose(loss, expected.detach())


@pytest.mark.parametrize("use_graphs", [False, True])
def test_micro_batches_are_halved_until_they_fit_into_memory(
    files: Files, tmp_path: Path, replayed: list[int], monkeypatch: pytest.MonkeyPatch, use_graphs: bool
) -> None:
    """What memory is short for in the middle of a step is tried again: the run is that of smaller micro-batches."""
    stage = (dict(CHAIN[1], tokens=3 * STEP),)
    train_in(tmp_path / "small", make_train_config(files, make_recipe(stage, micro_batch=1)))
    forward, tried = StageLoss.forward, []

    def short(loss: StageLoss, batch: dict[str, Tensor], score: bool = False) -> Tensor:
        if not score:
            tried.append(len(batch["input_ids"]))
        if not score and tried[-1] > 1:
            raise torch.OutOfMemoryError("no room")
        return forward(loss, batch, score)

    with monkeypatch.context() as patched:
        patched.setattr(StageLoss, "forward", short)
        train_in(tmp_path / "halved", make_train_config(files, make_recipe(stage, cuda_graphs=use_graphs)))
        assert [rows for rows in tried if rows > 1] == [4, 2] and 1 in tried
        # rows that are one document may have positions all the same
        assert losses_of(tmp_path / "halved") == pytest.approx(losses_of(tmp_path / "small"), rel=1e-5)
        with pytest.raises(TrainingError, match="out of memory: take fewer sequences at once"):
            train_in(tmp_path / "given", make_train_config(files, make_recipe(stage, micro_batch=4)))
