"""Triton kernels of one decoding step: the update of a rule's state, and attention to a window.

Shapes: state [B,S,d,m], or [B,S,d+1,m] with a normalizer   q [B,G*S,m]   k [B,S,m]   v [B,S,d]   gates [B,S,.]
        cos, sin [B,R]   pairs [S,P]   scale [S,m]   keys, values [B,S,n+w,d]
        y, rule_output [B,G*S,d]   mix_logit [G*S] or [B,G*S]

OVERLAP: programmatic dependent launch, as in decode_linear.py. Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.primitives import MIN_LOGIT, cast_rounded, matmul, wait_for_previous_kernel
from fastweights.rules import feature_maps, normalizer

UNIT_EPSILON = tl.constexpr(feature_maps.UNIT_EPSILON)
SMALLEST_DIVISOR = tl.constexpr(normalizer.SMALLEST_DIVISOR)


@triton.jit
def _load_rotated(x, i, m, first, cos, sin, ROTARY_PAIRS: tl.constexpr, UNIT: tl.constexpr = False):
    """Load a head's query or key, with RoPE applied to its first 2 * ROTARY_PAIRS elements; UNIT: of unit length.

    Element i of the first half is paired with element i + ROTARY_PAIRS; `first` marks the first half.
    """
    values = tl.load(x + i, i < m, 0.0).to(tl.float32)
    if ROTARY_PAIRS > 0:
        rotated = i < 2 * ROTARY_PAIRS
        partner = tl.load(x + tl.where(first, i + ROTARY_PAIRS, i - ROTARY_PAIRS), rotated, 0.0).to(tl.float32)
        values = values * cos + tl.where(first, -partner, partner) * sin
    if UNIT:
        values = values * tl.rsqrt(tl.sum(values * values, 0) + UNIT_EPSILON)
    return values


@triton.jit
def _load_angles(cos, sin, pairs, i, head, ROTARY_PAIRS: tl.constexpr):
    """Load cos and sin for each element i of a head, and the mask of the first half of the rotary pairs.

    `pairs` says which of the model's rotary angles each pair of this head uses. Elements that are not rotated get cos 1
    and sin 0. `cos` and `sin` point to this sequence's angles.
    """
    first = i < ROTARY_PAIRS
    c = tl.full([i.shape[0]], 1.0, tl.float32)
    s = tl.full([i.shape[0]], 0.0, tl.float32)
    if ROTARY_PAIRS > 0:
        rotated = i < 2 * ROTARY_PAIRS
        pair = tl.load(pairs + head * ROTARY_PAIRS + tl.where(first, i, i - ROTARY_PAIRS), rotated, 0)
        c = tl.load(cos + pair, rotated, 1.0)
        s = tl.load(sin + pair, rotated, 0.0)
    return first, c, s


@triton.jit
def _clamp_logit(logit):
    """The gate logit in float32, clamped at the floor of all rules; NaN stays NaN."""
    return tl.maximum(logit.to(tl.float32), MIN_LOGIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gate(logit):
    return tl.sigmoid(_clamp_logit(logit))


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
    pairs,
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
    STATES_PER_KEY: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    RULE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_KEY_SCALE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Update one state by one token, in place, and read it with the queries of its group.

    STATES_PER_KEY states have one key and value in common.

    Grid: (B*S, slices), or (B*S, 1) with a normalizer. A program handles SLICES slices of BLOCK_D state rows. Rows are
    independent, except that all of them are divided by the normalizer in the last row: with it one program takes all
    slices, since another program could read the normalizer before or after its update.

    Memory: 2 * 4 * d * m bytes per state dominate; the state is read and written once. Gates, RoPE and the key scale
    are applied on the way, so nothing else goes through memory.
    """
    batch = tl.program_id(0) // STATES
    head = tl.program_id(0) % STATES
    key_head = head // STATES_PER_KEY
    i = tl.arange(0, BLOCK_M)
    state_base = state + tl.program_id(0).to(tl.int64) * ((D + NORMALIZE) * M)
    first, c, s = _load_angles(cos + batch * angle_stride, sin + batch * angle_stride, pairs, i, key_head, ROTARY_PAIRS)
    key_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_KEY_SCALE:
        key_scale = tl.load(scale + head * M + i, i < M, 0.0).to(tl.float32)
    for part in tl.static_range(SLICES):
        j = (tl.program_id(1) * SLICES + part) * BLOCK_D + tl.arange(0, BLOCK_D)
        at = j[:, None] * M + i[None, :]
        inside = (j < D)[:, None] & (i < M)[None, :]
        # Before the wait: the previous kernel does not write the state, so this load overlaps with it.
        rows = tl.load(state_base + at, inside, 0.0)
        if part == 0:
            if NORMALIZE:
                norm = tl.load(state_base + D * M + i, i < M, 0.0)
            wait_for_previous_kernel(OVERLAP)
            key = _load_rotated(k + batch * k_stride + key_head * M, i, M, first, c, s, ROTARY_PAIRS, UNIT) * key_scale
        value = tl.load(v + batch * v_stride + key_head * D + j, j < D, 0.0).to(tl.float32)
        if RULE == "decay":
            f = _gate(tl.load(gate + batch * gate_stride + head * M + i, i < M, 0.0))
            z = _gate(tl.load(gate2 + batch * gate2_stride + head * D + j, j < D, 0.0))
            rows = rows * z[:, None] * f[None, :] + value[:, None] * key[None, :]
        elif RULE == "gated":
            logit = _clamp_logit(tl.load(gate + batch * gate_stride + head))
            rows = tl.sigmoid(logit) * rows + tl.sigmoid(-logit) * value[:, None] * key[None, :]
        elif RULE == "delta" or RULE == "gated_delta":
            if RULE == "gated_delta":
                rows = rows * _gate(tl.load(gate + batch * gate_stride + head * M + i, i < M, 0.0))[None, :]
                g = tl.sigmoid(tl.load(gate2 + batch * gate2_stride + head).to(tl.float32))
            else:
                g = tl.sigmoid(tl.load(gate + batch * gate_stride + head).to(tl.float32))
            error = value - tl.sum(rows * key[None, :], 1)
            rows += (g * error)[:, None] * key[None, :]
        else:
            rows += value[:, None] * key[None, :]
        if NORMALIZE and part == 0:
            if RULE == "gated":
                norm = tl.sigmoid(logit) * norm + tl.sigmoid(-logit) * key
            else:
                norm += key
            tl.store(state_base + D * M + i, norm, i < M)
        for member in tl.static_range(GROUP):
            query_head = head * GROUP + member
            query = _load_rotated(q + batch * q_stride + query_head * M, i, M, first, c, s, ROTARY_PAIRS, UNIT)
            output = tl.sum(rows * query[None, :], 1)
            if NORMALIZE:
                divisor = tl.sum(norm * query, 0)
                small = tl.where(divisor < 0, -SMALLEST_DIVISOR, SMALLEST_DIVISOR)
                output = output / tl.where(tl.abs(divisor) < SMALLEST_DIVISOR, small, divisor)
            tl.store(y + (batch * STATES * GROUP + query_head) * D + j, output, j < D)
        tl.store(state_base + at, rows, inside)


@triton.jit
def _add_tokens(
    top,
    total,
    near,
    query,
    keys,
    values,
    valid,
    is_new,
    key,
    value,
    SOFTCAP: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add tokens of a ring buffer to a running softmax: its largest logits, its sum, and y before the division.

    The buffer may have been read before the new token was written, so its key and value are inserted where `is_new`.
    """
    keys = tl.where(is_new[:, None], key[None, :], keys)
    values = tl.where(is_new[:, None], value[None, :], values)
    logits = matmul(query, tl.trans(keys), OPERAND, PRECISION)
    if SOFTCAP > 0:
        logits = SOFTCAP * (2 * tl.sigmoid(2 * logits / SOFTCAP) - 1)  # softcap * tanh(logits / softcap)
    logits = tl.where(valid[None, :], logits, float("-inf"))
    # Never -inf: the first token of the first tile is valid in every step.
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights, decay = tl.exp(logits - new_top[:, None]), tl.exp(top - new_top)
    near = near * decay[:, None] + matmul(weights, values, OPERAND, PRECISION)
    return new_top, total * decay + tl.sum(weights, 1), near


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
    pairs,
    rule_output,
    mix_logit,
    y,
    q_stride,
    k_stride,
    v_stride,
    angle_stride,
    mix_stride,
    STATES: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MIXED: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add one token to a window's ring buffers and attend to the tokens they hold.

    Grid: (B*S,). One program reads the ring buffers of one key-value head (keys and values [n+w,d]), BLOCK_W tokens at
    a time, and handles all queries of its group, so the buffers are read once. MIXED: y = rule_output + share *
    (window - rule_output), with share = sigmoid(mix_logit).
    """
    batch = tl.program_id(0) // STATES
    head = tl.program_id(0) % STATES
    i = tl.arange(0, BLOCK_D)
    w = tl.arange(0, BLOCK_W)
    g = tl.arange(0, BLOCK_G)
    ring = tl.program_id(0).to(tl.int64) * (WIDTH * D)
    position = tl.load(positions + batch)
    slot = tl.where(position < SINKS, position, SINKS + (position - SINKS) % (WIDTH - SINKS)).to(tl.int32)
    # Slots fill up in order, so until the ring is full only those up to the position hold a token.
    valid = (w < WIDTH) & (w <= position)
    at = w[:, None] * D + i[None, :]
    inside = valid[:, None] & (i < D)[None, :]
    key_tile = tl.load(keys + ring + at, inside, 0.0)
    value_tile = tl.load(values + ring + at, inside, 0.0)
    first, c, s = _load_angles(cos + batch * angle_stride, sin + batch * angle_stride, pairs, i, head, ROTARY_PAIRS)
    wait_for_previous_kernel(OVERLAP)
    key = _load_rotated(k + batch * k_stride + head * D, i, D, first, c, s, ROTARY_PAIRS)
    # Rounded as it is stored, so that this step sees the same key as later steps.
    key = cast_rounded(key, keys.dtype.element_ty)
    value = tl.load(v + batch * v_stride + head * D + i, i < D, 0.0)
    tl.store(keys + ring + slot * D + i, key, i < D)
    tl.store(values + ring + slot * D + i, value, i < D)
    # The group is padded to BLOCK_G >= 16 rows, the least that tensor cores multiply.
    query_head = head * GROUP + g
    heads = (g < GROUP)[:, None] & (i < D)[None, :]
    at = query_head[:, None] * D + i[None, :]
    query = tl.load(q + batch * q_stride + at, heads, 0.0).to(tl.float32)
    if ROTARY_PAIRS > 0:
        partner = at + tl.where(first, ROTARY_PAIRS, -ROTARY_PAIRS)[None, :]
        partner = tl.load(q + batch * q_stride + partner, heads & (i < 2 * ROTARY_PAIRS)[None, :], 0.0).to(tl.float32)
        query = query * c[None, :] + tl.where(first[None, :], -partner, partner) * s[None, :]
    top, total = tl.full([BLOCK_G], float("-inf"), tl.float32), tl.zeros([BLOCK_G], tl.float32)
    near = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    top, total, near = _add_tokens(
        top, total, near, query, key_tile, value_tile, valid, w == slot, key, value, SOFTCAP, OPERAND, PRECISION
    )
    filled = tl.minimum(position + 1, WIDTH).to(tl.int32)
    for tile in range(1, tl.cdiv(filled, BLOCK_W)):
        w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
        valid = (w < WIDTH) & (w <= position)
        tokens = ring + w[:, None] * D + i[None, :]
        inside = valid[:, None] & (i < D)[None, :]
        key_tile = tl.load(keys + tokens, inside, 0.0)
        value_tile = tl.load(values + tokens, inside, 0.0)
        top, total, near = _add_tokens(
            top, total, near, query, key_tile, value_tile, valid, w == slot, key, value, SOFTCAP, OPERAND, PRECISION
        )
    near = near / total[:, None]
    at += batch * (STATES * GROUP * D)
    if MIXED:
        from_rule = tl.load(rule_output + at, heads, 0.0).to(tl.float32)
        logit = tl.load(mix_logit + batch * mix_stride + query_head, g < GROUP, 0.0).to(tl.float32)
        # Rounded as the layer rounds it.
        share = cast_rounded(tl.sigmoid(logit), y.dtype.element_ty).to(tl.float32)[:, None]
        near = from_rule + share * (near - from_rule)
    tl.store(y + at, cast_rounded(near, y.dtype.element_ty), heads)
