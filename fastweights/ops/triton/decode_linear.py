"""The Triton kernel of a linear layer with what stands around it, in a decoding step.

Shapes: x [B,K]   weight [N,K]   bias, column [N] (gated: [N*2,K] and [N*2], each gate before what it gates)
        residual, out [B,N]   norm_sums [parts,B], or [2,parts,B]: of squares, and of numbers

OVERLAP lets a kernel start, and load what the one before it does not write, while that one still runs. Each kernel
waits before it lets the next one start, so whatever was written two kernels ago is there at the start.
Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.parts import narrowed, product, take_turn

# Parts of a norm's sums that wait in registers while the products are made.
PARTS_AT_ONCE = tl.constexpr(64)


@triton.jit
def _bring_near(rows, there, begin, end):
    """Numbers `begin` to `end` of these rows on their way into the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    for start in range(begin, end, 8 * LINE):
        at = start + tl.arange(0, 8) * LINE
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [(rows[:, None] + at[None, :]).to(tl.int64), (there[:, None] & (at < end)[None, :]).to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _gather(acc, sums, arrived, tile, part, SPLIT: tl.constexpr):
    """The sum of a tile's parts, always in the same order, and whether it is here: with the last program to arrive."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums += tile * (SPLIT * ROWS * COLUMNS)
    tl.store(sums + part * (ROWS * COLUMNS) + at, acc)
    tl.debug_barrier()  # one thread announces what all have stored
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        acc = tl.zeros_like(acc)
        for other in tl.static_range(SPLIT):
            acc += tl.load(sums + other * (ROWS * COLUMNS) + at, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return acc, last


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
def _read_parts(parts, row, rows, PARTS: tl.constexpr):
    """Parts [ROWS,.] of each row's sum. Up to PARTS_AT_ONCE nothing is added here: that would wait for the loads."""
    WIDTH: tl.constexpr = min(triton.next_power_of_2(PARTS), PARTS_AT_ONCE)
    for start in tl.static_range(0, PARTS, WIDTH):
        part = start + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (part < PARTS)[None, :]
        read = tl.load(parts + part[None, :] * rows + row[:, None], inside, 0.0)
        if start == 0:
            found = read
        else:
            found += read
    return found


@triton.jit
def linear_kernel(
    x,
    weight,
    column,
    bias,
    residual,
    out,
    sums,
    arrived,
    norm_sums,
    rows,
    n,
    k,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    GIVEN: tl.constexpr,
    HANDS_ON: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """out = residual + activation(weight norm(x) + bias); the norm's own weight is part of `weight`. ROWS = 1: a
    product of one row with BLOCK_K >= k and without tensor cores, whose weights are on their way before the row is
    known. SPLIT programs share the inner dimension of a tile (without a norm), and the last one finishes it. Programs
    of the same weights are neighbours, so that these are read once where they are more than the L2 cache holds.

    GIVEN: how many parts of a norm's sums over the rows of x there are; 0: they are computed here. HANDS_ON: the norm
    ("rms", "layer") that such parts are left for, one by each tile of columns, of the numbers as they are stored."""
    HALVES: tl.constexpr = 2 if GATED else 1
    along = tl.program_id(1 if ROWS == 1 else 0)
    across = tl.program_id(0 if ROWS == 1 else 1)
    row = along * ROWS + tl.arange(0, ROWS)
    col = across * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, BLOCK_K)
    at_out = row.to(tl.int64)[:, None] * n + col[None, :]
    finished = rows
    inside_out = (row < rows)[:, None] & (col < n)[None, :]
    if ROWS == 1:
        inside = i < k
        there = col < n
        weight_row = col * HALVES
        first = weight + weight_row.to(tl.int64) * k
        tile = there[:, None] & inside[None, :]
        w = tl.load(first[:, None] + i[None, :], tile, 0.0).to(tl.float32)
        if GATED:
            w2 = tl.load((first + k)[:, None] + i[None, :], tile, 0.0).to(tl.float32)
        take_turn(OVERLAP)
        values = tl.load(x + along * k + i, inside, 0.0).to(tl.float32)
        total = tl.sum(values, 0)
        squares = tl.sum(values * values, 0)
        acc = tl.sum(w * values[None, :], 1)[None, :]
        if GATED:
            acc2 = tl.sum(w2 * values[None, :], 1)[None, :]
    else:
        WIDE: tl.constexpr = HALVES * COLUMNS
        weight_row = across * WIDE + tl.arange(0, WIDE)
        there = weight_row < HALVES * n
        first = weight + weight_row.to(tl.int64) * k
        begin = 0
        end = k
        if SPLIT > 1:
            share = tl.cdiv(k, SPLIT * BLOCK_K) * BLOCK_K
            begin = tl.program_id(2) * share
            end = tl.minimum(k, begin + share)
        if PREFETCH:
            _bring_near(first, there, begin, end)
        take_turn(OVERLAP)
        if RESIDUAL:
            before = tl.load(residual + at_out, inside_out, 0.0)
        acc = tl.zeros([ROWS, WIDE], tl.float32)
        # The tensor cores read a tile of x from shared memory while the loop goes on. Triton keeps a buffer more for a
        # tile that only they read; were it read in any other way too, the next load could overwrite what they still
        # read. So a norm's sums are products as well: squares are the diagonal of x x^T, sums are x times ones.
        TENSOR: tl.constexpr = PRECISION != "ieee"
        SUMS: tl.constexpr = NORM if GIVEN == 0 else "none"
        sum_x = tl.zeros([ROWS, 16 if TENSOR else BLOCK_K], tl.float32)
        sum_xx = tl.zeros([ROWS, ROWS if TENSOR else BLOCK_K], tl.float32)
        if GIVEN > 0:
            sum_xx = _read_parts(norm_sums, row, rows, GIVEN)
            if NORM == "layer":
                sum_x = _read_parts(norm_sums + GIVEN * rows, row, rows, GIVEN)
        for start in range(begin, end, BLOCK_K):
            at = start + i
            values = tl.load(x + row[:, None] * k + at[None, :], (row < rows)[:, None] & (at < k)[None, :], 0.0)
            if SUMS != "none":
                if TENSOR:
                    sum_xx += product(values, tl.trans(values), OPERAND, PRECISION)
                else:
                    sum_xx += values.to(tl.float32) * values.to(tl.float32)
            if SUMS == "layer":
                if TENSOR:
                    sum_x += product(values, tl.full([BLOCK_K, 16], 1.0, values.dtype), OPERAND, PRECISION)
                else:
                    sum_x += values.to(tl.float32)
            tile = there[None, :] & (at < k)[:, None]
            acc += product(values, tl.load(first[None, :] + at[:, None], tile, 0.0), OPERAND, PRECISION)
        if TENSOR and SUMS != "none":
            j = tl.arange(0, ROWS)
            sum_xx = tl.where(j[:, None] == j[None, :], sum_xx, 0.0)
            sum_x *= 1 / 16
        total = tl.sum(sum_x, 1)[:, None]
        squares = tl.sum(sum_xx, 1)[:, None]
        if SPLIT > 1:
            slot = across * tl.num_programs(0) + along
            acc, last = _gather(acc, sums, arrived, slot, tl.program_id(2), SPLIT)
            finished = tl.where(last, rows, 0)
            inside_out = inside_out & (row < finished)[:, None]
    mean = total / k
    deviation = squares / k
    if NORM == "layer":
        deviation = tl.maximum(deviation - mean * mean, 0.0)
    if NORM != "none":
        deviation = tl.rsqrt(deviation + eps)
    acc = _normed(acc, mean, deviation, column, bias, weight_row, there, NORM, BIAS)
    if GATED:
        if ROWS == 1:
            acc2 = _normed(acc2, mean, deviation, column, bias, weight_row + 1, there, NORM, BIAS)
        else:
            acc, acc2 = tl.split(tl.reshape(acc, [ROWS, COLUMNS, 2]))
    acc = _activate(acc, ACTIVATION)
    if GATED:
        acc *= acc2
    if RESIDUAL:
        if ROWS == 1:
            before = tl.load(residual + at_out, inside_out, 0.0)
        acc += before.to(tl.float32)
    acc = narrowed(acc, out.dtype.element_ty)
    tl.store(out + at_out, acc, inside_out)
    if HANDS_ON != "none":
        stored = tl.where(inside_out, acc.to(tl.float32), 0.0)
        own_part = norm_sums + across * rows + row
        tl.store(own_part, tl.sum(stored * stored, 1), row < finished)
        if HANDS_ON == "layer":
            tl.store(own_part + tl.num_programs(1) * rows, tl.sum(stored, 1), row < finished)
