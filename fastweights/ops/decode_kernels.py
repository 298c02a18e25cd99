"""The Triton kernels of one decoding step: a linear layer with what stands around it, and a rule's step.

Shapes: x [B,K]   weight [N,K] (gated: [2N,K])   bias, column [N] (gated: [2N])   residual, out [B,N]
        state [B,S,d,m], or [B,S,d+1,m] with a normaliser   q [B,G*S,m]   k [B,S,m]   v [B,S,d]   gates [B,S,.]
        cos, sin [B,R]   planes [S,P]   scale [S,m]   y [B,G*S,d]

OVERLAP lets a kernel start, and load what the one before it does not write, while that one still runs. Each kernel
waits before it lets the next one start, so whatever was written two kernels ago is there at the start.
Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.kernels.parts import FLOOR, product
from fastweights.rules import normalizer

SMALLEST_DIVISOR = tl.constexpr(normalizer.SMALLEST_DIVISOR)


@triton.jit
def _take_turn(OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _normed(acc, mean, deviation, column, bias, at, inside, NORM: tl.constexpr, BIAS: tl.constexpr):
    """W norm(x) + bias from (W g) x: the norm's mean and size are taken out of the product."""
    if NORM == "layer":
        acc -= mean * tl.load(column + at, inside, 0.0)[None, :]
    if NORM != "none":
        acc *= deviation
    if BIAS:
        acc += tl.load(bias + at, inside, 0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def linear_kernel(
    x,
    weight,
    column,
    bias,
    residual,
    out,
    rows,
    n,
    k,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = residual + activation(weight norm(x) + bias); the norm's own weight is part of `weight`. ROWS = 1: a
    product of one row with BLOCK_K >= k and without tensor cores, whose weights are on their way before the row is
    known."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, BLOCK_K)
    first = weight + col.to(tl.int64) * k
    second = weight + (col.to(tl.int64) + n) * k
    if ROWS == 1:
        inside = i < k
        tile = (col < n)[:, None] & inside[None, :]
        w = tl.load(first[:, None] + i[None, :], tile, 0.0).to(tl.float32)
        if GATED:
            w2 = tl.load(second[:, None] + i[None, :], tile, 0.0).to(tl.float32)
        _take_turn(OVERLAP)
        values = tl.load(x + tl.program_id(1) * k + i, inside, 0.0).to(tl.float32)
        total = tl.sum(values, 0)
        squares = tl.sum(values * values, 0)
        acc = tl.sum(w * values[None, :], 1)[None, :]
        if GATED:
            acc2 = tl.sum(w2 * values[None, :], 1)[None, :]
    else:
        _take_turn(OVERLAP)
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        acc2 = tl.zeros([ROWS, COLUMNS], tl.float32)
        sums = tl.zeros([ROWS, BLOCK_K], tl.float32)
        sums2 = tl.zeros([ROWS, BLOCK_K], tl.float32)
        for start in range(0, k, BLOCK_K):
            at = start + i
            tile = (col < n)[None, :] & (at < k)[:, None]
            values = tl.load(x + row[:, None] * k + at[None, :], (row < rows)[:, None] & (at < k)[None, :], 0.0)
            if NORM != "none":
                wide = values.to(tl.float32)
                sums2 += wide * wide
                if NORM == "layer":
                    sums += wide
            acc += product(values, tl.load(first[None, :] + at[:, None], tile, 0.0), OPERAND, PRECISION)
            if GATED:
                acc2 += product(values, tl.load(second[None, :] + at[:, None], tile, 0.0), OPERAND, PRECISION)
        total = tl.sum(sums, 1)[:, None]
        squares = tl.sum(sums2, 1)[:, None]
    mean = total / k
    deviation = squares / k
    if NORM == "layer":
        deviation = tl.maximum(deviation - mean * mean, 0.0)
    if NORM != "none":
        deviation = tl.rsqrt(deviation + eps)
    acc = _activate(_normed(acc, mean, deviation, column, bias, col, col < n, NORM, BIAS), ACTIVATION)
    if GATED:
        acc *= _normed(acc2, mean, deviation, column, bias, col + n, col < n, NORM, BIAS)
    at = row.to(tl.int64)[:, None] * n + col[None, :]
    inside = (row < rows)[:, None] & (col < n)[None, :]
    if RESIDUAL:
        acc += tl.load(residual + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, acc, inside)


@triton.jit
def _load_turned(x, i, m, first, cos, sin, PLANES: tl.constexpr):
    """A head's numbers, the first 2 * PLANES of them turned by the angles of their planes."""
    values = tl.load(x + i, i < m, 0.0).to(tl.float32)
    if PLANES > 0:
        turned = i < 2 * PLANES
        partner = tl.load(x + tl.where(first, i + PLANES, i - PLANES), turned, 0.0).to(tl.float32)
        values = values * cos + tl.where(first, -partner, partner) * sin
    return values


@triton.jit
def _floored(logit):
    return tl.maximum(logit.to(tl.float32), FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gate(logit):
    return tl.sigmoid(_floored(logit))


@triton.jit
def step_kernel(
    state,
    q,
    k,
    v,
    gate,
    gate2,
    cos,
    sin,
    planes,
    scale,
    y,
    q_stride,
    k_stride,
    v_stride,
    gate_stride,
    gate2_stride,
    angle_stride,
    STATES: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    PLANES: tl.constexpr,
    RULE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token of one state: SLICES slices of BLOCK_D rows. The rows are independent, but for the normaliser in the
    last one: with it a program must have all slices."""
    batch = tl.program_id(0) // STATES
    head = tl.program_id(0) % STATES
    i = tl.arange(0, BLOCK_M)
    own = state + tl.program_id(0).to(tl.int64) * ((D + NORMALIZE) * M)
    first = i < PLANES
    c = tl.full([BLOCK_M], 1.0, tl.float32)
    s = tl.full([BLOCK_M], 0.0, tl.float32)
    if PLANES > 0:
        turned = i < 2 * PLANES
        plane = tl.load(planes + head * PLANES + tl.where(first, i, i - PLANES), turned, 0)
        c = tl.load(cos + batch * angle_stride + plane, turned, 1.0)
        s = tl.load(sin + batch * angle_stride + plane, turned, 0.0)
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALED:
        factor = tl.load(scale + head * M + i, i < M, 0.0).to(tl.float32)
    for part in tl.static_range(SLICES):
        j = (tl.program_id(1) * SLICES + part) * BLOCK_D + tl.arange(0, BLOCK_D)
        at = j[:, None] * M + i[None, :]
        inside = (j < D)[:, None] & (i < M)[None, :]
        held = tl.load(own + at, inside, 0.0)
        if part == 0:
            if NORMALIZE:
                norm = tl.load(own + D * M + i, i < M, 0.0)
            _take_turn(OVERLAP)
            key = _load_turned(k + batch * k_stride + head * M, i, M, first, c, s, PLANES) * factor
        value = tl.load(v + batch * v_stride + head * D + j, j < D, 0.0).to(tl.float32)
        if RULE == "decay":
            f = _gate(tl.load(gate + batch * gate_stride + head * M + i, i < M, 0.0))
            z = _gate(tl.load(gate2 + batch * gate2_stride + head * D + j, j < D, 0.0))
            held = held * z[:, None] * f[None, :] + value[:, None] * key[None, :]
        elif RULE == "gated":
            logit = _floored(tl.load(gate + batch * gate_stride + head))
            held = tl.sigmoid(logit) * held + tl.sigmoid(-logit) * value[:, None] * key[None, :]
        elif RULE == "delta":
            g = tl.sigmoid(tl.load(gate + batch * gate_stride + head).to(tl.float32))
            wrong = value - tl.sum(held * key[None, :], 1)
            held += (g * wrong)[:, None] * key[None, :]
        else:
            held += value[:, None] * key[None, :]
        if NORMALIZE and part == 0:
            if RULE == "gated":
                norm = tl.sigmoid(logit) * norm + tl.sigmoid(-logit) * key
            else:
                norm += key
            tl.store(own + D * M + i, norm, i < M)
        for member in tl.static_range(GROUP):
            reader = head * GROUP + member
            query = _load_turned(q + batch * q_stride + reader * M, i, M, first, c, s, PLANES)
            read = tl.sum(held * query[None, :], 1)
            if NORMALIZE:
                divisor = tl.sum(norm * query, 0)
                small = tl.where(divisor < 0, -SMALLEST_DIVISOR, SMALLEST_DIVISOR)
                read = read / tl.where(tl.abs(divisor) < SMALLEST_DIVISOR, small, divisor)
            tl.store(y + (batch * STATES * GROUP + reader) * D + j, read, j < D)
        tl.store(own + at, held, inside)
