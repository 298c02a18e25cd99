"""Triton kernel of a linear layer fused with the norm, activation and residual around it, for a decoding step.

Shapes: x [B,K], rows x_stride apart   weight [N,K]   bias, weight_sums [N]   residual, out [B,N]
        gated: weight [2N,K], bias and weight_sums [2N]; each gate row stands before the row that it multiplies
        norm_sums [parts,B], or [2,parts,B] for a layer norm: sums of squares, then sums of elements

OVERLAP is programmatic dependent launch: a kernel starts while the previous one still runs, and loads what that one
does not write (weights). Each kernel waits before it lets the next one start, so whatever was written two kernels ago
is complete. Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.primitives import cast_rounded, matmul, wait_for_previous_kernel

# Partial sums of a norm that stay in registers while the products are computed.
PARTS_AT_ONCE = tl.constexpr(64)


@triton.jit
def _prefetch_to_l2(rows, there, begin, end):
    """Prefetch elements `begin` to `end` of these rows into the L2 cache, one instruction per line of 128 bytes."""
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
def _reduce_split_k(acc, sums, arrivals, tile, part, SPLIT: tl.constexpr):
    """Add the partial sums of a tile from its SPLIT programs.

    Returns the sum and True in the last program to arrive; in the others the result is unused. The last program adds
    the parts in their order, not in the order of arrival, so the result does not depend on timing. It resets the
    counter for the next kernel.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums += tile * (SPLIT * ROWS * COLUMNS)
    tl.store(sums + part * (ROWS * COLUMNS) + at, acc)
    # One thread announces the arrival, so all threads must have stored by then. acq_rel makes the stores of the other
    # programs visible to the last one, and .cg reads them from L2, past this multiprocessor's own L1 cache.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        acc = tl.zeros_like(acc)
        for other in tl.static_range(SPLIT):
            acc += tl.load(sums + other * (ROWS * COLUMNS) + at, cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    return acc, last


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    """Apply the activation; gelu_tanh uses x * sigmoid(2 y) = x (1 + tanh(y)) / 2."""
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
def _apply_norm(acc, mean, scale, weight_sums, bias, at, inside, NORM: tl.constexpr, BIAS: tl.constexpr):
    """W norm(x) + bias from (W g) x: mean and scale of the norm are applied after the product.

    Since (W g) (x - mean) = (W g) x - mean * (row sums of W g), the product does not have to wait for the norm's sums.
    """
    if NORM == "layer":
        acc -= mean * tl.load(weight_sums + at, inside, 0.0)[None, :]
    if NORM != "none":
        acc *= scale
    if BIAS:
        acc += tl.load(bias + at, inside, 0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _load_parts(parts, row, rows, PARTS: tl.constexpr):
    """Load the partial sums [ROWS,.] of each row. Up to PARTS_AT_ONCE they are not added here: that would wait for the
    loads before the products start.
    """
    WIDTH: tl.constexpr = min(triton.next_power_of_2(PARTS), PARTS_AT_ONCE)
    for start in tl.static_range(0, PARTS, WIDTH):
        part = start + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (part < PARTS)[None, :]
        read = tl.load(parts + part[None, :] * rows + row[:, None], inside, 0.0)
        if start == 0:
            total = read
        else:
            total += read
    return total


@triton.jit
def linear_kernel(
    x,
    weight,
    weight_sums,
    bias,
    residual,
    out,
    sums,
    arrivals,
    norm_sums,
    rows,
    n,
    k,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NORM: tl.constexpr,
    NORM_PARTS: tl.constexpr,
    WRITE_SUMS_FOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """out = residual + activation(weight norm(x) + bias); the norm's own weight is already part of `weight`.

    Grid: (row tiles, column tiles, SPLIT); for one row (column tiles,). Row tiles of the same weights are neighbors,
    so weights that exceed the L2 cache are still read from memory once. A program computes a tile [ROWS,COLUMNS] of
    out, with float32 accumulators.

    ROWS = 1: a sum of products without tensor cores, with BLOCK_K >= k, so the weights are loaded whole, before the
    wait. SPLIT > 1: SPLIT programs share the inner dimension of a tile (only without a norm); the last one to arrive
    finishes it. NORM_PARTS: number of partial sums of the norm that the previous layer left for the rows of x; 0: they
    are computed here. WRITE_SUMS_FOR: the following norm ("rms", "layer") for which this layer leaves such partial
    sums, one per column tile, of the values as they are stored. PREFETCH: request the weights into L2 before the wait,
    since the pipelined loop cannot start before it.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    row_block = tl.program_id(1 if ROWS == 1 else 0)
    column_block = tl.program_id(0 if ROWS == 1 else 1)
    row = row_block * ROWS + tl.arange(0, ROWS)
    col = column_block * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, BLOCK_K)
    at_out = row.to(tl.int64)[:, None] * n + col[None, :]
    finished_rows = rows
    inside_out = (row < rows)[:, None] & (col < n)[None, :]
    if ROWS == 1:
        inside = i < k
        there = col < n
        weight_row = col * HALVES
        weight_rows = weight + weight_row.to(tl.int64) * k
        tile = there[:, None] & inside[None, :]
        w = tl.load(weight_rows[:, None] + i[None, :], tile, 0.0).to(tl.float32)
        if GATED:
            w2 = tl.load((weight_rows + k)[:, None] + i[None, :], tile, 0.0).to(tl.float32)
        wait_for_previous_kernel(OVERLAP)
        values = tl.load(x + row_block * x_stride + i, inside, 0.0).to(tl.float32)
        total = tl.sum(values, 0)
        squares = tl.sum(values * values, 0)
        acc = tl.sum(w * values[None, :], 1)[None, :]
        if GATED:
            acc2 = tl.sum(w2 * values[None, :], 1)[None, :]
    else:
        WIDE: tl.constexpr = HALVES * COLUMNS
        weight_row = column_block * WIDE + tl.arange(0, WIDE)
        there = weight_row < HALVES * n
        weight_rows = weight + weight_row.to(tl.int64) * k
        begin = 0
        end = k
        if SPLIT > 1:
            share = tl.cdiv(k, SPLIT * BLOCK_K) * BLOCK_K
            begin = tl.program_id(2) * share
            end = tl.minimum(k, begin + share)
        if PREFETCH:
            _prefetch_to_l2(weight_rows, there, begin, end)
        wait_for_previous_kernel(OVERLAP)
        if RESIDUAL:
            residual_tile = tl.load(residual + at_out, inside_out, 0.0)
        acc = tl.zeros([ROWS, WIDE], tl.float32)
        # The tensor cores read a tile of x from shared memory while the loop continues. A tile that only they read has
        # one more buffer in Triton. If it were read in any other way too, the next load could overwrite what they are
        # still reading. So a norm's sums are products as well: squares are the diagonal of x x^T, sums are x times
        # ones.
        TENSOR: tl.constexpr = PRECISION != "ieee"
        SUMS: tl.constexpr = NORM if NORM_PARTS == 0 else "none"
        sum_x = tl.zeros([ROWS, 16 if TENSOR else BLOCK_K], tl.float32)
        sum_xx = tl.zeros([ROWS, ROWS if TENSOR else BLOCK_K], tl.float32)
        if NORM_PARTS > 0:
            sum_xx = _load_parts(norm_sums, row, rows, NORM_PARTS)
            if NORM == "layer":
                sum_x = _load_parts(norm_sums + NORM_PARTS * rows, row, rows, NORM_PARTS)
        for start in range(begin, end, BLOCK_K):
            at = start + i
            values = tl.load(x + row[:, None] * x_stride + at[None, :], (row < rows)[:, None] & (at < k)[None, :], 0.0)
            if SUMS != "none":
                if TENSOR:
                    sum_xx += matmul(values, tl.trans(values), OPERAND, PRECISION)
                else:
                    sum_xx += values.to(tl.float32) * values.to(tl.float32)
            if SUMS == "layer":
                if TENSOR:
                    sum_x += matmul(values, tl.full([BLOCK_K, 16], 1.0, tl.float32), OPERAND, PRECISION)
                else:
                    sum_x += values.to(tl.float32)
            tile = there[None, :] & (at < k)[:, None]
            acc += matmul(values, tl.load(weight_rows[None, :] + at[:, None], tile, 0.0), OPERAND, PRECISION)
        if TENSOR and SUMS != "none":
            j = tl.arange(0, ROWS)
            sum_xx = tl.where(j[:, None] == j[None, :], sum_xx, 0.0)
            sum_x *= 1 / 16  # 16 equal columns, the least that tensor cores multiply
        total = tl.sum(sum_x, 1)[:, None]
        squares = tl.sum(sum_xx, 1)[:, None]
        if SPLIT > 1:
            slot = column_block * tl.num_programs(0) + row_block
            acc, last = _reduce_split_k(acc, sums, arrivals, slot, tl.program_id(2), SPLIT)
            finished_rows = tl.where(last, rows, 0)
            inside_out = inside_out & (row < finished_rows)[:, None]
    mean = total / k
    scale = squares / k
    if NORM == "layer":
        scale = tl.maximum(scale - mean * mean, 0.0)  # rounding may leave a constant row below zero
    if NORM != "none":
        scale = tl.rsqrt(scale + eps)
    acc = _apply_norm(acc, mean, scale, weight_sums, bias, weight_row, there, NORM, BIAS)
    if GATED:
        if ROWS == 1:
            acc2 = _apply_norm(acc2, mean, scale, weight_sums, bias, weight_row + 1, there, NORM, BIAS)
        else:
            acc, acc2 = tl.split(tl.reshape(acc, [ROWS, COLUMNS, 2]))
    acc = _activate(acc, ACTIVATION)
    if GATED:
        acc *= acc2
    if RESIDUAL:
        if ROWS == 1:
            residual_tile = tl.load(residual + at_out, inside_out, 0.0)
        acc += residual_tile.to(tl.float32)
    acc = cast_rounded(acc, out.dtype.element_ty)
    tl.store(out + at_out, acc, inside_out)
    if WRITE_SUMS_FOR != "none":
        # Of the rounded values: they are what the next layer reads.
        stored = tl.where(inside_out, acc.to(tl.float32), 0.0)
        own_part = norm_sums + column_block * rows + row
        tl.store(own_part, tl.sum(stored * stored, 1), row < finished_rows)
        if WRITE_SUMS_FOR == "layer":
            tl.store(own_part + tl.num_programs(1) * rows, tl.sum(stored, 1), row < finished_rows)
