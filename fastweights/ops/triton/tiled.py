"""Training kernels of the rules with elementwise gates: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T,  y_t = S_t q_t.

The rules are parameters of one set of kernels:
    decay   F_WIDTH = BM, HAS_Z: both gates
    gated   F_WIDTH = 1, INPUT_GATE: one gate g for all of f, and keys multiplied by 1 - g
    add     F_WIDTH = 0: no gates
The formulas are those of ops/tiled.py, derived in docs/derivations.md. A program handles one head, one segment of its
tokens and one slice of d. It goes through the tiles of 16 tokens in order, with the state in registers.

Names: x_run and x_inv are the cumulative products of gate x and their inverses, relative to x_root, the square root of
the tile's whole product (primitives.cumulative_products). q_in, k_in, v_in are scaled for products inside the tile.
*_from_start is what reads the state before the tile, *_to_end what is written to the state after it.

Precision: products use OPERAND (bfloat16, or float32 as tf32 or three-way split tf32) with float32 accumulators; the
state, the gates and all sums of logs are float32. The gate gradients are sums of q dq - k dk that cancel. In bfloat16
the two sides must not differ by rounding, so the sums use the same rounded values that the products multiplied. A pair
of tokens inside the sum then adds and subtracts exactly the same value.
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
    log2_gate,
    lower_triangle,
    matmul,
    matmul_exact,
    round_to_operand,
    store_tile,
    sum_over_tokens,
)


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, f, z, flags, starts, y, tile_states, end,
    length, heads, m, d, segment_length,
    F_WIDTH: tl.constexpr, HAS_Z: tl.constexpr, INPUT_GATE: tl.constexpr, HAS_FLAGS: tl.constexpr,
    HAS_START: tl.constexpr, SAVE_STATES: tl.constexpr, TILE: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y, the state at the end and, with SAVE_STATES, the state at the start of each tile.

    Grid: (B*H*slices, segments). One program computes one head, one slice of BD state rows and one segment of tokens.
    Memory: S [BD,BM] stays in registers in float32. Each input is read once and y written once. SAVE_STATES (training
    only) adds T/16 states, rounded to the precision in which the backward pass multiplies them.

    HAS_START: `starts` holds the state at each segment's start; otherwise it is zero. INPUT_GATE: keys are
    multiplied by 1 - g.
    """
    m, d = assume_multiple(m, M_ALIGN), assume_multiple(d, D_ALIGN)
    head, _slice, sequence_start, mi, di, state_offsets, in_state = locate_program(d, m, heads, length, BM, BD)
    segment, segments, i, tiles = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE), tl.cdiv(length, TILE)
    S = tl.zeros([BD, BM], tl.float32)
    if HAS_START:
        S = tl.load(starts + (head * segments + segment).to(tl.int64) * d * m + state_offsets, mask=in_state, other=0.0)
    segment_end = tl.minimum(length, (segment + 1) * segment_length)
    for tile_start in tl.range(segment * segment_length, segment_end, TILE, num_stages=STAGES):
        base, in_range = (sequence_start + tile_start) * heads + head % heads, tile_start + i < length
        if SAVE_STATES:
            saved_at = tile_states + (head.to(tl.int64) * tiles + tile_start // TILE) * d * m + state_offsets
            tl.store(saved_at, cast_rounded(S, tile_states.dtype.element_ty), mask=in_state)
        is_real, reset, gate_is_one = load_flags(flags + sequence_start + tile_start, i, in_range, HAS_FLAGS)
        qt, kt = load_tile(q + base * m, i, is_real, heads, mi, m), load_tile(k + base * m, i, is_real, heads, mi, m)
        vt = load_tile(v + base * d, i, is_real, heads, di, d)
        f_run, f_inv, f_root, one_minus_gate, _, _ = load_gate(
            f + base * (m if F_WIDTH > 1 else 1), i, is_real, gate_is_one, heads, mi, m, F_WIDTH, OPERAND, TILE
        )
        z_run, z_inv, z_root, _, _, _ = load_gate(
            z + base * d, i, is_real, gate_is_one, heads, di, d, HAS_Z * BD, OPERAND, TILE
        )
        if INPUT_GATE:
            kt = kt * one_minus_gate
        # Forward, a token's own pair (t = s) is part of the scores: its scales F_t / F_t cancel.
        pairs = lower_triangle(TILE, 0)
        q_in, k_in, v_in = qt * f_run, kt * f_inv, vt * z_inv
        q_from_start, k_to_end = q_in * f_root[None, :], k_in * f_root[None, :]
        state_decay = (z_root * z_root)[:, None] * (f_root * f_root)[None, :]
        if HAS_FLAGS:
            document, last = document_ids(reset)
            # Pairs count within one document. Only document 0 sees the state before the tile, only the last one is in
            # the state after it, and the old state survives if no document starts in the tile.
            pairs = pairs & (document[:, None] == document[None, :])
            q_from_start = tl.where((document == 0)[:, None], q_from_start, 0.0)
            k_to_end = tl.where((document == last)[:, None], k_to_end, 0.0)
            state_decay = tl.where(last == 0, state_decay, 0.0)
        # where, not a product with the mask: above the diagonal the scaled products may overflow, and inf * 0 is NaN.
        scores = tl.where(pairs, matmul(q_in, tl.trans(k_in), OPERAND, PRECISION), 0.0)
        inner = matmul(scores, v_in, OPERAND, PRECISION)
        outer = matmul(q_from_start, tl.trans(S), OPERAND, PRECISION)
        out = z_run * (inner + z_root[None, :] * outer)
        store_tile(y + base * d, out, i, in_range, heads, di, d)
        S = S * state_decay + matmul(tl.trans(v_in * z_root[None, :]), k_to_end, OPERAND, PRECISION)
    if segment == segments - 1:
        tl.store(end + head.to(tl.int64) * d * m + state_offsets, S, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def backward(
    q, k, v, f, z, flags, tile_states, dy, dends, dq, dk, dv, df, dz, dstart,
    length, heads, m, d, segment_length, slice_stride,
    F_WIDTH: tl.constexpr, HAS_Z: tl.constexpr, INPUT_GATE: tl.constexpr, HAS_FLAGS: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the inputs and of the state at the start.

    Grid: (B*H*slices, segments), as forward. The tiles go backwards in time, because dS, the gradient of the state,
    flows from the last token to the first. dS stays in registers; the state before each tile comes from `tile_states`,
    so nothing is computed forward again.

    slice_stride is the size of dq. Where d is cut into slices, every slice writes its own share of dq, dk and df at
    slice * slice_stride, and the launcher sums them. Nothing is added atomically, so two runs give the same bits.
    """
    m, d = assume_multiple(m, M_ALIGN), assume_multiple(d, D_ALIGN)
    head, slice, sequence_start, mi, di, state_offsets, in_state = locate_program(d, m, heads, length, BM, BD)
    segment, segments, i, tiles = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE), tl.cdiv(length, TILE)
    slice_offset = slice.to(tl.int64) * slice_stride
    dq, dk = dq + slice_offset, dk + slice_offset
    if F_WIDTH > 0:
        df = df + (slice_offset if F_WIDTH > 1 else slice_offset // m)
    dS = tl.load(dends + (head * segments + segment).to(tl.int64) * d * m + state_offsets, mask=in_state, other=0.0)
    segment_end = tl.minimum(length, (segment + 1) * segment_length)
    tile_count = tl.cdiv(segment_end - segment * segment_length, TILE)
    for n in tl.range(0, tile_count, num_stages=STAGES):
        tile_start = segment * segment_length + (tile_count - 1 - n) * TILE
        base, in_range = (sequence_start + tile_start) * heads + head % heads, tile_start + i < length
        is_real, reset, gate_is_one = load_flags(flags + sequence_start + tile_start, i, in_range, HAS_FLAGS)
        saved_at = tile_states + (head.to(tl.int64) * tiles + tile_start // TILE) * d * m + state_offsets
        S = tl.load(saved_at, mask=in_state, other=0.0)
        qt, kt = load_tile(q + base * m, i, is_real, heads, mi, m), load_tile(k + base * m, i, is_real, heads, mi, m)
        vt, dyt = load_tile(v + base * d, i, is_real, heads, di, d), load_tile(dy + base * d, i, is_real, heads, di, d)
        f_at = base * (m if F_WIDTH > 1 else 1)
        f_run, f_inv, f_root, one_minus_gate, gate, f_slope = load_gate(
            f + f_at, i, is_real, gate_is_one, heads, mi, m, F_WIDTH, OPERAND, TILE
        )
        z_run, z_inv, z_root, _, _, z_slope = load_gate(
            z + base * d, i, is_real, gate_is_one, heads, di, d, HAS_Z * BD, OPERAND, TILE
        )
        key = kt
        if INPUT_GATE:
            key = kt * one_minus_gate
        # Strictly below the diagonal: a token's own term (q_t . k_t) v_t has no gate in it. It is handled apart (`own`,
        # `down`) and excluded from the sums for the gate gradients, where its two parts are equal and would have to
        # cancel. With small gates they are nearly all there is.
        pairs = lower_triangle(TILE, 1)
        q_in, k_in, v_in, dy_in = qt * f_run, key * f_inv, vt * z_inv, dyt * z_run
        q_from_start, dy_from_start = q_in * f_root[None, :], dy_in * z_root[None, :]
        k_to_end, v_to_end = k_in * f_root[None, :], v_in * z_root[None, :]
        # Rounded once, here: the products and the elementwise q dq - k dk below must see the same values.
        q_in, k_in = round_to_operand(q_in, OPERAND), round_to_operand(k_in, OPERAND)
        v_in, dy_in = round_to_operand(v_in, OPERAND), round_to_operand(dy_in, OPERAND)
        state_decay = (z_root * z_root)[:, None] * (f_root * f_root)[None, :]
        if HAS_FLAGS:
            document, last = document_ids(reset)
            pairs = pairs & (document[:, None] == document[None, :])
            q_from_start = tl.where((document == 0)[:, None], q_from_start, 0.0)
            dy_from_start = tl.where((document == 0)[:, None], dy_from_start, 0.0)
            k_to_end = tl.where((document == last)[:, None], k_to_end, 0.0)
            v_to_end = tl.where((document == last)[:, None], v_to_end, 0.0)
            state_decay = tl.where(last == 0, state_decay, 0.0)
        own_pair = lower_triangle(TILE, 0) & (lower_triangle(TILE, 1) == 0)
        scores, dscores = (
            matmul(q_in, tl.trans(k_in), OPERAND, PRECISION),
            matmul(dy_in, tl.trans(v_in), OPERAND, PRECISION),
        )
        own, down = tl.where(own_pair, scores, 0.0).to(OPERAND), tl.where(own_pair, dscores, 0.0).to(OPERAND)
        scores, dscores = tl.where(pairs, scores, 0.0).to(OPERAND), tl.where(pairs, dscores, 0.0).to(OPERAND)
        dS_decayed = dS * state_decay
        # S_start * dS_end * decay: the gradient that passes through the whole tile. Every gate of the tile gets it.
        crossing = (S.to(tl.float32) * dS_decayed).to(OPERAND)

        dq_in = matmul(dscores, k_in, OPERAND, PRECISION)
        dk_in = matmul(tl.trans(dscores), q_in, OPERAND, PRECISION)
        dq_start = matmul(dy_from_start, S, OPERAND, PRECISION)
        dk_end = matmul(v_to_end, dS, OPERAND, PRECISION)
        new_dq = f_run * (dq_in + matmul(down, k_in, OPERAND, PRECISION) + f_root[None, :] * dq_start)
        new_dk = f_inv * (dk_in + matmul(down, q_in, OPERAND, PRECISION) + f_root[None, :] * dk_end)
        store_tile(dq + base * m, new_dq, i, in_range, heads, mi, m)
        store_tile(dk + base * m, new_dk * one_minus_gate if INPUT_GATE else new_dk, i, in_range, heads, mi, m)
        if F_WIDTH > 0:
            # The scales F and 1/F of q, k and their gradients cancel, so the difference is taken of the scaled values.
            flow = q_in * dq_in - k_in * dk_in + q_from_start * dq_start
            through = matmul(tl.full([TILE, BD], 1.0, tl.float32), crossing, OPERAND, PRECISION)
            dlog = gate_gradient(flow, k_to_end * dk_end, OPERAND, PRECISION, TILE) + through
            columns = mi
            if F_WIDTH == 1:
                dlog, columns = tl.sum(dlog, 1)[:, None], tl.arange(0, 1)
            if HAS_FLAGS:
                dlog = tl.where(gate_is_one[:, None], 0.0, dlog)
            if INPUT_GATE:  # through the factor 1 - g on the keys; f_slope below supplies the other 1 - g
                dlog -= tl.sum(kt * new_dk, 1)[:, None] * gate
            store_tile(df + f_at, dlog * f_slope, i, in_range, heads, columns, m if F_WIDTH > 1 else 1)

        dv_in = matmul(tl.trans(scores), dy_in, OPERAND, PRECISION)
        dv_end = matmul(k_to_end, tl.trans(dS), OPERAND, PRECISION)
        new_dv = z_inv * (dv_in + matmul(own, dy_in, OPERAND, PRECISION) + z_root[None, :] * dv_end)
        store_tile(dv + base * d, new_dv, i, in_range, heads, di, d)
        if HAS_Z:
            inner = matmul(scores, v_in, OPERAND, PRECISION)
            outer = matmul(q_from_start, tl.trans(S), OPERAND, PRECISION)
            flow = dy_in * inner - v_in * dv_in + dy_from_start * outer
            through = matmul(tl.full([TILE, BM], 1.0, tl.float32), tl.trans(crossing), OPERAND, PRECISION)
            dlog = gate_gradient(flow, v_to_end * dv_end, OPERAND, PRECISION, TILE) + through
            if HAS_FLAGS:
                dlog = tl.where(gate_is_one[:, None], 0.0, dlog)
            store_tile(dz + base * d, dlog * z_slope, i, in_range, heads, di, d)
        dS = dS_decayed + matmul(tl.trans(dy_from_start), q_from_start, OPERAND, PRECISION)
    if segment == 0:
        tl.store(dstart + head.to(tl.int64) * d * m + state_offsets, dS, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def segment_sums(
    a, b, f, z, flags, sums, decays,
    length, heads, m, d, segment_length,
    F_WIDTH: tl.constexpr, HAS_Z: tl.constexpr, INPUT_GATE: tl.constexpr, HAS_FLAGS: tl.constexpr,
    REVERSE: tl.constexpr, TILE: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute what each segment does to the state: S_end = decay * S_start + sum.

    Grid: (B*H*slices, segments - 1). `a` and `b` are keys and values, each multiplied by the gates from its token to
    the segment's end. With REVERSE they are queries and output gradients, multiplied by the gates since the segment's
    start, and the same recurrence runs backwards for dS. The last segment (REVERSE: the first) is left out, nothing
    follows it.

    All exponents here are sums of log gates, at most 0, and nothing is divided by a gate. So nothing can overflow, and
    tiles may be longer than 16 tokens (SEGMENT_TILE). A gate that underflows to 0 is correct: the segment then forgets.
    """
    m, d = assume_multiple(m, M_ALIGN), assume_multiple(d, D_ALIGN)
    head, _slice, sequence_start, mi, di, state_offsets, in_state = locate_program(d, m, heads, length, BM, BD)
    segment, segments, i = tl.program_id(1), tl.num_programs(1) + 1, tl.arange(0, TILE)
    segment = segment + 1 if REVERSE else segment
    S = tl.zeros([BD, BM], tl.float32)
    f_log_total, z_log_total = tl.zeros([BM], tl.float32), tl.zeros([BD], tl.float32)
    survives = 1.0
    # Forward: the tokens after s in its tile. REVERSE: the tokens up to and including t.
    others = (lower_triangle(TILE, 0) if REVERSE else tl.trans(lower_triangle(TILE, 1))).to(tl.float32)
    segment_end = tl.minimum(length, (segment + 1) * segment_length)
    tile_count = tl.cdiv(segment_end - segment * segment_length, TILE)
    for n in tl.range(0, tile_count, num_stages=STAGES):
        tile_start = segment * segment_length + (tile_count - 1 - n if REVERSE else n) * TILE
        base = (sequence_start + tile_start) * heads + head % heads
        in_range = tile_start + i < segment_end
        is_real, reset, gate_is_one = load_flags(flags + sequence_start + tile_start, i, in_range, HAS_FLAGS)
        at, bt = load_tile(a + base * m, i, is_real, heads, mi, m), load_tile(b + base * d, i, is_real, heads, di, d)
        f_log_decay, z_log_decay = tl.zeros([BM], tl.float32), tl.zeros([BD], tl.float32)
        if F_WIDTH > 0:
            columns, width = (mi, m) if F_WIDTH > 1 else (tl.arange(0, 1), 1)
            log, one_minus_gate, _ = log2_gate(
                load_tile(f + base * width, i, is_real, heads, columns, width), gate_is_one, OPERAND
            )
            if F_WIDTH == 1:
                log = log + tl.zeros([TILE, BM], tl.float32)
            if INPUT_GATE and not REVERSE:
                at = at * one_minus_gate
            at = at * tl.exp2(matmul_exact(others, log, OPERAND))
            f_log_decay = sum_over_tokens(log, OPERAND)
        if HAS_Z:
            log, _, _ = log2_gate(load_tile(z + base * d, i, is_real, heads, di, d), gate_is_one, OPERAND)
            bt = bt * tl.exp2(matmul_exact(others, log, OPERAND))
            z_log_decay = sum_over_tokens(log, OPERAND)
        state_decay = tl.exp2(z_log_decay)[:, None] * tl.exp2(f_log_decay)[None, :]
        if HAS_FLAGS:
            document, last = document_ids(reset)
            at = tl.where((document == (0 if REVERSE else last))[:, None], at, 0.0)
            state_decay = tl.where(last == 0, state_decay, 0.0)
            survives = tl.where(last == 0, survives, 0.0)
        f_log_total += f_log_decay
        z_log_total += z_log_decay
        S = S * state_decay + matmul(tl.trans(bt), at, OPERAND, PRECISION)
    state_offsets += (head * segments + segment).to(tl.int64) * d * m
    tl.store(sums + state_offsets, S, mask=in_state)
    tl.store(
        decays + state_offsets, survives * tl.exp2(z_log_total)[:, None] * tl.exp2(f_log_total)[None, :], mask=in_state
    )


@triton.jit(do_not_specialize=SIZES)
def scan_segments(boundary, sums, decays, states, segments, size, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Scan over the segments: the state at each segment's start, from the first one's.

    With REVERSE: the gradient of the state at each segment's end, from the last one's. Grid: (B*H, blocks of BLOCK
    elements); `size` is the number of elements of one state. The state's elements are independent, so they are treated
    as a vector.
    """
    head = tl.program_id(0).to(tl.int64)
    state_offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_state = state_offsets < size
    S = tl.load(boundary + head * size + state_offsets, mask=in_state)
    for n in range(segments - 1):
        base = (head * segments + (segments - 1 - n if REVERSE else n)) * size + state_offsets
        tl.store(states + base, S, mask=in_state)
        S = S * tl.load(decays + base, mask=in_state) + tl.load(sums + base, mask=in_state)
    tl.store(states + (head * segments + (0 if REVERSE else segments - 1)) * size + state_offsets, S, mask=in_state)
