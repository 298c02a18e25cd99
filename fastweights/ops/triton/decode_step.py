"""The Triton kernels of what a decoding step attends with: a rule's state, and a window.

Shapes: state [B,S,d,m], or [B,S,d+1,m] with a normaliser   q [B,G*S,m]   k [B,S,m]   v [B,S,d]   gates [B,S,.]
        cos, sin [B,R]   planes [S,P]   scale [S,m]   y, far [B,G*S,d]   share [G*S]   keys, values [B,S,w,d]

OVERLAP: as in linear_kernels.py. Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.parts import FLOOR, narrowed, product, take_turn
from fastweights.rules import normalizer

SMALLEST_DIVISOR = tl.constexpr(normalizer.SMALLEST_DIVISOR)


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
def _load_angles(cos, sin, planes, i, head, PLANES: tl.constexpr):
    """What turns a head's numbers i by this step's angles; cos and sin are this row's."""
    first = i < PLANES
    c = tl.full([i.shape[0]], 1.0, tl.float32)
    s = tl.full([i.shape[0]], 0.0, tl.float32)
    if PLANES > 0:
        turned = i < 2 * PLANES
        plane = tl.load(planes + head * PLANES + tl.where(first, i, i - PLANES), turned, 0)
        c = tl.load(cos + plane, turned, 1.0)
        s = tl.load(sin + plane, turned, 0.0)
    return first, c, s


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
    first, c, s = _load_angles(cos + batch * angle_stride, sin + batch * angle_stride, planes, i, head, PLANES)
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
            take_turn(OVERLAP)
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


@triton.jit
def window_kernel(
    keys,
    values,
    positions,
    q,
    k,
    v,
    cos,
    sin,
    planes,
    far,
    share,
    y,
    q_stride,
    k_stride,
    v_stride,
    angle_stride,
    STATES: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PLANES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MIXED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token of one head's window: its key and value go into the rings, and the head's queries attend to all that
    these hold. MIXED: y = far + share (near - far)."""
    batch = tl.program_id(0) // STATES
    head = tl.program_id(0) % STATES
    i = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    g = tl.arange(0, BLOCK_G)
    ring = tl.program_id(0).to(tl.int64) * (WIDTH * D)
    position = tl.load(positions + batch)
    new = (position % WIDTH).to(tl.int32)
    held = (w < WIDTH) & (w <= position)
    at = w[:, None] * D + i[None, :]
    inside = held[:, None] & (i < D)[None, :]
    key_tile = tl.load(keys + ring + at, inside, 0.0)
    value_tile = tl.load(values + ring + at, inside, 0.0)
    first, c, s = _load_angles(cos + batch * angle_stride, sin + batch * angle_stride, planes, i, head, PLANES)
    take_turn(OVERLAP)
    key = _load_turned(k + batch * k_stride + head * D, i, D, first, c, s, PLANES)
    key = narrowed(key, keys.dtype.element_ty)
    value = tl.load(v + batch * v_stride + head * D + i, i < D, 0.0)
    tl.store(keys + ring + new * D + i, key, i < D)
    tl.store(values + ring + new * D + i, value, i < D)
    key_tile = tl.where((w == new)[:, None], key[None, :], key_tile)
    value_tile = tl.where((w == new)[:, None], value[None, :], value_tile)
    reader = head * GROUP + g
    heads = (g < GROUP)[:, None] & (i < D)[None, :]
    at = reader[:, None] * D + i[None, :]
    query = tl.load(q + batch * q_stride + at, heads, 0.0).to(tl.float32)
    if PLANES > 0:
        partner = at + tl.where(first, PLANES, -PLANES)[None, :]
        partner = tl.load(q + batch * q_stride + partner, heads & (i < 2 * PLANES)[None, :], 0.0).to(tl.float32)
        query = query * c[None, :] + tl.where(first[None, :], -partner, partner) * s[None, :]
    logits = product(query, tl.trans(key_tile), OPERAND, PRECISION)
    if SOFTCAP > 0:
        logits = SOFTCAP * (2 * tl.sigmoid(2 * logits / SOFTCAP) - 1)
    logits = tl.where(held[None, :], logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    near = product(weights / tl.sum(weights, 1)[:, None], value_tile, OPERAND, PRECISION)
    at += batch * (STATES * GROUP * D)
    if MIXED:
        before = tl.load(far + at, heads, 0.0).to(tl.float32)
        near = before + tl.load(share + reader, g < GROUP, 0.0).to(tl.float32)[:, None] * (near - before)
    tl.store(y + at, narrowed(near, y.dtype.element_ty), heads)
