"""Losses on logits that are never whole: value and every gradient against autograd through the logits themselves.

Shapes: hidden [N,D]   weight [V,D]
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.relative_error import assert_close
from helpers.tiny import pretrained, tokens
from torch import Tensor
from torch.nn import functional as F

from fastweights.training import chunked_loss as head
from fastweights.training.chunked_loss import Head, LossConfig, head_loss, without_head
from fastweights.training.losses import StageLoss
from fastweights.training.recipe import Stage

N, D, V = 23, 6, 11


def draw(seed: int, bias: bool, softcap: float | None) -> tuple[Head, Tensor]:
    torch.manual_seed(seed)
    leaves = [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((N, D), (V, D), (V,))]
    return Head(leaves[1], leaves[2] if bias else None, softcap), leaves[0]


def plain(
    own: Head, hidden: Tensor, labels: Tensor, config: LossConfig, teacher: Head | None, teacher_hidden: Tensor | None
) -> Tensor:
    def logits(layer: Head, x: Tensor) -> Tensor:
        z = F.linear(x, layer.weight, layer.bias)[labels != -100]
        return z if layer.softcap is None else layer.softcap * torch.tanh(z / layer.softcap)

    predicted, targets = logits(own, hidden), labels[labels != -100]
    loss = config.cross_entropy * F.cross_entropy(predicted, targets, reduction="sum")
    if teacher is not None and teacher_hidden is not None:
        both = logits(teacher, teacher_hidden).detach(), predicted
        p, q = (x.div(config.temperature).log_softmax(-1) for x in both)
        if config.top_k:
            few = p.topk(config.top_k, -1).indices
            p, q = (_lumped(x.exp(), few).log() for x in (p, q))
        loss = loss + config.temperature**2 * (p.exp() * (p - q)).sum()
    return loss


def _lumped(chances: Tensor, few: Tensor) -> Tensor:
    """The chances of a few tokens, and that of all others."""
    chosen = chances.gather(-1, few)
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1)


@pytest.mark.parametrize("at_once", [V, 5 * V, 2**27], ids=["token by token", "chunks", "whole"])
@pytest.mark.parametrize(
    "config",
    [LossConfig(), LossConfig(0.0, 2.5), LossConfig(0.3), LossConfig(0.3, 2.5), LossConfig(0.3, 2.5, top_k=4)],
    ids=str,
)
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, None), (True, 1.5)])
def test_loss_and_gradients_equal_autograd_on_whole_logits(
    at_once: int, config: LossConfig, bias: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", at_once)
    labels = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    labels[[0, 7, 8, N - 1]] = -100
    (own, hidden), (teacher, teacher_hidden) = draw(0, bias, softcap), draw(1, bias, softcap)
    teachers: list[tuple[Any, Any]] = [(teacher, teacher_hidden.detach())] + [(None, None)] * (config.cross_entropy > 0)
    for given in teachers:
        leaves = [x for x in (hidden, own.weight, own.bias) if x is not None]
        results = []
        for run in (head_loss, plain):
            loss = run(own, hidden, labels, config, *given)
            # upstream gradients other than one, as of a loss that is divided by a count
            results.append((loss, *torch.autograd.grad(loss / 7, leaves)))
        for name, found, expected in zip(("loss", "hidden", "weight", "bias"), *results, strict=False):
            assert_close(name, found, expected, 1e-12)


def test_memory_share_limits_the_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, memory = torch.device("cuda"), 24 * 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    alone, shared = (head.logits_at_once(gpu, share) for share in (1.0, 0.25))
    assert alone * head.BYTES_A_LOGIT <= head.CHUNK_SHARE * memory and shared == alone // 4
    asked: list[float] = []
    monkeypatch.setattr(head, "logits_at_once", lambda device, share: asked.append(share) or 2**20)
    own, hidden = draw(0, False, None)
    head_loss(own, hidden, torch.zeros(N, dtype=torch.long), LossConfig(memory_share=0.25))
    assert asked == [0.25]
    for loss in ("finetune", "distill"):
        trainee = StageLoss(None, None, Stage(loss=loss, cross_entropy=0.3, top_k=2), memory_share=0.25)
        assert trainee.text_config == LossConfig(memory_share=0.25) and trainee.stage_config == LossConfig(
            0.3, top_k=2, memory_share=0.25
        )


def test_frozen_output_layer_has_no_gradient_but_hidden_states_have() -> None:
    own, hidden = draw(0, False, None)
    own.weight.requires_grad_(False)
    head_loss(own, hidden, torch.zeros(N, dtype=torch.long), LossConfig()).backward()
    assert own.weight.grad is None and hidden.grad is not None


def test_no_gradient_is_computed_without_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(head, "_chunk", lambda *given: asked.append(given[-1]) or (torch.zeros(()), None))
    own, hidden = draw(0, True, None)
    with torch.no_grad():
        head_loss(own, hidden, torch.zeros(N, dtype=torch.long), LossConfig())
    assert asked == [False]


def test_bfloat16_is_near_float64() -> None:
    """As training on a GPU runs it: float32 weights under autocast."""
    own, hidden = draw(0, True, None)
    labels = torch.arange(N) % V
    wide = [hidden, own.weight, own.bias]
    narrow = [x.detach().float().requires_grad_() for x in wide if x is not None]
    expected = head_loss(own, hidden, labels, LossConfig())
    with torch.autocast("cpu", torch.bfloat16):
        found = head_loss(Head(narrow[1], narrow[2], None), narrow[0], labels, LossConfig())
    assert_close("loss", found, expected, 1e-2)
    pairs = zip(torch.autograd.grad(found, narrow), torch.autograd.grad(expected, wide), strict=True)
    for name, (gradient, expected) in zip(("hidden", "weight", "bias"), pairs, strict=True):
        assert gradient.dtype == torch.float32
        assert_close(name, gradient, expected, 1e-2)


def test_output_layer_is_restored_after_an_error() -> None:
    model, ids = pretrained("gpt2"), tokens(1, 5)
    expected = model(ids).logits
    with pytest.raises(RuntimeError, match="on purpose"), without_head(model) as seen:
        assert model(ids).logits.shape[-1] == 1 and len(seen) == 1
        raise RuntimeError("on purpose")
    assert torch.equal(model(ids).logits, expected)
