"""Kernels of the delta rule: S_t = S_{t-1} + u_t k_t^T with u_t = g_t (v_t - S_{t-1} k_t),  y_t = S_t q_t.

In a tile U solves (I + strictly lower(g K K^T)) U = g (V - K S_0^T); the formulas are those of ops/wy.py and
rules/README.md. The inverses of these small matrices do not depend on the state: `solve` makes all of them at once,
and a program then walks the tiles of one head (one segment of its tokens, one slice of d) with products alone.

A segment as a whole is S_end = S_start P + W: W is what it makes of an empty state, P [m,m] what it makes of the
identity when all values are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.parts import (
    SIZES,
    aligned,
    below,
    document_masks,
    narrowed,
    place,
    product,
    read,
    read_flags,
    write,
)


@triton.jit
def read_keys(k, g, i, real, reset, heads, mi, m, FLAGS: tl.constexpr, TILE: tl.constexpr):
    """Keys, gates [TILE,1] and their slopes, pairs of one document, which tokens meet the state before the tile and
    after it, and whether that state survives the tile."""
    kt = read(k, i, real, heads, mi, m)
    logit = read(g, i, real, heads, tl.arange(0, 1), 1)
    gate = tl.sigmoid(logit)
    slope = gate * tl.sigmoid(-logit)
    same, survives = below(TILE, -TILE), 1.0
    meets_start, meets_end = (i >= 0)[:, None], (i >= 0)[:, None]
    if FLAGS:
        document, last = document_masks(reset, TILE)
        same = document[:, None] == document[None, :]
        meets_start, meets_end = (document == 0)[:, None], (document == last)[:, None]
        survives = tl.where(last == 0, 1.0, 0.0)
    return kt, gate, slope, same, meets_start, meets_end, survives


@triton.jit(do_not_specialize=SIZES)
def solve(
    k, g, flags, inverses, length, heads, m,
    FLAGS: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(I + strictly lower(g K K^T))^-1 - I of every tile, row by row: stable where a series of powers is not. The I is
    left out, so that what it multiplies is not rounded."""
    tiles = tl.cdiv(length, TILE)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = (head // heads).to(tl.int64) * length
    # in 64 bits: Triton 3.6 packs a shift of 32 into one register with the thread's number, which then spills into it
    i, begin = tl.arange(0, TILE), tile.to(tl.int64) * TILE
    here = (row + begin) * heads + head % heads
    real, reset, _ = read_flags(flags + row + begin, i, begin + i < length, FLAGS)
    kt, gate, _, same, _, _, _ = read_keys(
        k + here * m, g + here, i, real, reset, heads, tl.arange(0, BM), m, FLAGS, TILE
    )
    overlap = product(kt, tl.trans(kt), OPERAND, PRECISION)
    rows = tl.where(below(TILE, 1) & same, -gate * overlap, 0.0)
    columns = tl.trans(rows)
    for n in range(1, TILE):
        weights = tl.sum(tl.where((i == n)[None, :], columns, 0.0), 1)
        rows += tl.where((i == n)[:, None], tl.sum(weights[:, None] * rows, 0)[None, :], 0.0)
    cells = i[:, None] * TILE + i[None, :]
    at_tile = tl.program_id(0).to(tl.int64) * TILE * TILE
    tl.store(inverses + at_tile + cells, rows)


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, g, flags, inverses, starts, y, tile_states, ends,
    length, heads, m, d, segment,
    FLAGS: tl.constexpr, START: tl.constexpr, KEEP: tl.constexpr, OUTPUT: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y, the state at the end, and (KEEP) the states at the tiles' starts. Without OUTPUT: W and P of each segment,
    P as m more rows of the state."""
    m, d = aligned(m, M_ALIGN), aligned(d, D_ALIGN)
    rows = d if OUTPUT else d + m
    head, _slice, row, mi, di, cells, inside = place(rows, m, heads, length, BM, BD)
    part, parts, i, tiles = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE), tl.cdiv(length, TILE)
    S = tl.zeros([BD, BM], tl.float32)
    if START:
        S = tl.load(starts + (head * parts + part).to(tl.int64) * d * m + cells, mask=inside, other=0.0)
    if not OUTPUT:
        S = tl.where((di - d)[:, None] == mi[None, :], 1.0, 0.0)
    stop = tl.minimum(length, (part + 1) * segment)
    for begin in tl.range(part * segment, stop, TILE, num_stages=STAGES):
        here, there = (row + begin) * heads + head % heads, begin + i < length
        tile = head.to(tl.int64) * tiles + begin // TILE
        if KEEP:
            tl.store(tile_states + tile * d * m + cells, narrowed(S, tile_states.dtype.element_ty), mask=inside)
        real, reset, _ = read_flags(flags + row + begin, i, there, FLAGS)
        kt, gate, _, same, meets_start, meets_end, survives = read_keys(
            k + here * m, g + here, i, real, reset, heads, mi, m, FLAGS, TILE
        )
        k_start, k_end = tl.where(meets_start, kt, 0.0), tl.where(meets_end, kt, 0.0)
        vt = read(v + here * d, i, real, heads, di, d)
        inverse = tl.load(inverses + tile * TILE * TILE + i[:, None] * TILE + i[None, :])
        error = vt - product(k_start, tl.trans(S), OPERAND, PRECISION)
        u = gate * error + product(inverse, gate * error, OPERAND, PRECISION)
        if OUTPUT:
            qt = read(q + here * m, i, real, heads, mi, m)
            scores = product(qt, tl.trans(kt), OPERAND, PRECISION)
            scores = tl.where(below(TILE, 0) & same, scores, 0.0)
            from_start = product(tl.where(meets_start, qt, 0.0), tl.trans(S), OPERAND, PRECISION)
            write(y + here * d, product(scores, u, OPERAND, PRECISION) + from_start, i, there, heads, di, d)
        S = S * survives + product(tl.trans(u), k_end, OPERAND, PRECISION)
    if OUTPUT:
        if part == parts - 1:
            tl.store(ends + head.to(tl.int64) * d * m + cells, S, mask=inside)
    else:
        tl.store(ends + (head * parts + part).to(tl.int64) * rows * m + cells, S, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def backward(
    q, k, v, g, flags, inverses, tile_states, dy, dends, dq, dk, dv, dg, dstarts,
    length, heads, m, d, segment, sliced,
    FLAGS: tl.constexpr, OUTPUT: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs and of the state at the start. Without OUTPUT: only what each segment but the first adds
    to the gradient of the state that goes through it backwards. `sliced` is the size of dq, as in tiled.py."""
    m, d = aligned(m, M_ALIGN), aligned(d, D_ALIGN)
    head, slice, row, mi, di, cells, inside = place(d, m, heads, length, BM, BD)
    part, parts, i = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE)
    if not OUTPUT:
        part, parts = part + 1, parts + 1
    at_part = (head * parts + part).to(tl.int64) * d * m
    tiles = tl.cdiv(length, TILE)
    mine = slice.to(tl.int64) * sliced
    dq, dk, dg = dq + mine, dk + mine, dg + mine // m
    dS = tl.zeros([BD, BM], tl.float32)
    if OUTPUT:
        dS = tl.load(dends + at_part + cells, mask=inside, other=0.0)
    stop = tl.minimum(length, (part + 1) * segment)
    count = tl.cdiv(stop - part * segment, TILE)
    for n in tl.range(0, count, num_stages=STAGES):
        begin = part * segment + (count - 1 - n) * TILE
        here, there = (row + begin) * heads + head % heads, begin + i < length
        tile = head.to(tl.int64) * tiles + begin // TILE
        real, reset, _ = read_flags(flags + row + begin, i, there, FLAGS)
        kt, gate, slope, same, meets_start, meets_end, survives = read_keys(
            k + here * m, g + here, i, real, reset, heads, mi, m, FLAGS, TILE
        )
        k_start, k_end = tl.where(meets_start, kt, 0.0), tl.where(meets_end, kt, 0.0)
        qt, dyt = read(q + here * m, i, real, heads, mi, m), read(dy + here * d, i, real, heads, di, d)
        inverse = tl.load(inverses + tile * TILE * TILE + i[:, None] * TILE + i[None, :])
        scores = product(qt, tl.trans(kt), OPERAND, PRECISION)
        scores = tl.where(below(TILE, 0) & same, scores, 0.0)
        du = product(tl.trans(scores), dyt, OPERAND, PRECISION) + product(k_end, tl.trans(dS), OPERAND, PRECISION)
        dtarget = du + product(tl.trans(inverse), du, OPERAND, PRECISION)
        dvalue = gate * dtarget
        if OUTPUT:
            S = tl.load(tile_states + tile * d * m + cells, mask=inside, other=0.0)
            error = read(v + here * d, i, real, heads, di, d) - product(k_start, tl.trans(S), OPERAND, PRECISION)
            u = gate * error + product(inverse, gate * error, OPERAND, PRECISION)
            overlap = product(kt, tl.trans(kt), OPERAND, PRECISION)
            dscores = tl.where(below(TILE, 0) & same, product(dyt, tl.trans(u), OPERAND, PRECISION), 0.0)
            doverlap = product(dtarget, tl.trans(u), OPERAND, PRECISION)
            doverlap = tl.where(below(TILE, 1) & same, -doverlap, 0.0)
            gated = gate * doverlap
            both = gated + tl.trans(gated)
            new_dq = product(dscores, kt, OPERAND, PRECISION)
            new_dq += tl.where(meets_start, product(dyt, S, OPERAND, PRECISION), 0.0)
            new_dk = product(tl.trans(dscores), qt, OPERAND, PRECISION) + product(both, kt, OPERAND, PRECISION)
            new_dk -= tl.where(meets_start, product(dvalue, S, OPERAND, PRECISION), 0.0)
            new_dk += tl.where(meets_end, product(u, dS, OPERAND, PRECISION), 0.0)
            new_dg = tl.sum(dtarget * error, 1) + tl.sum(doverlap * overlap, 1)
            write(dq + here * m, new_dq, i, there, heads, mi, m)
            write(dk + here * m, new_dk, i, there, heads, mi, m)
            write(dv + here * d, dvalue, i, there, heads, di, d)
            write(dg + here, new_dg[:, None] * slope, i, there, heads, tl.arange(0, 1), 1)
        q_start = tl.where(meets_start, qt, 0.0)
        dS = dS * survives + product(tl.trans(dyt), q_start, OPERAND, PRECISION)
        dS -= product(tl.trans(dvalue), k_start, OPERAND, PRECISION)
    if OUTPUT:
        if part == 0:
            tl.store(dstarts + head.to(tl.int64) * d * m + cells, dS, mask=inside)
    else:
        tl.store(dstarts + at_part + cells, dS, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def scan_segments(
    boundary, ends, sums, states, parts, m, d,
    BACK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at each segment's start; or (BACK) its gradient at each segment's end. `ends` holds the segments' P
    after d rows; what a segment adds is there before it, or (BACK) in `sums`."""
    head, _slice, _row, mi, _di, cells, inside = place(d, m, 1, 0, BM, BD)
    head = head.to(tl.int64)
    square, in_square = mi[:, None] * m + mi[None, :], (mi < m)[:, None] & (mi < m)[None, :]
    S = tl.load(boundary + head * d * m + cells, mask=inside, other=0.0)
    for n in range(parts - 1):
        here = head * parts + (parts - 1 - n if BACK else n)
        tl.store(states + here * d * m + cells, S, mask=inside)
        through = tl.load(ends + (here * (d + m) + d) * m + square, mask=in_square, other=0.0)
        if BACK:
            added = tl.load(sums + here * d * m + cells, mask=inside, other=0.0)
            through = tl.trans(through)
        else:
            added = tl.load(ends + here * (d + m) * m + cells, mask=inside, other=0.0)
        S = product(S, through, tl.float32, PRECISION) + added
    tl.store(states + (head * parts + (0 if BACK else parts - 1)) * d * m + cells, S, mask=inside)
