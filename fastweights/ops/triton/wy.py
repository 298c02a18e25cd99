"""Training kernels of the delta rules: S_t = S' + u_t k_t^T with S' = S_{t-1} diag(f_t), u_t = g_t (v_t - S' k_t).

gated_delta has F_WIDTH = BM; delta has no gate f, F_WIDTH = 0. In a chunk with the cumulative products F of its gates,
    (I + strictly lower(g (K F) (K / F)^T)) U = g (V - (K F) S_0^T),
the WY form of ops/wy.py and docs/derivations.md. With X the inverse of the matrix on the left, and for the chunk's
    W = X g (K F),  U_0 = X g V,  K_end = K F_end / F,  Q_start = Q F,  scores = lower(Q_start (K / F)^T),
which do not depend on the state,
    U = U_0 - W S_0^T,   Y = Q_start S_0^T + scores U,   S_end = S_0 diag(F_end) + U^T K_end.
The way back has the same form: with dU_0 = scores^T dY,
    dU = dU_0 + K_end dS_end^T,   dS_0 = dS_end diag(F_end) + dY^T Q_start - dU^T W.
So there are four kernels, and the two that go from chunk to chunk consist of a few products:
    prepare     all chunks in parallel: W, U_0, K_end, Q_start, scores, X and F_end
    forward     chunk by chunk: U, Y and the states
    backward    chunk by chunk, from the last: dU and the gradients of the states
    gradients   all chunks in parallel: the gradients of queries, keys, values and gates
Few long sequences do not fill a GPU chunk by chunk, so their time is cut into segments. The end state of a segment is
linear in its start state: S_end = transition S_start + sum. Two more kernels use this:
    segment_effects   all segments in parallel: the transitions and the sums
    scan_segments     segment by segment: the states between them
Then forward and backward go through all segments at the same time.

Products of pairs of tokens have the gates between the two: q_t k_s F_t/F_s. F alone would leave float32's range, so
both tokens are scaled relative to a reference point. One pass over all pairs is enough if the gates of a chunk allow
it, as nearly all do. For chunks with smaller gates, two passes (SPLIT) are made by a second launch of `prepare` and
`gradients`: with both ways in one program, all chunks would pay for the registers of the second one. Passes:
    ALL     all pairs. The reference is the root of the chunk's product, relative to which 32 gates of sigmoid(-5) on
            average stay within e^80. Without gates nothing is scaled.
    NEAR    pairs within a half of the chunk. The reference is the root of the half's product, as in tiled.py.
    CROSS   a token in the second half with one in the first half. The reference is the middle of the chunk; both
            scales are at most 1.

Precision: the rule takes differences of values and what the state returns for their keys, so all products have
float32 operands (tf32, or three-way split tf32), whatever the dtype of the inputs. STORED is the dtype of what kernels
leave for each other: bfloat16 if the inputs are and BM is above 16. A state of few columns loses most of what it stores
to the next key, and the rounding of what is left would be too large. u and du are always float32: with gates that are
nearly open, the rounding of thousands of tokens adds up in the state. (float32 for k_end, too, lowers the largest error
from 4.4e-3 to 3.7e-3 in the interpreter; with both, forward and backward took 11 % longer on an H200.) The gradient of
f is a sum that cancels; it uses the same rounded values that the products multiplied.

Registers: Triton 3.6 gives `gradients` 32 registers a thread, and spills the rest, unless a limit is named. blocks.json
names 255 there.

Shapes in a program: tokens t [CHUNK]   q, k, f [CHUNK,BM]   v, u [CHUNK,BD]   scores, X [CHUNK,CHUNK]
                     S [BM,BD]: transposed, so that no product needs its transpose
In memory, N counts the chunks of all heads, and D is d padded to a multiple of BD:
    w, k_end, q_start [N,CHUNK,BM]   u, du [N,CHUNK,D]   scores, inverses [N,CHUNK,CHUNK]   decays [N,BM]
    states, dstates [N,BM,D]: at the start and at the end of each chunk
    splits [N] int8: 1 for the chunks of the second launch   transitions [B*H,segments,BM,BM]
They are padded so that loads need no masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.blocks import CHUNK as CHUNK_TOKENS
from fastweights.ops.triton.primitives import (
    MIN_LOGIT,
    SIZES,
    assume_multiple,
    cast_rounded,
    document_ids,
    load_flags,
    load_tile,
    locate_program,
    log2_gate,
    lower_triangle,
    matmul,
    matmul_exact,
    round_to_product,
    store_tile,
)

# log2 of the tokens of a chunk, for the loop of `invert`.
CHUNK_BITS = tl.constexpr(CHUNK_TOKENS.bit_length() - 1)
# Passes over pairs of tokens.
ALL, NEAR, CROSS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# log2 of the smallest product of a chunk's gates for one pass over its pairs: e^-160, whose root is e^-80.
SMALLEST_PRODUCT = tl.constexpr(-231.0)


# Parts of the kernels


@triton.jit
def locate_chunk(length, heads, CHUNK: tl.constexpr):
    """Find the chunk of a program in a grid of (N,) programs.

    Returns its index n, the index of its first token in the sequence, that of its first token and head in a tensor
    [B,T,H], and that of its first token in one [B,T].
    """
    chunks = tl.cdiv(length, CHUNK)
    # In 64 bits: Triton 3.6 packs a 32-bit shift like this one with the thread's index into one register and shifts
    # both as one 64-bit value, so that bits of the lower one move into the upper one.
    n = tl.program_id(0).to(tl.int64)
    head, start = n // chunks, n % chunks * CHUNK
    first = head // heads * length + start
    return n, start, first * heads + head % heads, first


@triton.jit
def chunks_of_segment(segment, segment_length, chunks, CHUNK: tl.constexpr):
    """The first chunk of a segment, and the one after its last. A segment is a multiple of CHUNK long."""
    first = segment * (segment_length // CHUNK)
    return first, tl.minimum(first + segment_length // CHUNK, chunks)


@triton.jit
def load_masks(flags, i, in_range, HAS_FLAGS: tl.constexpr, CHUNK: tl.constexpr):
    """Masks of a chunk: real tokens, tokens whose gates count as 1, pairs in one document [CHUNK,CHUNK], tokens that
    read the state before the chunk and that are in the state after it [CHUNK,1]; and 1 or 0: whether the state before
    the chunk survives it.
    """
    is_real, reset, gate_is_one = load_flags(flags, i, in_range, HAS_FLAGS)
    same, survives = lower_triangle(CHUNK, -CHUNK), 1.0
    reads_start, in_end = (i >= 0)[:, None], (i >= 0)[:, None]
    if HAS_FLAGS:
        document, last = document_ids(reset)
        same = document[:, None] == document[None, :]
        reads_start, in_end = (document == 0)[:, None], (document == last)[:, None]
        survives = tl.where(last == 0, 1.0, 0.0)
    return is_real, gate_is_one, same, reads_start, in_end, survives


@triton.jit
def load_g(g, i, is_real, heads):
    """The gate g [CHUNK,1], and one minus it. It has no floor: nothing is divided by it."""
    logit = load_tile(g, i, is_real, heads, tl.arange(0, 1), 1)
    return tl.sigmoid(logit), tl.sigmoid(-logit)


@triton.jit
def load_log_f(f, i, is_real, gate_is_one, heads, columns, width, F_WIDTH: tl.constexpr, STORED: tl.constexpr):
    """log2 of the gate f [CHUNK,columns], and d log f / d logit, which is 0 below the floor: a clamped logit has no
    effect. Without a gate both are a broadcastable 0."""
    log, slope = tl.zeros([1, 1], tl.float32), tl.zeros([1, 1], tl.float32)
    if F_WIDTH > 0:
        logit = load_tile(f, i, is_real, heads, columns, width)
        log, one_minus_gate, _ = log2_gate(logit, gate_is_one, STORED)
        slope = tl.where(logit < MIN_LOGIT, 0.0, one_minus_gate)
    return log, slope


@triton.jit
def chunk_products(log, F_WIDTH: tl.constexpr, SPLIT: tl.constexpr, STORED: tl.constexpr, CHUNK: tl.constexpr):
    """Products of a chunk's gates, from their log2 [CHUNK,columns]. Without gates, zeros and ones that broadcast.

    With F_t the product from the start of the chunk through token t, returns
        log2 of F_t relative to the root of the chunk's product, or with SPLIT to that of its half's  [CHUNK,columns]
        F_t, and the product of the gates after token t  [CHUNK,columns]
        log2 of the product of the chunk, and of its first half with SPLIT  [columns]
    The sum of logs is a product with a constant matrix, which costs less here than a scan.
    """
    relative, total = tl.zeros([1, 1], tl.float32), tl.zeros([1], tl.float32)
    first = total
    before, after = relative, relative
    if F_WIDTH > 0:
        i = tl.arange(0, CHUNK)
        t, s = i[:, None], i[None, :]
        signs, total = tl.where(s <= t, 0.5, -0.5), tl.sum(log, 0)
        before = 0.5 * total[None, :]
        after = before
        if SPLIT:
            signs = tl.where(t // (CHUNK // 2) == s // (CHUNK // 2), signs, 0.0)
            first = tl.sum(tl.where(t < CHUNK // 2, log, 0.0), 0)
            second = total - first
            before = tl.where(t < CHUNK // 2, 0.5 * first[None, :], (first + 0.5 * second)[None, :])
            after = tl.where(t < CHUNK // 2, (second + 0.5 * first)[None, :], 0.5 * second[None, :])
        relative = matmul_exact(signs, log, STORED)
    return relative, tl.exp2(before + relative), tl.exp2(after - relative), total, first


@triton.jit
def scales_of_pass(relative, total, first, PASS: tl.constexpr):
    """The scales of a pass, for the token of a pair that reads and for the one that is read [CHUNK,columns]."""
    reader, read = relative, -relative
    if PASS == CROSS:
        reader += 0.5 * (total - first)[None, :]
        read += 0.5 * first[None, :]
    return tl.exp2(reader), tl.exp2(read)


@triton.jit
def pair_mask(same, AT_LEAST: tl.constexpr, PASS: tl.constexpr, CHUNK: tl.constexpr):
    """The pairs (t, s) of a pass with t - s >= AT_LEAST [CHUNK,CHUNK]."""
    i = tl.arange(0, CHUNK)
    one_half = i[:, None] // (CHUNK // 2) == i[None, :] // (CHUNK // 2)
    mask = lower_triangle(CHUNK, AT_LEAST) & same
    if PASS == NEAR:
        mask = mask & one_half
    if PASS == CROSS:
        mask = mask & (one_half == 0)
    return mask


@triton.jit
def invert(system, OPERAND: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular matrix.

    By blocks: [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]], for blocks of 1, 2, 4, ... tokens, all blocks of
    a size at once. The product of powers (I-N)(I+N^2)(I+N^4)... would have terms of up to 10^8 for equal keys, which
    must cancel.
    """
    i = tl.arange(0, CHUNK)
    t, s = i[:, None], i[None, :]
    inverse = tl.where(t == s, 1.0, 0.0) - tl.where((t >> 1 == s >> 1) & (t > s), system, 0.0)
    for power in tl.static_range(1, CHUNK_BITS):
        below = (t >> (power + 1) == s >> (power + 1)) & (t >> power > s >> power)
        part = matmul(tl.where(below, system, 0.0), inverse, OPERAND, PRECISION)
        inverse -= matmul(inverse, part, OPERAND, PRECISION)
    return inverse


@triton.jit
def rows_of(n, rows, columns, width, ROWS: tl.constexpr):
    """Offsets of a tile [ROWS,columns] of matrix n in a tensor [N,ROWS,width]."""
    return n * ROWS * width + rows[:, None] * width + columns[None, :]


@triton.jit
def load_float(x, offsets):
    return tl.load(x + offsets).to(tl.float32)


@triton.jit
def store_stored(x, offsets, value):
    tl.store(x + offsets, cast_rounded(value, x.dtype.element_ty))


# The kernels


@triton.jit(do_not_specialize=SIZES)
def prepare(
    q, k, v, f, g, flags, w, u, k_end, q_start, scores, inverses, decays, splits, length, heads, m, d,
    SPLIT: tl.constexpr, F_WIDTH: tl.constexpr, HAS_FLAGS: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Compute what does not depend on the state; `u` is filled with U_0. Grid: (N,).

    A first launch without SPLIT leaves out the chunks whose gates are too small for one pass, and marks them in
    `splits` [N] for a second launch.
    """
    m, d = assume_multiple(m, M_ALIGN), assume_multiple(d, D_ALIGN)
    n, start, base, token = locate_chunk(length, heads, CHUNK)
    if SPLIT and tl.load(splits + n) == 0:
        return
    i, mi = tl.arange(0, CHUNK), tl.arange(0, BM)
    in_range = start + i < length
    is_real, gate_is_one, same, reads_start, in_end, survives = load_masks(flags + token, i, in_range, HAS_FLAGS, CHUNK)
    log, _ = load_log_f(f + base * m, i, is_real, gate_is_one, heads, mi, m, F_WIDTH, STORED)
    relative, from_start, to_end, total, first_half = chunk_products(log, F_WIDTH, SPLIT, STORED, CHUNK)
    if F_WIDTH > 0 and not SPLIT:
        too_small = tl.min(total, 0) <= SMALLEST_PRODUCT
        tl.store(splits + n, too_small.to(tl.int8))
        if too_small:
            return
    qt = load_tile(q + base * m, i, is_real, heads, mi, m)
    kt = load_tile(k + base * m, i, is_real, heads, mi, m)
    gate, _ = load_g(g + base, i, is_real, heads)
    wide, square = rows_of(n, i, mi, BM, CHUNK), rows_of(n, i, i, CHUNK, CHUNK)
    store_stored(k_end, wide, tl.where(in_end, kt * to_end, 0.0))
    store_stored(q_start, wide, tl.where(reads_start, qt * from_start, 0.0))
    tl.store(decays + n * BM + mi, tl.broadcast_to(survives * tl.exp2(total), [BM]))
    system, queried = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for PASS in tl.static_range(NEAR if SPLIT else ALL, (CROSS if SPLIT else ALL) + 1):
        reader, read = scales_of_pass(relative, total, first_half, PASS)
        k_read = tl.trans(kt * read)
        # where, not a product with the mask: above the diagonal the scaled products may overflow.
        overlap = matmul(kt * reader, k_read, OPERAND, PRECISION)
        system += tl.where(pair_mask(same, 1, PASS, CHUNK), gate * overlap, 0.0)
        overlap = matmul(qt * reader, k_read, OPERAND, PRECISION)
        queried += tl.where(pair_mask(same, 0, PASS, CHUNK), overlap, 0.0)
    store_stored(scores, square, queried)
    solved = invert(system, OPERAND, PRECISION, CHUNK)
    store_stored(inverses, square, solved)
    k_start = tl.where(reads_start, kt * from_start, 0.0)
    store_stored(w, wide, matmul(solved, gate * k_start, OPERAND, PRECISION))
    padded = tl.cdiv(d, BD) * BD
    for first in range(0, d, BD):
        di = first + tl.arange(0, BD)
        vt = load_tile(v + base * d, i, is_real, heads, di, d)
        store_stored(u, rows_of(n, i, di, padded, CHUNK), matmul(solved, gate * vt, OPERAND, PRECISION))


@triton.jit(do_not_specialize=SIZES)
def forward(
    w, u, k_end, q_start, scores, decays, starts, y, states, ends, length, heads, m, d, segment_length,
    HAS_START: tl.constexpr, SAVE_STATES: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    SLICE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute y, the end state and, with SAVE_STATES, U (in the place of U_0) and the state at each chunk's start.

    Grid: (B*H*slices, segments), with SLICE columns of S for each program, out of D. Memory: S [BM,SLICE] in registers.
    HAS_START: `starts` holds the state at each segment's start; otherwise it is zero.
    """
    padded = tl.cdiv(d, BD) * BD
    head, _slice, sequence_start, mi, di, _, _ = locate_program(padded, m, heads, length, BM, SLICE)
    i, chunks = tl.arange(0, CHUNK), tl.cdiv(length, CHUNK)
    state_offsets = di[None, :] * m + mi[:, None]
    in_state = (di < d)[None, :] & (mi < m)[:, None]
    head, segment, segments = head.to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first, last = chunks_of_segment(segment, segment_length, chunks, CHUNK)
    S = tl.zeros([BM, SLICE], tl.float32)
    if HAS_START:
        S = tl.load(starts + (head * segments + segment) * d * m + state_offsets, mask=in_state, other=0.0)
    for chunk in tl.range(first, last, num_stages=STAGES):
        n, start = head * chunks + chunk, chunk * CHUNK
        wide, narrow = rows_of(n, i, mi, BM, CHUNK), rows_of(n, i, di, padded, CHUNK)
        ut = load_float(u, narrow) - matmul(load_float(w, wide), S, OPERAND, PRECISION)
        yt = matmul(load_float(q_start, wide), S, OPERAND, PRECISION)
        yt += matmul(load_float(scores, rows_of(n, i, i, CHUNK, CHUNK)), ut, OPERAND, PRECISION)
        base = (sequence_start + start) * heads + head % heads
        store_tile(y + base * d, yt, i, start + i < length, heads, di, d)
        if SAVE_STATES:
            store_stored(states, rows_of(n, mi, di, padded, BM), S)
            store_stored(u, narrow, ut)
        S = S * tl.load(decays + n * BM + mi)[:, None]
        S += matmul(tl.trans(load_float(k_end, wide)), ut, OPERAND, PRECISION)
    if segment == segments - 1:
        tl.store(ends + head * d * m + state_offsets, S, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def backward(
    w, k_end, q_start, scores, decays, dy, dends, du, dstates, dstarts, length, heads, m, d, segment_length,
    CHUNK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SLICE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dU and the gradients of the state at each chunk's end and at the start. Grid, memory: as in forward.

    `dends` holds the gradient of the state at each segment's end.
    """
    padded = tl.cdiv(d, BD) * BD
    head, _slice, sequence_start, mi, di, _, _ = locate_program(padded, m, heads, length, BM, SLICE)
    i, chunks = tl.arange(0, CHUNK), tl.cdiv(length, CHUNK)
    state_offsets = di[None, :] * m + mi[:, None]
    in_state = (di < d)[None, :] & (mi < m)[:, None]
    head, segment, segments = head.to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first, last = chunks_of_segment(segment, segment_length, chunks, CHUNK)
    dS = tl.load(dends + (head * segments + segment) * d * m + state_offsets, mask=in_state, other=0.0)
    for step in tl.range(0, last - first, num_stages=STAGES):
        chunk = last - 1 - step
        n, start = head * chunks + chunk, chunk * CHUNK
        wide = rows_of(n, i, mi, BM, CHUNK)
        base = (sequence_start + start) * heads + head % heads
        dyt = load_tile(dy + base * d, i, start + i < length, heads, di, d)
        store_stored(dstates, rows_of(n, mi, di, padded, BM), dS)
        from_y = tl.trans(load_float(scores, rows_of(n, i, i, CHUNK, CHUNK)))
        dut = matmul(from_y, dyt, OPERAND, PRECISION) + matmul(load_float(k_end, wide), dS, OPERAND, PRECISION)
        store_stored(du, rows_of(n, i, di, padded, CHUNK), dut)
        dS = dS * tl.load(decays + n * BM + mi)[:, None]
        dS += matmul(tl.trans(load_float(q_start, wide)), dyt, OPERAND, PRECISION)
        dS -= matmul(tl.trans(load_float(w, wide)), dut, OPERAND, PRECISION)
    if segment == 0:
        tl.store(dstarts + head * d * m + state_offsets, dS, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def segment_effects(
    w, u, k_end, q_start, scores, decays, dy, sums, transitions, length, heads, m, d, segment_length,
    REVERSE: tl.constexpr, CHUNK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SLICE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute what each segment does to the state: S_end = transition S_start + sum, in the layout [BM,.] of S.

    The sum is the end state from a start at zero, and the transition that of the identity without U_0, so that both
    are columns of one matrix. On the way back dS_start = transition^T dS_end + sum: with REVERSE only the sum is made.

    Grid: (B*H*slices, segments), slices of SLICE columns out of D, and then of BM for the transition.
    """
    padded = tl.cdiv(d, BD) * BD
    columns = padded if REVERSE else padded + BM
    head, _slice, sequence_start, mi, di, _, _ = locate_program(columns, m, heads, length, BM, SLICE)
    i, chunks = tl.arange(0, CHUNK), tl.cdiv(length, CHUNK)
    head, segment, segments = head.to(tl.int64), tl.program_id(1), tl.num_programs(1)
    first, last = chunks_of_segment(segment, segment_length, chunks, CHUNK)
    S = tl.where(mi[:, None] == di[None, :] - padded, 1.0, 0.0)
    for step in tl.range(0, last - first, num_stages=STAGES):
        chunk = last - 1 - step if REVERSE else first + step
        n = head * chunks + chunk
        wide = rows_of(n, i, mi, BM, CHUNK)
        decayed = S * tl.load(decays + n * BM + mi)[:, None]
        if REVERSE:
            base = (sequence_start + chunk * CHUNK) * heads + head % heads
            dyt = load_tile(dy + base * d, i, chunk * CHUNK + i < length, heads, di, d)
            from_y = tl.trans(load_float(scores, rows_of(n, i, i, CHUNK, CHUNK)))
            dut = matmul(from_y, dyt, OPERAND, PRECISION) + matmul(load_float(k_end, wide), S, OPERAND, PRECISION)
            S = decayed + matmul(tl.trans(load_float(q_start, wide)), dyt, OPERAND, PRECISION)
            S -= matmul(tl.trans(load_float(w, wide)), dut, OPERAND, PRECISION)
        else:
            ut = tl.load(u + rows_of(n, i, di, padded, CHUNK), mask=(di < padded)[None, :], other=0.0)
            ut -= matmul(load_float(w, wide), S, OPERAND, PRECISION)
            S = decayed + matmul(tl.trans(load_float(k_end, wide)), ut, OPERAND, PRECISION)
    at = head * segments + segment
    tl.store(sums + at * d * m + di[None, :] * m + mi[:, None], S, mask=(di < d)[None, :] & (mi < m)[:, None])
    if not REVERSE:
        in_transition = (di >= padded)[None, :] & (mi >= 0)[:, None]
        tl.store(transitions + at * BM * BM + mi[:, None] * BM + di[None, :] - padded, S, mask=in_transition)


@triton.jit(do_not_specialize=SIZES)
def scan_segments(
    boundary, sums, transitions, states, segments, m, d,
    REVERSE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Compute the state at each segment's start from the first one's, `boundary`. With REVERSE: the gradient of the
    state at each segment's end, from the last one's. Grid: (B*H*slices,), slices of SLICE columns out of D."""
    slices = tl.cdiv(d, BD) * BD // SLICE
    head = (tl.program_id(0) // slices).to(tl.int64)
    mi, di = tl.arange(0, BM), tl.program_id(0) % slices * SLICE + tl.arange(0, SLICE)
    offsets, in_state = di[None, :] * m + mi[:, None], (di < d)[None, :] & (mi < m)[:, None]
    square = mi[:, None] * BM + mi[None, :]
    S = tl.load(boundary + head * d * m + offsets, mask=in_state, other=0.0)
    for n in tl.range(segments - 1, num_stages=1):  # a pipeline would hold two transitions in shared memory
        at = head * segments + (segments - 1 - n if REVERSE else n)
        tl.store(states + at * d * m + offsets, S, mask=in_state)
        transition = tl.load(transitions + at * BM * BM + (tl.trans(square) if REVERSE else square))
        # Three-way split tf32 whatever the inputs: these products are few, and what they round stays in the state.
        S = matmul(transition, S, tl.float32, "tf32x3")
        S += tl.load(sums + at * d * m + offsets, mask=in_state, other=0.0)
    at = head * segments + (0 if REVERSE else segments - 1)
    tl.store(states + at * d * m + offsets, S, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def gradients(
    q, k, f, g, flags, u, inverses, decays, splits, states, dy, du, dstates, dq, dk, dv, df, dg, length, heads, m, d,
    SPLIT: tl.constexpr, F_WIDTH: tl.constexpr, HAS_FLAGS: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, SLICE: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the inputs from dU and those of the states. Grid: (N,), launched as `prepare` is.

    The sums over d go through SLICE columns at a time, which bounds the registers that they need.

    dtarget = X^T dU is the gradient of the right-hand side of the system, so that dV = g dtarget, and the gradient of g
    is that of dtarget U^T's diagonal, divided by g.
    """
    m, d = assume_multiple(m, M_ALIGN), assume_multiple(d, D_ALIGN)
    n, start, base, token = locate_chunk(length, heads, CHUNK)
    if F_WIDTH > 0 and (tl.load(splits + n) != 0) != SPLIT:
        return
    i, mi = tl.arange(0, CHUNK), tl.arange(0, BM)
    in_range = start + i < length
    is_real, _, _ = load_flags(flags + token, i, in_range, HAS_FLAGS)
    gate, one_minus_gate = load_g(g + base, i, is_real, heads)
    solved = tl.trans(load_float(inverses, rows_of(n, i, i, CHUNK, CHUNK)))
    padded = tl.cdiv(d, BD) * BD
    dscores, doverlap = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    dq_start, dk_start = tl.zeros([CHUNK, BM], tl.float32), tl.zeros([CHUNK, BM], tl.float32)
    dk_end, passing, new_dg = (
        tl.zeros([CHUNK, BM], tl.float32),
        tl.zeros([BM], tl.float32),
        tl.zeros([CHUNK], tl.float32),
    )
    for first in range(0, d, SLICE):
        di = first + tl.arange(0, SLICE)
        narrow, tall = rows_of(n, i, di, padded, CHUNK), rows_of(n, mi, di, padded, BM)
        ut, dyt = load_float(u, narrow), load_tile(dy + base * d, i, is_real, heads, di, d)
        S, dS = load_float(states, tall), load_float(dstates, tall)
        dtarget = matmul(solved, load_float(du, narrow), OPERAND, PRECISION)
        dvalue = gate * dtarget
        store_tile(dv + base * d, dvalue, i, in_range, heads, di, d)
        new_dg += tl.sum(dtarget * ut, 1)
        dscores += matmul(dyt, tl.trans(ut), OPERAND, PRECISION)
        doverlap -= matmul(dvalue, tl.trans(ut), OPERAND, PRECISION)
        dq_start += matmul(dyt, tl.trans(S), OPERAND, PRECISION)
        dk_start -= matmul(dvalue, tl.trans(S), OPERAND, PRECISION)
        dk_end += matmul(ut, tl.trans(dS), OPERAND, PRECISION)
        passing += tl.sum(S * dS, 1)
    store_tile(dg + base, new_dg[:, None] * one_minus_gate, i, in_range, heads, tl.arange(0, 1), 1)

    # Only now, and from the flags again: registers would hold the masks during the loop.
    is_real, gate_is_one, same, reads_start, in_end, _ = load_masks(flags + token, i, in_range, HAS_FLAGS, CHUNK)
    qt = load_tile(q + base * m, i, is_real, heads, mi, m)
    kt = load_tile(k + base * m, i, is_real, heads, mi, m)
    log, slope = load_log_f(f + base * m, i, is_real, gate_is_one, heads, mi, m, F_WIDTH, STORED)
    relative, from_start, to_end, total, first_half = chunk_products(log, F_WIDTH, SPLIT, STORED, CHUNK)
    dq_start = dq_start * tl.where(reads_start, from_start, 0.0)
    dk_start = dk_start * tl.where(reads_start, from_start, 0.0)
    dk_end = dk_end * tl.where(in_end, to_end, 0.0)
    # What reads across token t: q dq + k dk - k dk, summed over the tokens from t on, is the gradient of log f_t.
    new_dq, new_dk, flow = dq_start, dk_start + dk_end, qt * dq_start + kt * dk_start
    for PASS in tl.static_range(NEAR if SPLIT else ALL, (CROSS if SPLIT else ALL) + 1):
        reader, read = scales_of_pass(relative, total, first_half, PASS)
        mask = pair_mask(same, 1, PASS, CHUNK)
        from_q = round_to_product(tl.where(mask, dscores, 0.0), OPERAND, PRECISION)
        from_k = round_to_product(tl.where(mask, doverlap, 0.0), OPERAND, PRECISION)
        # Rounded once, here: the products and the elementwise sum for the flow must see the same values.
        k_read = round_to_product(kt * read, OPERAND, PRECISION)
        q_in = round_to_product(qt * reader, OPERAND, PRECISION)
        dq_in = matmul(from_q, k_read, OPERAND, PRECISION)
        new_dq += dq_in * reader
        flow += q_in * dq_in
        k_in = round_to_product(kt * reader, OPERAND, PRECISION)
        dk_in = matmul(from_k, k_read, OPERAND, PRECISION)
        new_dk += dk_in * reader
        flow += k_in * dk_in
        dk_read = matmul(tl.trans(from_q), q_in, OPERAND, PRECISION)
        dk_read += matmul(tl.trans(from_k), k_in, OPERAND, PRECISION)
        new_dk += dk_read * read
        flow -= k_read * dk_read
    # A token's own term (q_t . k_t) u_t has no gate in it: it is kept out of the sums for the gradient of f.
    own = tl.sum(tl.where(i[:, None] == i[None, :], dscores, 0.0), 1)[:, None]
    store_tile(dq + base * m, new_dq + own * kt, i, in_range, heads, mi, m)
    store_tile(dk + base * m, new_dk + own * qt, i, in_range, heads, mi, m)
    if F_WIDTH > 0:
        later, earlier = i[:, None] <= i[None, :], i[:, None] > i[None, :]
        # The state before the chunk passes through all its gates, and what token s wrote through all later ones.
        dlog = tl.load(decays + n * BM + mi)[None, :] * passing[None, :]
        dlog += matmul_exact(later.to(tl.float32), flow, STORED)
        dlog += matmul(earlier.to(tl.float32), kt * dk_end, OPERAND, PRECISION)
        if HAS_FLAGS:
            dlog = tl.where(gate_is_one[:, None], 0.0, dlog)
        store_tile(df + base * m, dlog * slope, i, in_range, heads, mi, m)
