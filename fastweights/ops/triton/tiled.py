"""Kernels of the rules whose gates are products: S_t = (z_t f_t^T) * S_{t-1} + v_t k_t^T,  y_t = S_t q_t.

decay has both gates, gated one number for all of f (and its 1 - g in k), add none: F_WIDTH and Z say so. The formulas
are those of ops/tiled.py and rules/README.md. A program walks the tiles of one head (one segment of its tokens, one
slice of d) with the state in registers.

Rounded operands and gates: sum q dq - k dk is taken of the very numbers that the products multiplied, rounded. A pair
of tokens inside the sum then adds and subtracts the same number, and the sums cancel exactly where they should.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.parts import (
    FLOOR,
    SIZES,
    aligned,
    below,
    document_masks,
    exact_product,
    log2_gate,
    narrowed,
    place,
    product,
    read,
    read_flags,
    rounded,
    running_products,
    sum_of_tokens,
    write,
)


@triton.jit
def read_gate(x, i, real, quiet, heads, columns, width, WIDTH: tl.constexpr, OPERAND: tl.constexpr, TILE: tl.constexpr):
    """A gate of WIDTH numbers a token (0: none): its running products, their inverses, the root of the whole product,
    one minus itself, itself, and d log gate / d logit: one minus itself, but 0 below the floor."""
    running, inverse, closed, opened, slope = ones(), ones(), ones(), ones(), ones()
    root = tl.full([1], 1.0, tl.float32)
    if WIDTH > 0:
        logit = read(x, i, real, heads, columns if WIDTH > 1 else tl.arange(0, 1), width if WIDTH > 1 else 1)
        log, closed, opened = log2_gate(logit, quiet, OPERAND)
        log = tl.broadcast_to(log, [TILE, columns.shape[0]])
        running, inverse, root = running_products(log, OPERAND, TILE)
        slope = tl.where(logit < FLOOR, 0.0, closed)
    return running, inverse, root, closed, opened, slope


@triton.jit
def ones():
    return tl.full([1, 1], 1.0, tl.float32)


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, f, z, flags, starts, y, tile_states, end,
    length, heads, m, d, segment,
    F_WIDTH: tl.constexpr, Z: tl.constexpr, SHARE: tl.constexpr, FLAGS: tl.constexpr, START: tl.constexpr,
    KEEP: tl.constexpr, TILE: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y, the state at the end, and (KEEP) the states at the tiles' starts.
    SHARE: the rule writes (1 - g) v k^T."""
    m, d = aligned(m, M_ALIGN), aligned(d, D_ALIGN)
    head, _slice, row, mi, di, cells, inside = place(d, m, heads, length, BM, BD)
    part, parts, i, tiles = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE), tl.cdiv(length, TILE)
    S = tl.zeros([BD, BM], tl.float32)
    if START:
        S = tl.load(starts + (head * parts + part).to(tl.int64) * d * m + cells, mask=inside, other=0.0)
    stop = tl.minimum(length, (part + 1) * segment)
    for begin in tl.range(part * segment, stop, TILE, num_stages=STAGES):
        here, there = (row + begin) * heads + head % heads, begin + i < length
        if KEEP:
            kept_at = tile_states + (head.to(tl.int64) * tiles + begin // TILE) * d * m + cells
            tl.store(kept_at, narrowed(S, tile_states.dtype.element_ty), mask=inside)
        real, reset, quiet = read_flags(flags + row + begin, i, there, FLAGS)
        qt, kt = read(q + here * m, i, real, heads, mi, m), read(k + here * m, i, real, heads, mi, m)
        vt = read(v + here * d, i, real, heads, di, d)
        f_run, f_inv, f_root, closed, _, _ = read_gate(
            f + here * (m if F_WIDTH > 1 else 1), i, real, quiet, heads, mi, m, F_WIDTH, OPERAND, TILE
        )
        z_run, z_inv, z_root, _, _, _ = read_gate(z + here * d, i, real, quiet, heads, di, d, Z * BD, OPERAND, TILE)
        if SHARE:
            kt = kt * closed
        pairs = below(TILE, 0)
        q_in, k_in, v_in = qt * f_run, kt * f_inv, vt * z_inv
        q_from_start, k_to_end = q_in * f_root[None, :], k_in * f_root[None, :]
        kept = (z_root * z_root)[:, None] * (f_root * f_root)[None, :]
        if FLAGS:
            document, last = document_masks(reset, TILE)
            pairs = pairs & (document[:, None] == document[None, :])
            q_from_start = tl.where((document == 0)[:, None], q_from_start, 0.0)
            k_to_end = tl.where((document == last)[:, None], k_to_end, 0.0)
            kept = tl.where(last == 0, kept, 0.0)
        scores = tl.where(pairs, product(q_in, tl.trans(k_in), OPERAND, PRECISION), 0.0)
        inner = product(scores, v_in, OPERAND, PRECISION)
        outer = product(q_from_start, tl.trans(S), OPERAND, PRECISION)
        out = z_run * (inner + z_root[None, :] * outer)
        write(y + here * d, out, i, there, heads, di, d)
        S = S * kept + product(tl.trans(v_in * z_root[None, :]), k_to_end, OPERAND, PRECISION)
    if part == parts - 1:
        tl.store(end + head.to(tl.int64) * d * m + cells, S, mask=inside)


@triton.jit
def gate_gradient(flow, into_end, OPERAND: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr):
    """sum_{s>=t} flow_s + sum_{s<t} into_end_s: what is read inside the tile across t, and what was written before t
    into the tile's end."""
    i = tl.arange(0, TILE)
    later, earlier = (i[:, None] <= i[None, :]).to(tl.float32), (i[:, None] > i[None, :]).to(tl.float32)
    return exact_product(later, flow, OPERAND) + product(earlier, into_end, OPERAND, PRECISION)


@triton.jit(do_not_specialize=SIZES)
def backward(
    q, k, v, f, z, flags, tile_states, dy, dends, dq, dk, dv, df, dz, dstart,
    length, heads, m, d, segment, sliced,
    F_WIDTH: tl.constexpr, Z: tl.constexpr, SHARE: tl.constexpr, FLAGS: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs and of the state at the start. `sliced` is the size of dq: where d is cut into slices,
    each writes its own share of dq, dk and df."""
    m, d = aligned(m, M_ALIGN), aligned(d, D_ALIGN)
    head, slice, row, mi, di, cells, inside = place(d, m, heads, length, BM, BD)
    part, parts, i, tiles = tl.program_id(1), tl.num_programs(1), tl.arange(0, TILE), tl.cdiv(length, TILE)
    mine = slice.to(tl.int64) * sliced
    dq, dk = dq + mine, dk + mine
    if F_WIDTH > 0:
        df = df + (mine if F_WIDTH > 1 else mine // m)
    dS = tl.load(dends + (head * parts + part).to(tl.int64) * d * m + cells, mask=inside, other=0.0)
    stop = tl.minimum(length, (part + 1) * segment)
    count = tl.cdiv(stop - part * segment, TILE)
    for n in tl.range(0, count, num_stages=STAGES):
        begin = part * segment + (count - 1 - n) * TILE
        here, there = (row + begin) * heads + head % heads, begin + i < length
        real, reset, quiet = read_flags(flags + row + begin, i, there, FLAGS)
        kept_at = tile_states + (head.to(tl.int64) * tiles + begin // TILE) * d * m + cells
        S = tl.load(kept_at, mask=inside, other=0.0)
        qt, kt = read(q + here * m, i, real, heads, mi, m), read(k + here * m, i, real, heads, mi, m)
        vt, dyt = read(v + here * d, i, real, heads, di, d), read(dy + here * d, i, real, heads, di, d)
        f_at = here * (m if F_WIDTH > 1 else 1)
        f_run, f_inv, f_root, closed, opened, f_slope = read_gate(
            f + f_at, i, real, quiet, heads, mi, m, F_WIDTH, OPERAND, TILE
        )
        z_run, z_inv, z_root, _, _, z_slope = read_gate(
            z + here * d, i, real, quiet, heads, di, d, Z * BD, OPERAND, TILE
        )
        key = kt
        if SHARE:
            key = kt * closed
        pairs = below(TILE, 1)
        q_in, k_in, v_in, dy_in = qt * f_run, key * f_inv, vt * z_inv, dyt * z_run
        q_from_start, dy_from_start = q_in * f_root[None, :], dy_in * z_root[None, :]
        k_to_end, v_to_end = k_in * f_root[None, :], v_in * z_root[None, :]
        q_in, k_in = rounded(q_in, OPERAND), rounded(k_in, OPERAND)
        v_in, dy_in = rounded(v_in, OPERAND), rounded(dy_in, OPERAND)
        kept = (z_root * z_root)[:, None] * (f_root * f_root)[None, :]
        if FLAGS:
            document, last = document_masks(reset, TILE)
            pairs = pairs & (document[:, None] == document[None, :])
            q_from_start = tl.where((document == 0)[:, None], q_from_start, 0.0)
            dy_from_start = tl.where((document == 0)[:, None], dy_from_start, 0.0)
            k_to_end = tl.where((document == last)[:, None], k_to_end, 0.0)
            v_to_end = tl.where((document == last)[:, None], v_to_end, 0.0)
            kept = tl.where(last == 0, kept, 0.0)
        own_pair = below(TILE, 0) & (below(TILE, 1) == 0)
        scores, dscores = (
            product(q_in, tl.trans(k_in), OPERAND, PRECISION),
            product(dy_in, tl.trans(v_in), OPERAND, PRECISION),
        )
        own, down = tl.where(own_pair, scores, 0.0).to(OPERAND), tl.where(own_pair, dscores, 0.0).to(OPERAND)
        scores, dscores = tl.where(pairs, scores, 0.0).to(OPERAND), tl.where(pairs, dscores, 0.0).to(OPERAND)
        dS_kept = dS * kept
        crossing = (S.to(tl.float32) * dS_kept).to(OPERAND)

        dq_in = product(dscores, k_in, OPERAND, PRECISION)
        dk_in = product(tl.trans(dscores), q_in, OPERAND, PRECISION)
        dq_start = product(dy_from_start, S, OPERAND, PRECISION)
        dk_end = product(v_to_end, dS, OPERAND, PRECISION)
        new_dq = f_run * (dq_in + product(down, k_in, OPERAND, PRECISION) + f_root[None, :] * dq_start)
        new_dk = f_inv * (dk_in + product(down, q_in, OPERAND, PRECISION) + f_root[None, :] * dk_end)
        write(dq + here * m, new_dq, i, there, heads, mi, m)
        write(dk + here * m, new_dk * closed if SHARE else new_dk, i, there, heads, mi, m)
        if F_WIDTH > 0:
            flow = q_in * dq_in - k_in * dk_in + q_from_start * dq_start
            through = product(tl.full([TILE, BD], 1.0, tl.float32), crossing, OPERAND, PRECISION)
            dlog = gate_gradient(flow, k_to_end * dk_end, OPERAND, PRECISION, TILE) + through
            columns = mi
            if F_WIDTH == 1:
                dlog, columns = tl.sum(dlog, 1)[:, None], tl.arange(0, 1)
            if FLAGS:
                dlog = tl.where(quiet[:, None], 0.0, dlog)
            if SHARE:
                dlog -= tl.sum(kt * new_dk, 1)[:, None] * opened
            write(df + f_at, dlog * f_slope, i, there, heads, columns, m if F_WIDTH > 1 else 1)

        dv_in = product(tl.trans(scores), dy_in, OPERAND, PRECISION)
        dv_end = product(k_to_end, tl.trans(dS), OPERAND, PRECISION)
        new_dv = z_inv * (dv_in + product(own, dy_in, OPERAND, PRECISION) + z_root[None, :] * dv_end)
        write(dv + here * d, new_dv, i, there, heads, di, d)
        if Z:
            inner = product(scores, v_in, OPERAND, PRECISION)
            outer = product(q_from_start, tl.trans(S), OPERAND, PRECISION)
            flow = dy_in * inner - v_in * dv_in + dy_from_start * outer
            through = product(tl.full([TILE, BM], 1.0, tl.float32), tl.trans(crossing), OPERAND, PRECISION)
            dlog = gate_gradient(flow, v_to_end * dv_end, OPERAND, PRECISION, TILE) + through
            if FLAGS:
                dlog = tl.where(quiet[:, None], 0.0, dlog)
            write(dz + here * d, dlog * z_slope, i, there, heads, di, d)
        dS = dS_kept + product(tl.trans(dy_from_start), q_from_start, OPERAND, PRECISION)
    if part == 0:
        tl.store(dstart + head.to(tl.int64) * d * m + cells, dS, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def segment_sums(
    a, b, f, z, flags, sums, kepts,
    length, heads, m, d, segment,
    F_WIDTH: tl.constexpr, Z: tl.constexpr, SHARE: tl.constexpr, FLAGS: tl.constexpr, BACK: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, M_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What each segment keeps of the state that goes through it, and what it adds: keys a and values b with what
    happens to them until its end; or (BACK) queries a and gradients b with what happened since its start. Nothing here
    is divided by a gate, so a tile is as long as one likes. The last segment's (BACK: the first's) is not needed."""
    m, d = aligned(m, M_ALIGN), aligned(d, D_ALIGN)
    head, _slice, row, mi, di, cells, inside = place(d, m, heads, length, BM, BD)
    part, parts, i = tl.program_id(1), tl.num_programs(1) + 1, tl.arange(0, TILE)
    part = part + 1 if BACK else part
    S = tl.zeros([BD, BM], tl.float32)
    f_whole, z_whole = tl.zeros([BM], tl.float32), tl.zeros([BD], tl.float32)
    through = 1.0
    others = (below(TILE, 0) if BACK else tl.trans(below(TILE, 1))).to(tl.float32)
    stop = tl.minimum(length, (part + 1) * segment)
    count = tl.cdiv(stop - part * segment, TILE)
    for n in tl.range(0, count, num_stages=STAGES):
        begin = part * segment + (count - 1 - n if BACK else n) * TILE
        here, there = (row + begin) * heads + head % heads, begin + i < stop
        real, reset, quiet = read_flags(flags + row + begin, i, there, FLAGS)
        at, bt = read(a + here * m, i, real, heads, mi, m), read(b + here * d, i, real, heads, di, d)
        f_kept, z_kept = tl.zeros([BM], tl.float32), tl.zeros([BD], tl.float32)
        if F_WIDTH > 0:
            columns, width = (mi, m) if F_WIDTH > 1 else (tl.arange(0, 1), 1)
            log, closed, _ = log2_gate(read(f + here * width, i, real, heads, columns, width), quiet, OPERAND)
            if F_WIDTH == 1:
                log = log + tl.zeros([TILE, BM], tl.float32)
            if SHARE and not BACK:
                at = at * closed
            at = at * tl.exp2(exact_product(others, log, OPERAND))
            f_kept = sum_of_tokens(log, OPERAND)
        if Z:
            log, _, _ = log2_gate(read(z + here * d, i, real, heads, di, d), quiet, OPERAND)
            bt = bt * tl.exp2(exact_product(others, log, OPERAND))
            z_kept = sum_of_tokens(log, OPERAND)
        kept = tl.exp2(z_kept)[:, None] * tl.exp2(f_kept)[None, :]
        if FLAGS:
            document, last = document_masks(reset, TILE)
            at = tl.where((document == (0 if BACK else last))[:, None], at, 0.0)
            kept = tl.where(last == 0, kept, 0.0)
            through = tl.where(last == 0, through, 0.0)
        f_whole += f_kept
        z_whole += z_kept
        S = S * kept + product(tl.trans(bt), at, OPERAND, PRECISION)
    cells += (head * parts + part).to(tl.int64) * d * m
    tl.store(sums + cells, S, mask=inside)
    tl.store(kepts + cells, through * tl.exp2(z_whole)[:, None] * tl.exp2(f_whole)[None, :], mask=inside)


@triton.jit(do_not_specialize=SIZES)
def scan_segments(boundary, sums, kepts, states, parts, size, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """The state at each segment's start, from the first one's; or (BACK) its gradient at each segment's end, from the
    last one's. `size` numbers a state."""
    head = tl.program_id(0).to(tl.int64)
    cells = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cells < size
    S = tl.load(boundary + head * size + cells, mask=inside)
    for n in range(parts - 1):
        here = (head * parts + (parts - 1 - n if BACK else n)) * size + cells
        tl.store(states + here, S, mask=inside)
        S = S * tl.load(kepts + here, mask=inside) + tl.load(sums + here, mask=inside)
    tl.store(states + (head * parts + (0 if BACK else parts - 1)) * size + cells, S, mask=inside)
