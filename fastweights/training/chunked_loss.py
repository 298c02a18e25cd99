"""Losses on next-token logits [N,V], computed with their gradient in chunks of a few thousand tokens, so that the
logits of a large vocabulary are never in memory as a whole.

An adaptive softmax has a loss for the choice of a word of its first cluster or of a tail, and one for the words of each
tail. Both parts of the loss add up exactly. With q(w) = q(c) q(w|c) for a word w of tail c,

    cross-entropy: -log q(w) = -log q(c) - log q(w|c)
    divergence:    KL(p || q) = KL of the choices + sum over tails c of p(c) KL(p(.|c) || q(.|c))

Shapes: hidden [N,D]   weight [V,D]   bias [V]   labels, shares [N]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import ops
from fastweights.data.batches import IGNORED
from fastweights.modeling.adaptive_input import AdaptiveSoftmax
from fastweights.ops.head_loss import head_loss_in_place

# Elements of a chunk's logits, at most, and the bytes that a loss needs for each: up to 13 float32 copies.
LOGITS_AT_ONCE, LOGITS_ON_GPU, BYTES_A_LOGIT = 2**24, 2**27, 52
# Share of a GPU's memory that a chunk may take.
CHUNK_SHARE = 1 / 8


@dataclass(frozen=True)
class Head:
    """An output layer: logits = softcap(weight hidden + bias)."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None


@contextmanager
def without_head(model: Any) -> Iterator[list[Tensor]]:
    """In the block the model computes no logits; the inputs of its output layer are collected instead."""
    layer, seen = model.get_output_embeddings(), []

    def collect(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[..., :1]

    layer.forward = collect
    try:
        yield seen
    finally:
        del layer.forward


def head_of(model: Any) -> Head | AdaptiveSoftmax:
    """The output layer of a causal language model, with the softcap of its logits."""
    layer = model.get_output_embeddings()
    if isinstance(layer, AdaptiveSoftmax):
        return layer
    return Head(layer.weight, layer.bias, getattr(model.config, "final_logit_softcapping", None))


@dataclass(frozen=True)
class LossConfig:
    """What is minimized, summed over the tokens that have a label.

    It is the KL divergence from the teacher's distribution, where there is a teacher, plus the weighted cross-entropy.

    Attributes:
        cross_entropy: Weight of the cross-entropy.
        temperature: Temperature of both distributions in the divergence.
        top_k: The divergence is of the teacher's k likeliest tokens and of all others as one; 0 for every token.
        compiled: Compile the computation of a chunk on a GPU.
        memory_share: Share of the GPU's memory that this run may use.
    """

    cross_entropy: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    compiled: bool = False
    memory_share: float = 1.0


def head_loss(
    head: Head | AdaptiveSoftmax,
    hidden: Tensor,
    labels: Tensor,
    config: LossConfig,
    teacher: Head | AdaptiveSoftmax | None = None,
    teacher_hidden: Tensor | None = None,
) -> Tensor:
    """The loss of an output layer, as `config` defines it.

    Args:
        head: The student's output layer.
        hidden: Its inputs, [N,D].
        labels: The next tokens [N]; IGNORED where there is none.
        config: What is minimized.
        teacher: The teacher's output layer, of the student's kind; None for no divergence.
        teacher_hidden: Its inputs, [N,D of the teacher].
    """
    if isinstance(head, AdaptiveSoftmax):
        assert not isinstance(teacher, Head)
        return _adaptive_loss(head, hidden, labels, config, teacher, teacher_hidden)
    assert not isinstance(teacher, AdaptiveSoftmax)
    return _linear_loss(head, hidden, labels, config, teacher, teacher_hidden)


def _adaptive_loss(
    head: AdaptiveSoftmax,
    hidden: Tensor,
    labels: Tensor,
    config: LossConfig,
    teacher: AdaptiveSoftmax | None,
    teacher_hidden: Tensor | None,
) -> Tensor:
    """The loss of an adaptive softmax. Its divergence is that of all words at temperature 1 (training/checks.py)."""
    hidden, choice = head.dropout(hidden), Head(head.head_weight())
    if teacher is None or teacher_hidden is None:
        loss = _linear_loss(choice, hidden, head.head_labels(labels), config)
    else:
        teacher_choice = Head(teacher.head_weight())
        loss = _linear_loss(choice, hidden, head.head_labels(labels), config, teacher_choice, teacher_hidden)
        divergence = replace(config, cross_entropy=0.0)
        for tail, shares in enumerate(_tail_shares(teacher, teacher_hidden, config)):
            own, teachers = Head(head.tail_weight(tail)), Head(teacher.tail_weight(tail))
            inputs = head.tail_input(tail, hidden), teacher.tail_input(tail, teacher_hidden)
            loss = loss + _linear_loss(own, inputs[0], labels, divergence, teachers, inputs[1], shares)
    if config.cross_entropy:
        # not compiled: how many tokens have a label in a tail differs from step to step
        text = replace(config, compiled=False)
        for tail, (index, words) in enumerate(head.by_tail(labels)):
            inputs_of_tail = head.tail_input(tail, hidden[index])
            loss = loss + _linear_loss(Head(head.tail_weight(tail)), inputs_of_tail, words, text)
    return loss


@torch.no_grad()
def _tail_shares(head: AdaptiveSoftmax, hidden: Tensor, config: LossConfig) -> Tensor:
    """The probability of each tail, [tails,N], in at least float32."""
    weight, shares = head.head_weight(), []
    for x in hidden.split(max(1, logits_at_once(hidden.device, config.memory_share) // len(weight))):
        logits = F.linear(x, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shares.append((logits[:, head.bounds[1] :] - logits.logsumexp(-1, keepdim=True)).exp())
    return torch.cat(shares).mT


def _linear_loss(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    config: LossConfig,
    teacher: Head | None = None,
    teacher_hidden: Tensor | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """`head_loss` of a linear layer, in which the divergence of each token counts `shares` times (None: once)."""
    own: tuple[Tensor | None, ...] = (hidden, head.weight, head.bias)
    if not torch.is_grad_enabled():  # inside an autograd function it never is
        own = tuple(None if x is None else x.detach() for x in own)
    return _HeadLoss.apply(*own, labels, head.softcap, config, teacher, teacher_hidden, shares)


def logits_at_once(device: torch.device, memory_share: float = 1.0) -> int:
    """The number of logits to compute at a time, so that a chunk fits the memory that this run may use."""
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
        config: LossConfig,
        teacher: Head | None,
        teacher_hidden: Tensor | None,
        shares: Tensor | None,
    ) -> Tensor:
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], bias is not None and ctx.needs_input_grad[2]]
        d_hidden = torch.empty_like(hidden) if needed[0] else None
        # sums over chunks
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        d_bias = None if bias is None or not needed[2] else torch.zeros_like(bias, dtype=wide)
        losses = []
        chunks = -(-len(hidden) * len(weight) // logits_at_once(hidden.device, config.memory_share))
        tokens = -(-len(hidden) // chunks)
        of_chunk = _compiled_chunk() if config.compiled and hidden.is_cuda else _chunk
        fused = not config.top_k and shares is None and ops.runs_head_loss_kernel(hidden)
        for start in range(0, len(hidden), tokens):
            at = slice(start, start + tokens)
            x = hidden[at]
            logits = F.linear(x, weight, bias)
            teacher_logits = None
            if teacher is not None and teacher_hidden is not None:
                teacher_logits = F.linear(teacher_hidden[at], teacher.weight, teacher.bias)
            scalars: tuple[Any, ...] = (
                softcap,
                None if teacher is None else teacher.softcap,
                config.cross_entropy,
                config.temperature,
                config.top_k,
                any(needed),
            )
            chunk = logits, teacher_logits, labels[at]
            if fused:
                loss, gradient = _fused_chunk(*chunk, *scalars)
            else:
                loss, gradient = of_chunk(*chunk, None if shares is None else shares[at], *scalars)
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
        gradients = [None if d is None else d * upstream[0].to(d.dtype) for d in ctx.saved_tensors]
        return *gradients, None, None, None, None, None, None


def _chunk(
    logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    shares: Tensor | None,
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
    log_student = (capped / temperature).log_softmax(-1)
    loss, gradient = torch.zeros_like(log_student[:, 0]), torch.zeros_like(log_student)
    if teacher_logits is not None:
        log_teacher = (_capped(teacher_logits.to(wide), teacher_softcap) / temperature).log_softmax(-1)
        student, teacher = log_student.exp(), log_teacher.exp()
        divergence, difference = (teacher * (log_teacher - log_student)).sum(-1), student - teacher
        if top_k:
            divergence, difference = _top_k_divergence(student, teacher, top_k)
        if shares is not None:
            divergence, difference = shares * divergence, shares[:, None] * difference
        # scaled as if the temperature were 1
        loss = loss + temperature**2 * divergence
        gradient = gradient + temperature * difference
    if cross_entropy:
        own = log_student if temperature == 1 else capped.log_softmax(-1)
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


def _fused_chunk(
    logits: Tensor,
    teacher_logits: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    teacher_softcap: float | None,
    cross_entropy: float,
    temperature: float,
    top_k: int,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """`_chunk` as one kernel, without top_k. The gradient takes the memory of the logits."""
    scalars = (softcap, teacher_softcap, cross_entropy, temperature)
    loss = head_loss_in_place(logits, teacher_logits, labels, *scalars, IGNORED, with_gradient)
    return loss, logits if with_gradient else None


def _top_k_divergence(student: Tensor, teacher: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The divergence of distributions [N,V], and its gradient by the student's logits."""
    top = torch.zeros_like(teacher, dtype=torch.bool).scatter_(1, teacher.topk(top_k, 1).indices, True)
    tiny = torch.finfo(student.dtype).tiny
    rests = [torch.where(top, 0.0, x).sum(-1, keepdim=True).clamp(min=tiny) for x in (student, teacher)]
    terms = torch.where(top, teacher * (teacher.clamp(min=tiny) / student.clamp(min=tiny)).log(), 0.0).sum(-1)
    divergence = terms + (rests[1] * (rests[1] / rests[0]).log())[:, 0]
    return divergence, torch.where(top, student - teacher, student * (1 - rests[1] / rests[0]))


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@functools.cache
def _compiled_chunk() -> Any:
    return torch.compile(_chunk, dynamic=False)
