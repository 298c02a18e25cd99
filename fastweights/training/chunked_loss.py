"""The losses on a model's next-token logits [N,V], taken a few thousand tokens at a time with their gradient, so that
a large vocabulary's logits are never there as a whole.

Shapes: hidden [N,D]   weight [V,D]   bias [V]   labels [N]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.data.batches import IGNORED

# Numbers in a chunk's logits, at most, and the bytes that a loss needs for each: up to 13 float32 copies.
LOGITS_AT_ONCE, LOGITS_ON_GPU, BYTES_A_LOGIT = 2**24, 2**27, 52
# Share of a GPU's memory that a chunk may take.
CHUNK_SHARE = 1 / 8


@dataclass(frozen=True)
class Head:
    """An output layer: logits = softcap(weight hidden + bias)."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None


@contextmanager
def without_head(model: Any) -> Iterator[list[Tensor]]:
    """The model answers with no logits; what its output layer was given is collected instead."""
    layer, seen = model.get_output_embeddings(), []

    def collect(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[..., :1]

    layer.forward = collect
    try:
        yield seen
    finally:
        del layer.forward


def head_of(model: Any) -> Head:
    layer = model.get_output_embeddings()
    return Head(layer.weight, layer.bias, getattr(model.config, "final_logit_softcapping", None))


@dataclass(frozen=True)
class LossConfig:
    """What is minimised, summed over the tokens that have a label: the divergence from a teacher's distribution (where
    there is a teacher), both taken at a temperature, and the cross-entropy times its weight. With `top_k` it is the
    divergence of the teacher's k likeliest tokens and of all the others as one."""

    cross_entropy: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    compiled: bool = False
    memory_share: float = 1.0  # of a GPU's, where other runs have the rest


def head_loss(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    aim: LossConfig,
    teacher: Head | None = None,
    taught: Tensor | None = None,
) -> Tensor:
    """`labels` are the next tokens; `taught` is the teacher's `hidden`."""
    own: tuple[Tensor | None, ...] = (hidden, head.weight, head.bias)
    if not torch.is_grad_enabled():  # inside a function it always is not
        own = tuple(None if x is None else x.detach() for x in own)
    return _HeadLoss.apply(*own, labels, head.softcap, aim, teacher, taught)


def logits_at_once(device: torch.device, memory_share: float = 1.0) -> int:
    if device.type != "cuda":
        return LOGITS_AT_ONCE
    memory = memory_share * torch.cuda.get_device_properties(device).total_memory
    return min(LOGITS_ON_GPU, int(CHUNK_SHARE * memory) // BYTES_A_LOGIT)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        softcap: float | None,
        aim: LossConfig,
        teacher: Head | None,
        taught: Tensor | None,
    ) -> Tensor:
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]]
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        # sums over chunks
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        d_bias = None if bias is None or not wanted[2] else torch.zeros_like(bias, dtype=wide)
        losses = []
        chunks = -(-len(hidden) * len(weight) // logits_at_once(hidden.device, aim.memory_share))
        tokens = -(-len(hidden) // chunks)
        of_chunk = _compiled_chunk() if aim.compiled and hidden.is_cuda else _chunk
        for start in range(0, len(hidden), tokens):
            at = slice(start, start + tokens)
            x = hidden[at]
            logits = F.linear(x, weight, bias)
            answer = None
            if teacher is not None and taught is not None:
                answer = F.linear(taught[at], teacher.weight, teacher.bias)
            numbers = (
                softcap,
                None if teacher is None else teacher.softcap,
                aim.cross_entropy,
                aim.temperature,
                aim.top_k,
            )
            loss, gradient = of_chunk(logits, answer, labels[at], *numbers, any(wanted))
            losses.append(loss)
            if gradient is None:
                continue
            if d_hidden is not None:
                d_hidden[at] = gradient @ weight
            if d_weight is not None:
                d_weight += gradient.mT @ x
            if d_bias is not None:
                d_bias += gradient.sum(0, dtype=wide)
        ctx.save_for_backward(d_hidden, *(None if d is None else d.to(weight.dtype) for d in (d_weight, d_bias)))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        found = [None if d is None else d * upstream[0].to(d.dtype) for d in ctx.saved_tensors]
        return *found, None, None, None, None, None


def _chunk(
    logits: Tensor,
    answer: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    teacher_softcap: float | None,
    cross_entropy: float,
    temperature: float,
    top_k: int,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """The loss of some tokens, and its gradient by `logits`."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    capped = _capped(logits.to(wide), softcap)
    counted = labels != IGNORED
    chances = (capped / temperature).log_softmax(-1)
    loss, gradient = torch.zeros_like(chances[:, 0]), torch.zeros_like(chances)
    if answer is not None:
        taught = (_capped(answer.to(wide), teacher_softcap) / temperature).log_softmax(-1)
        found, share = chances.exp(), taught.exp()
        divergence, difference = (share * (taught - chances)).sum(-1), found - share
        if top_k:
            divergence, difference = _divergence_of_few(found, share, top_k)
        # scaled as if the temperature were 1
        loss = loss + temperature**2 * divergence
        gradient = gradient + temperature * difference
    if cross_entropy:
        own = chances if temperature == 1 else capped.log_softmax(-1)
        label = labels.clamp(min=0)[:, None]
        loss = loss - cross_entropy * own.gather(1, label)[:, 0]
        hit = torch.arange(own.shape[1], device=own.device) == label
        gradient = gradient + cross_entropy * (own.exp() - hit.to(wide))
    total = torch.where(counted, loss, 0.0).sum()
    if not with_gradient:
        return total, None
    if softcap is not None:
        gradient = gradient * (1 - (capped / softcap).square())
    return total, torch.where(counted[:, None], gradient, 0.0).to(logits.dtype)


def _divergence_of_few(found: Tensor, wanted: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Of distributions [N,V]; its gradient is by the logits of `found`."""
    few = torch.zeros_like(wanted, dtype=torch.bool).scatter_(1, wanted.topk(top_k, 1).indices, True)
    tiny = torch.finfo(found.dtype).tiny
    rests = [torch.where(few, 0.0, x).sum(-1, keepdim=True).clamp(min=tiny) for x in (found, wanted)]
    terms = torch.where(few, wanted * (wanted.clamp(min=tiny) / found.clamp(min=tiny)).log(), 0.0).sum(-1)
    divergence = terms + (rests[1] * (rests[1] / rests[0]).log())[:, 0]
    return divergence, torch.where(few, found - wanted, found * (1 - rests[1] / rests[0]))


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@functools.cache
def _compiled_chunk() -> Any:
    return torch.compile(_chunk, dynamic=False)
