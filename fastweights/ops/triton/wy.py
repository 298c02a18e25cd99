"""Training kernels of the delta rules: S_t = S' + u_t k_t^T with S' = S_{t-1} diag(f_t), u_t = g_t (v_t - S' k_t).

gated_delta has F_WIDTH = BM; delta has no gate f, F_WIDTH = 0. In a tile with the cumulative products F of its gates,
    (I + strictly lower(g (K F) (K / F)^T)) U = g (V - (K F) S_0^T),
the WY form of ops/wy.py and docs/derivations.md.
The matrices do not depend on the state, so `solve` inverts those of all tiles in parallel. A program then goes through
the tiles of one head (one segment of its tokens, one slice of d) with matrix products alone, the state in registers.

A whole segment is S_end = S_start P + W: W is its result for a zero state, P [m,m] its result for the identity when all
values are 0.

Names: f_run and f_inv are the cumulative products of the gate and their inverses, relative to f_root, as in tiled.py.
q_in, k_in and k_read are q F, k / F and k F: products of the first and last with k_in are what tokens read of each
other. *_start is scaled for what reads the state before the tile, *_end for what is in the state after it.

Precision: the rule takes differences of values and what the state returns for their keys, so all products have float32
operands (tf32, or three-way split tf32), whatever the dtype of the inputs. The gradient of f is a sum that cancels; in
tf32 it uses the same rounded values that the products multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.primitives import (
    SIZES,
    assume_multiple,
    cast_rounded,
    document_ids,
    gate_gradient,
    load_flags,
    load_gate,
    load_tile,
    locate_program,
    lower_triangle,
    matmul,
    round_to_product,
    store_tile,
)


@triton.jit
def load_keys(k, g, i, is_real, reset, heads, mi, m, HAS_FLAGS: tl.constexpr, TILE: tl.constexpr):
    """Load the keys and gates of a tile and derive its masks.

    Returns keys [TILE,BM], gates [TILE,1] and d gate / d logit, the mask of pairs in one document, the masks of the
    tokens that read the state before the tile and that are in the state after it, and 1 or 0: whether the state before
    the tile survives it. The gates g have no floor: nothing is divided by them.
    """
    kt = load_tile(k, i, is_real, heads, mi, m)
    logit = load_tile(g, i, is_real, heads, tl.arange(0, 1), 1)
    gate = tl.sigmoid(logit)
    slope = gate * tl.sigmoid(-logit)
    same, survives = lower_triangle(TILE, -TILE), 1.0
    reads_start, in_end = (i >= 0)[:, None], (i >= 0)[:, None]
    if HAS_FLAGS:
        document, last = document_ids(reset)
        same = document[:, None] == document[None, :]
        reads_start, in_end = (document == 0)[:, None], (document == last)[:, None]
        survives = tl.where(last == 0, 1.0, 0.0)
    return kt, gate, slope, same, reads_start, in_end, survives


@triton.jit(do_not_specialize=SIZES)
def solve(
    k, f, g, flags, inverses, length, heads, m,
    F_WIDTH: tl.constexpr, HAS_FLAGS: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute (I + strictly lower(g (K F) (K / F)^T))^-1 - I of every tile.

    Grid: (B*H*tiles,); one program inverts one 16 x 16 matrix. Row by row, by forward substitution: the product of
    powers (I-N)(I+N^2)(I+N^4)(I+N^8) has terms of up to 6,435 for equal keys, which must cancel. The identity is left
    out, so that what it multiplies is not rounded to an operand.
    """
    tiles = tl.cdiv(length, TILE)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    sequence_start = (head // heads).to(tl.int64) * length
    # In 64 bits: Triton 3.6 packs a 32-bit shift like this one with the thread's index into one register and shifts
    # both as one 64-bit value, so that bits of the lower one move into the upper one.
    i, tile_start = tl.arange(0, TILE), tile.to(tl.int64) * TILE
    base = (sequence_start + tile_start) * heads + head % heads
    in_range, mi = tile_start + i < length, tl.arange(0, BM)
    is_real, reset, gate_is_one = load_flags(flags + sequence_start + tile_start, i, in_range, HAS_FLAGS)
    kt, gate, _, same, _, _, _ = load_keys(k + base * m, g + base, i, is_real, reset, heads, mi, m, HAS_FLAGS, TILE)
    f_run, f_inv, _, _, _, _ = load_gate(f + base * m, i, is_real, gate_is_one, heads, mi, m, F_WIDTH, OPERAND, TILE)
    overlap = matmul(kt * f_run, tl.trans(kt * f_inv), OPERAND, PRECISION)
    rows = tl.where(lower_triangle(TILE, 1) & same, -gate * overlap, 0.0)
    columns = tl.trans(rows)
    # Row n of the inverse is row n of the negated matrix, plus that row times the finished rows above.
    for n in range(1, TILE):
        weights = tl.sum(tl.where((i == n)[None, :], columns, 0.0), 1)
        rows += tl.where((i == n)[:, None], tl.sum(weights[:, None] * rows, 0)[None, :], 0.0)
    tile_offsets = i[:, None] * TILE + i[None, :]
    at_tile = tl.program_id(0).to(tl.int64) * TILE * TILE
    tl.store(inverses + at_tile + tile_offsets, rows)


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, f, g, flags, inverses, starts, y, tile_states, ends,
    length, heads, m, d, segment_length,
    F_WIDTH: tl.constexpr, HAS_FLAGS: tl.constexpr, HAS_START: tl.constexpr, SAVE_STATES: tl.constexpr,
    OUTPUT: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y, the state at the end and, with SAVE_STATES, the state at the start of each tile.

    Grid: (B*H*slices, segments). Memory: S [BD,BM] in registers; one read of each input and of the tiles' inverses, one
    write of y. Without OUTPUT: only W and P of each segment. P is computed as m more rows of the state (the rows of an
    identity, with values of 0), so the slices cover d + m rows and `ends` is [B*H,segments,d+m,m].
    """
    m, d = assume_multiple(m, M_ALIGN), assume_multiple(d, D_ALIGN)
    rows = d if OUTPUT else d + m
    head, _slice, sequence_start, mi, di, state_offsets, in_state = locate_program(rows, m, heads, length, BM, BD)
    segment, segments, i, tiles = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE), tl.cdiv(length, TILE)
    S = tl.zeros([BD, BM], tl.float32)
    if HAS_START:
        S = tl.load(starts + (head * segments + segment).to(tl.int64) * d * m + state_offsets, mask=in_state, other=0.0)
    if not OUTPUT:
        S = tl.where((di - d)[:, None] == mi[None, :], 1.0, 0.0)
    segment_end = tl.minimum(length, (segment + 1) * segment_length)
    for tile_start in tl.range(segment * segment_length, segment_end, TILE, num_stages=STAGES):
        base, in_range = (sequence_start + tile_start) * heads + head % heads, tile_start + i < length
        tile = head.to(tl.int64) * tiles + tile_start // TILE
        if SAVE_STATES:
            tl.store(
                tile_states + tile * d * m + state_offsets, cast_rounded(S, tile_states.dtype.element_ty), mask=in_state
            )
        is_real, reset, gate_is_one = load_flags(flags + sequence_start + tile_start, i, in_range, HAS_FLAGS)
        kt, gate, _, same, reads_start, in_end, survives = load_keys(
            k + base * m, g + base, i, is_real, reset, heads, mi, m, HAS_FLAGS, TILE
        )
        f_run, f_inv, f_root, _, _, _ = load_gate(
            f + base * m, i, is_real, gate_is_one, heads, mi, m, F_WIDTH, OPERAND, TILE
        )
        k_start = tl.where(reads_start, kt * f_run * f_root[None, :], 0.0)
        k_in = kt * f_inv
        k_end = tl.where(in_end, k_in * f_root[None, :], 0.0)
        vt = load_tile(v + base * d, i, is_real, heads, di, d)
        inverse = tl.load(inverses + tile * TILE * TILE + i[:, None] * TILE + i[None, :])
        error = vt - matmul(k_start, tl.trans(S), OPERAND, PRECISION)
        u = gate * error + matmul(inverse, gate * error, OPERAND, PRECISION)
        if OUTPUT:
            q_in = load_tile(q + base * m, i, is_real, heads, mi, m) * f_run
            # where, not a product with the mask: above the diagonal the scaled products may overflow.
            scores = matmul(q_in, tl.trans(k_in), OPERAND, PRECISION)
            scores = tl.where(lower_triangle(TILE, 0) & same, scores, 0.0)
            q_start = tl.where(reads_start, q_in * f_root[None, :], 0.0)
            from_start = matmul(q_start, tl.trans(S), OPERAND, PRECISION)
            store_tile(y + base * d, matmul(scores, u, OPERAND, PRECISION) + from_start, i, in_range, heads, di, d)
        S = S * (survives * f_root * f_root)[None, :] + matmul(tl.trans(u), k_end, OPERAND, PRECISION)
    if OUTPUT:
        if segment == segments - 1:
            tl.store(ends + head.to(tl.int64) * d * m + state_offsets, S, mask=in_state)
    else:
        tl.store(ends + (head * segments + segment).to(tl.int64) * rows * m + state_offsets, S, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def backward(
    q, k, v, f, g, flags, inverses, tile_states, dy, dends, dq, dk, dv, df, dg, dstarts,
    length, heads, m, d, segment_length, slice_stride,
    F_WIDTH: tl.constexpr, HAS_FLAGS: tl.constexpr, OUTPUT: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the inputs and of the state at the start.

    Grid: (B*H*slices, segments), or without OUTPUT (B*H*slices, segments - 1). The tiles go backwards in time with dS
    in registers; the state before each tile comes from `tile_states`. Without OUTPUT: only what each segment except the
    first adds to the gradient of the state that passes through it, for the scan. slice_stride is the size of dq, as in
    tiled.py.
    """
    m, d = assume_multiple(m, M_ALIGN), assume_multiple(d, D_ALIGN)
    head, slice, sequence_start, mi, di, state_offsets, in_state = locate_program(d, m, heads, length, BM, BD)
    segment, segments, i = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE)
    if not OUTPUT:
        segment, segments = segment + 1, segments + 1
    at_segment = (head * segments + segment).to(tl.int64) * d * m
    tiles = tl.cdiv(length, TILE)
    slice_offset = slice.to(tl.int64) * slice_stride
    dq, dk, df, dg = dq + slice_offset, dk + slice_offset, df + slice_offset, dg + slice_offset // m
    dS = tl.zeros([BD, BM], tl.float32)
    if OUTPUT:
        dS = tl.load(dends + at_segment + state_offsets, mask=in_state, other=0.0)
    segment_end = tl.minimum(length, (segment + 1) * segment_length)
    tile_count = tl.cdiv(segment_end - segment * segment_length, TILE)
    for n in tl.range(0, tile_count, num_stages=STAGES):
        tile_start = segment * segment_length + (tile_count - 1 - n) * TILE
        base, in_range = (sequence_start + tile_start) * heads + head % heads, tile_start + i < length
        tile = head.to(tl.int64) * tiles + tile_start // TILE
        is_real, reset, gate_is_one = load_flags(flags + sequence_start + tile_start, i, in_range, HAS_FLAGS)
        kt, gate, slope, same, reads_start, in_end, survives = load_keys(
            k + base * m, g + base, i, is_real, reset, heads, mi, m, HAS_FLAGS, TILE
        )
        f_run, f_inv, f_root, _, _, f_slope = load_gate(
            f + base * m, i, is_real, gate_is_one, heads, mi, m, F_WIDTH, OPERAND, TILE
        )
        qt, dyt = load_tile(q + base * m, i, is_real, heads, mi, m), load_tile(dy + base * d, i, is_real, heads, di, d)
        # Rounded once, here: the products and the elementwise q dq + k dk - k dk below must see the same values.
        q_in, k_in = round_to_product(qt * f_run, OPERAND, PRECISION), round_to_product(kt * f_inv, OPERAND, PRECISION)
        k_read = round_to_product(kt * f_run, OPERAND, PRECISION)
        q_start = tl.where(reads_start, q_in * f_root[None, :], 0.0)
        k_start = tl.where(reads_start, k_read * f_root[None, :], 0.0)
        k_end = tl.where(in_end, k_in * f_root[None, :], 0.0)
        inverse = tl.load(inverses + tile * TILE * TILE + i[:, None] * TILE + i[None, :])
        scores = matmul(q_in, tl.trans(k_in), OPERAND, PRECISION)
        scores = tl.where(lower_triangle(TILE, 0) & same, scores, 0.0)
        du = matmul(tl.trans(scores), dyt, OPERAND, PRECISION) + matmul(k_end, tl.trans(dS), OPERAND, PRECISION)
        dtarget = du + matmul(tl.trans(inverse), du, OPERAND, PRECISION)
        dvalue = gate * dtarget
        state_decay = (survives * f_root * f_root)[None, :]
        if OUTPUT:
            S = tl.load(tile_states + tile * d * m + state_offsets, mask=in_state, other=0.0)
            error = load_tile(v + base * d, i, is_real, heads, di, d) - matmul(k_start, tl.trans(S), OPERAND, PRECISION)
            u = gate * error + matmul(inverse, gate * error, OPERAND, PRECISION)
            overlap = matmul(k_read, tl.trans(k_in), OPERAND, PRECISION)
            overlap = tl.where(lower_triangle(TILE, 1) & same, overlap, 0.0)
            dscores = matmul(dyt, tl.trans(u), OPERAND, PRECISION)
            # A token's own term (q_t . k_t) u_t has no gate in it: it is kept out of the sums for the gradient of f.
            own = tl.sum(tl.where(i[:, None] == i[None, :], dscores, 0.0), 1)[:, None]
            dscores = tl.where(lower_triangle(TILE, 1) & same, dscores, 0.0)
            doverlap = matmul(dtarget, tl.trans(u), OPERAND, PRECISION)
            doverlap = tl.where(lower_triangle(TILE, 1) & same, -doverlap, 0.0)
            dscores = round_to_product(dscores, OPERAND, PRECISION)
            gated = round_to_product(gate * doverlap, OPERAND, PRECISION)
            dq_start, dk_start = matmul(dyt, S, OPERAND, PRECISION), -matmul(dvalue, S, OPERAND, PRECISION)
            dq_in, dk_read = matmul(dscores, k_in, OPERAND, PRECISION), matmul(gated, k_in, OPERAND, PRECISION)
            dq_in += tl.where(reads_start, dq_start * f_root[None, :], 0.0)
            dk_read += tl.where(reads_start, dk_start * f_root[None, :], 0.0)
            dk_in = matmul(tl.trans(dscores), q_in, OPERAND, PRECISION)
            dk_in += matmul(tl.trans(gated), k_read, OPERAND, PRECISION)
            dk_end = tl.where(in_end, matmul(u, dS, OPERAND, PRECISION) * f_root[None, :], 0.0)
            new_dg = tl.sum(dtarget * error, 1) + tl.sum(doverlap * overlap, 1)
            store_tile(dq + base * m, f_run * dq_in + own * kt, i, in_range, heads, mi, m)
            new_dk = f_run * dk_read + f_inv * (dk_in + dk_end) + own * qt
            store_tile(dk + base * m, new_dk, i, in_range, heads, mi, m)
            store_tile(dv + base * d, dvalue, i, in_range, heads, di, d)
            store_tile(dg + base, new_dg[:, None] * slope, i, in_range, heads, tl.arange(0, 1), 1)
            if F_WIDTH > 0:
                flow = q_in * dq_in + k_read * dk_read - k_in * dk_in
                # S_start * dS_end * decay: the gradient that passes through the whole tile. Every gate of it gets it.
                through = state_decay * matmul(tl.full([TILE, BD], 1.0, tl.float32), S * dS, OPERAND, PRECISION)
                dlog = gate_gradient(flow, k_in * dk_end, OPERAND, PRECISION, TILE) + through
                if HAS_FLAGS:
                    dlog = tl.where(gate_is_one[:, None], 0.0, dlog)
                store_tile(df + base * m, dlog * f_slope, i, in_range, heads, mi, m)
        dS = dS * state_decay + matmul(tl.trans(dyt), q_start, OPERAND, PRECISION)
        dS -= matmul(tl.trans(dvalue), k_start, OPERAND, PRECISION)
    if OUTPUT:
        if segment == 0:
            tl.store(dstarts + head.to(tl.int64) * d * m + state_offsets, dS, mask=in_state)
    else:
        tl.store(dstarts + at_segment + state_offsets, dS, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def scan_segments(
    boundary, ends, sums, states, segments, m, d,
    REVERSE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan over the segments: the state at each segment's start, S P + W from one to the next.

    With REVERSE: the gradient of the state at each segment's end, dS P^T + what the segment adds (`sums`). Grid:
    (B*H*slices,). `ends` holds [W; P] of each segment, P after the first d rows.
    """
    head, _slice, _row, mi, _di, state_offsets, in_state = locate_program(d, m, 1, 0, BM, BD)
    head = head.to(tl.int64)
    square, in_square = mi[:, None] * m + mi[None, :], (mi < m)[:, None] & (mi < m)[None, :]
    S = tl.load(boundary + head * d * m + state_offsets, mask=in_state, other=0.0)
    for n in range(segments - 1):
        base = head * segments + (segments - 1 - n if REVERSE else n)
        tl.store(states + base * d * m + state_offsets, S, mask=in_state)
        through = tl.load(ends + (base * (d + m) + d) * m + square, mask=in_square, other=0.0)
        if REVERSE:
            added = tl.load(sums + base * d * m + state_offsets, mask=in_state, other=0.0)
            through = tl.trans(through)
        else:
            added = tl.load(ends + base * (d + m) * m + state_offsets, mask=in_state, other=0.0)
        S = matmul(S, through, tl.float32, PRECISION) + added
    tl.store(states + (head * segments + (0 if REVERSE else segments - 1)) * d * m + state_offsets, S, mask=in_state)
