"""Triton kernel of the losses on next-token logits: cross-entropy and the divergence from a teacher, with gradients.

Shapes: logits, teacher [N,V]   labels, loss [N]

A program reads a row of logits twice: once for the sums of both softmaxes, once to write the gradient in the place of
the student's logits. Plain torch needs about ten passes over float32 copies. Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.primitives import cast_rounded


@triton.jit
def capped(logits, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(logits / softcap)."""
    logits = logits.to(tl.float32)
    if HAS_SOFTCAP:
        logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)
    return logits


@triton.jit
def add_to_sum(top, total, values):
    """A running log-sum-exp: its largest value and the sum relative to it, with more values; and the rescaling."""
    new_top = tl.maximum(top, tl.max(values, 0))
    decay = tl.exp(top - new_top)
    return new_top, total * decay + tl.sum(tl.exp(values - new_top), 0), decay


@triton.jit(do_not_specialize=["size"])
def head_loss_kernel(
    logits, teacher, labels, loss, size, softcap, teacher_softcap, cross_entropy, temperature,
    HAS_TEACHER: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEACHER_SOFTCAP: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of each token, and its gradient in the place of `logits`. Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    logits, teacher = logits + row * size, teacher + row * size
    label, i = tl.load(labels + row), tl.arange(0, BLOCK)
    none = float("-inf")
    top, total, hot_top, hot_total = none, 0.0, none, 0.0
    teacher_top, teacher_total, difference, target = none, 0.0, 0.0, 0.0
    for start in tl.range(0, size, BLOCK):
        at = start + i
        inside = at < size
        own = capped(tl.load(logits + at, inside, 0.0), softcap, HAS_SOFTCAP)
        top, total, decay = add_to_sum(top, total, tl.where(inside, own, none))
        # Not loaded by its index after the loop: another warp may have written the gradient there by then.
        target += tl.sum(tl.where(at == label, own, 0.0), 0)
        if HAS_TEACHER:
            own = own / temperature
            hot_top, hot_total, decay = add_to_sum(hot_top, hot_total, tl.where(inside, own, none))
            other = capped(tl.load(teacher + at, inside, 0.0), teacher_softcap, HAS_TEACHER_SOFTCAP)
            other = other / temperature
            kept = tl.where(inside, other, none)
            teacher_top, teacher_total, decay = add_to_sum(teacher_top, teacher_total, kept)
            weighted = tl.where(inside, tl.exp(kept - teacher_top) * (other - own), 0.0)
            difference = difference * decay + tl.sum(weighted, 0)
    log_sum = top + tl.log(total)
    counted = label != IGNORED
    value = cross_entropy * (log_sum - target)
    if HAS_TEACHER:
        hot_log_sum, teacher_log_sum = hot_top + tl.log(hot_total), teacher_top + tl.log(teacher_total)
        # scaled as if the temperature were 1
        value += temperature * temperature * (difference / teacher_total - teacher_log_sum + hot_log_sum)
    tl.store(loss + row, tl.where(counted, value, 0.0))
    if WITH_GRADIENT:
        for start in tl.range(0, size, BLOCK):
            at = start + i
            inside = at < size
            own = capped(tl.load(logits + at, inside, 0.0), softcap, HAS_SOFTCAP)
            gradient = cross_entropy * (tl.exp(own - log_sum) - tl.where(at == label, 1.0, 0.0))
            if HAS_TEACHER:
                other = capped(tl.load(teacher + at, inside, 0.0), teacher_softcap, HAS_TEACHER_SOFTCAP)
                likely = tl.exp(other / temperature - teacher_log_sum)
                gradient += temperature * (tl.exp(own / temperature - hot_log_sum) - likely)
            if HAS_SOFTCAP:
                gradient *= 1 - (own / softcap) * (own / softcap)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + at, cast_rounded(gradient, logits.dtype.element_ty), inside)
