"""The kernel of the losses on logits against float64, through the loss that training minimizes."""

from __future__ import annotations

import pytest
import torch
from helpers.gpu_compilation import run_compiling
from helpers.relative_error import assert_close
from torch import Tensor

from fastweights import ops
from fastweights.ops import head_loss as kernel
from fastweights.training.chunked_loss import Head, LossConfig, head_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, D, V = 5, 6, 37
CASES = [
    (LossConfig(), None, False),
    (LossConfig(0.3, 2.5), 1.5, True),
    (LossConfig(0.0), None, True),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 16)


def losses(
    dtype: torch.dtype, config: LossConfig, softcap: float | None, with_teacher: bool, backend: str, vocabulary: int = V
) -> list[Tensor]:
    """The loss, and its gradients by hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((N, D), (vocabulary, D), (vocabulary,)) * 2
    ]
    hidden, weight, bias, other_hidden, *other = (x.to(dtype).to(DEVICE) for x in drawn)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    labels = torch.tensor([3, -100, 0, V - 1, 20], device=DEVICE)
    teacher = (Head(*other, softcap), other_hidden) if with_teacher else ()
    with ops.use_backend(backend):
        loss = head_loss(Head(weight, bias, softcap), hidden, labels, config, *teacher)
    return [x.cpu() for x in (loss.detach(), *torch.autograd.grad(loss / 7, leaves))]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_kernel_matches_float64(
    case: tuple[LossConfig, float | None, bool], dtype: torch.dtype, tolerance: float
) -> None:
    for found, expected in zip(losses(dtype, *case, "triton"), losses(torch.float64, *case, "chunked"), strict=True):
        assert_close("loss or gradient", found, expected, tolerance)


def test_kernel_is_used_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    run = kernel.head_loss_in_place
    monkeypatch.setattr(
        "fastweights.training.chunked_loss.head_loss_in_place", lambda *args: calls.append(args[-1]) or run(*args)
    )
    for config, backend, dtype, expected in (
        (LossConfig(), "triton", torch.float32, [True]),
        (LossConfig(0.0, top_k=3), "triton", torch.float32, []),
        (LossConfig(), "chunked", torch.float32, []),
        (LossConfig(), "triton", torch.float64, []),
    ):
        calls.clear()
        losses(dtype, config, None, True, backend)
        assert calls == expected


def test_kernel_compiles_without_a_gpu_and_spills_nothing() -> None:
    assert run_compiling("compile_head_loss").count(" 0 bytes spilled") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_on_a_gpu_at_the_size_of_a_vocabulary(
    case: tuple[LossConfig, float | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    choices = ((torch.float32, "auto"), (torch.float64, "chunked"))
    found, expected = (losses(dtype, *case, backend, vocabulary=49152) for dtype, backend in choices)
    for one, other in zip(found, expected, strict=True):
        assert_close("loss or gradient", one, other, 1e-4)
