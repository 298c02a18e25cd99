"""Triton kernels of softmax attention to a window, to the first tokens of a document (sinks), and within documents.

Shapes: q, y [B,T,H,d]   k, v [B,T,S,d]   first, end [B,T]   lse, delta [B,H,T], float32
H query heads share S key-value heads. A query t sees a key s if first[t] <= s <= t, and s is either among the last w
tokens or among the first n of the document: t - s < w or s - first[t] < n.

`first` never decreases along a row: the first query of a tile has the smallest. No mask of T x T exists; a program
walks over the tiles of keys that its queries can see, and the backward pass over the queries that can see its keys.
Nothing is summed by atomic operations, so that gradients are the same in every run.

Logits are kept in base 2, times log2(e). Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.ops.triton.primitives import LOG2_E, assume_multiple, cast_rounded, matmul

# Arguments for whose values Triton must not compile a kernel again.
SIZES = ["length", "window", "sinks", "d"]


@triton.jit
def load_rows(x, t, in_range, heads, di, d):
    """Load [rows,d] of one head; x points to token 0 of it. Missing rows and columns are 0."""
    mask = in_range[:, None] & (di < d)[None, :]
    return tl.load(x + t.to(tl.int64)[:, None] * (heads * d) + di[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x, value, t, in_range, heads, di, d):
    """Store [rows,d] of one head in the dtype of x."""
    mask = in_range[:, None] & (di < d)[None, :]
    tl.store(x + t.to(tl.int64)[:, None] * (heads * d) + di[None, :], cast_rounded(value, x.dtype.element_ty), mask)


@triton.jit
def capped_logits(products, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Logits in base 2 from products of queries and keys, and d logit / d product without the factor scale."""
    logits = products * scale
    slope = 1.0
    if HAS_SOFTCAP:
        share = 2 * tl.sigmoid(2 * logits / softcap) - 1  # tanh(logits / softcap)
        logits, slope = softcap * share, 1 - share * share
    return logits * LOG2_E, slope


@triton.jit
def is_visible(t, s, first, window, sinks, HAS_SINKS: tl.constexpr):
    """Whether queries t see keys s, for t, s and first (of the queries) in shapes that broadcast."""
    near = t - s < window
    if HAS_SINKS:
        near = near | (s - first < sinks)
    return near & (s <= t) & (s >= first)


@triton.jit
def load_first(first, t, in_range, HAS_DOCUMENTS: tl.constexpr):
    """The first token of each query's document; 0 where rows are one document."""
    found = t * 0
    if HAS_DOCUMENTS:
        found = tl.load(first + t, mask=in_range, other=2147483647)
    return found


@triton.jit
def softmax_step(
    top, total, y, queries, k, v, t, s, at_most, first, window, sinks, scale, softcap, states, di, d,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys s < at_most to a running softmax: its largest logits, its sum, and y before the division."""
    in_range = s < at_most
    keys, values = load_rows(k, s, in_range, states, di, d), load_rows(v, s, in_range, states, di, d)
    logits, _ = capped_logits(matmul(queries, tl.trans(keys), OPERAND, PRECISION), scale, softcap, HAS_SOFTCAP)
    visible = is_visible(t[:, None], s[None, :], first[:, None], window, sinks, HAS_SINKS) & in_range[None, :]
    logits = tl.where(visible, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    # A row may see no key yet; without this, -inf - -inf would be NaN.
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights, decay = tl.exp2(logits - reference[:, None]), tl.exp2(top - reference)
    y = y * decay[:, None] + matmul(weights, values, OPERAND, PRECISION)
    return new_top, total * decay + tl.sum(weights, 1), y


@triton.jit(do_not_specialize=SIZES)
def forward(
    q, k, v, first, y, lse, length, window, sinks, d, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y, and the log-sum-exp of each query's logits for the backward pass. Grid: (tiles of queries, B*H)."""
    d = assume_multiple(d, D_ALIGN)
    STATES: tl.constexpr = HEADS // GROUP
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    start = tl.program_id(0) * BLOCK_T
    t, di = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    in_range = t < length
    q, y = q + (row * length * HEADS + head) * d, y + (row * length * HEADS + head) * d
    k, v = k + (row * length * STATES + head // GROUP) * d, v + (row * length * STATES + head // GROUP) * d
    starts = load_first(first + row * length, t, in_range, HAS_DOCUMENTS)
    earliest = tl.min(starts, 0)
    queries = load_rows(q, t, in_range, HEADS, di, d)
    top = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total, out = tl.zeros([BLOCK_T], tl.float32), tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    low = tl.maximum(tl.maximum(start - window + 1, 0), earliest)
    if HAS_SINKS:
        # Only the document of the first query can have sinks before all windows; others start in this tile.
        for near in tl.range(earliest, tl.minimum(earliest + sinks, low), BLOCK_S):
            s = near + tl.arange(0, BLOCK_S)
            top, total, out = softmax_step(
                top, total, out, queries, k, v, t, s, low, starts, window, sinks, scale, softcap, STATES, di, d,
                HAS_SINKS, HAS_SOFTCAP, OPERAND, PRECISION,
            )  # fmt: skip
    high = tl.minimum(start + BLOCK_T, length)
    for near in tl.range(low, high, BLOCK_S):
        s = near + tl.arange(0, BLOCK_S)
        top, total, out = softmax_step(
            top, total, out, queries, k, v, t, s, high, starts, window, sinks, scale, softcap, STATES, di, d,
            HAS_SINKS, HAS_SOFTCAP, OPERAND, PRECISION,
        )  # fmt: skip
    total = tl.where(in_range, total, 1.0)
    store_rows(y, out / total[:, None], t, in_range, HEADS, di, d)
    tl.store(lse + (row * HEADS + head) * length + t, top + tl.log2(total), in_range)


@triton.jit
def query_gradient_step(
    dq, queries, dy, lse, delta, k, v, t, s, at_most, first, window, sinks, scale, softcap, states, di, d,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what a tile of keys s < at_most contributes to the gradient of queries."""
    in_range = s < at_most
    keys, values = load_rows(k, s, in_range, states, di, d), load_rows(v, s, in_range, states, di, d)
    logits, slope = capped_logits(matmul(queries, tl.trans(keys), OPERAND, PRECISION), scale, softcap, HAS_SOFTCAP)
    visible = is_visible(t[:, None], s[None, :], first[:, None], window, sinks, HAS_SINKS) & in_range[None, :]
    weights = tl.where(visible, tl.exp2(logits - lse[:, None]), 0.0)
    dlogits = weights * (matmul(dy, tl.trans(values), OPERAND, PRECISION) - delta[:, None]) * slope
    return dq + matmul(dlogits, keys, OPERAND, PRECISION)


@triton.jit(do_not_specialize=SIZES)
def backward_queries(
    q, k, v, first, y, lse, dy, delta, dq, length, window, sinks, d, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, and delta = sum(y * dy) of each query for `backward_keys`. It walks as `forward` does."""
    d = assume_multiple(d, D_ALIGN)
    STATES: tl.constexpr = HEADS // GROUP
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    start = tl.program_id(0) * BLOCK_T
    t, di = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    in_range = t < length
    of_head, of_row = (row * length * HEADS + head) * d, (row * HEADS + head) * length
    k, v = k + (row * length * STATES + head // GROUP) * d, v + (row * length * STATES + head // GROUP) * d
    starts = load_first(first + row * length, t, in_range, HAS_DOCUMENTS)
    earliest = tl.min(starts, 0)
    queries, dys = load_rows(q + of_head, t, in_range, HEADS, di, d), load_rows(dy + of_head, t, in_range, HEADS, di, d)
    outputs = load_rows(y + of_head, t, in_range, HEADS, di, d)
    deltas = tl.sum(outputs.to(tl.float32) * dys.to(tl.float32), 1)
    tl.store(delta + of_row + t, deltas, in_range)
    sums = tl.load(lse + of_row + t, mask=in_range, other=0.0)
    gradient = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    low = tl.maximum(tl.maximum(start - window + 1, 0), earliest)
    if HAS_SINKS:
        for near in tl.range(earliest, tl.minimum(earliest + sinks, low), BLOCK_S):
            s = near + tl.arange(0, BLOCK_S)
            gradient = query_gradient_step(
                gradient, queries, dys, sums, deltas, k, v, t, s, low, starts, window, sinks, scale, softcap, STATES,
                di, d, HAS_SINKS, HAS_SOFTCAP, OPERAND, PRECISION,
            )  # fmt: skip
    high = tl.minimum(start + BLOCK_T, length)
    for near in tl.range(low, high, BLOCK_S):
        s = near + tl.arange(0, BLOCK_S)
        gradient = query_gradient_step(
            gradient, queries, dys, sums, deltas, k, v, t, s, high, starts, window, sinks, scale, softcap, STATES,
            di, d, HAS_SINKS, HAS_SOFTCAP, OPERAND, PRECISION,
        )  # fmt: skip
    store_rows(dq + of_head, gradient * scale, t, in_range, HEADS, di, d)


@triton.jit(do_not_specialize=SIZES)
def backward_keys(
    q, k, v, first, end, lse, dy, delta, dk, dv, length, window, sinks, d, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, D_ALIGN: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv. Grid: (tiles of keys, B*S). A program sums over all query heads of its key head.

    A tile with sinks is seen by the rest of their document, any other one by the next w - 1 tokens.
    """
    d = assume_multiple(d, D_ALIGN)
    STATES: tl.constexpr = HEADS // GROUP
    row, state = (tl.program_id(1) // STATES).to(tl.int64), tl.program_id(1) % STATES
    start = tl.program_id(0) * BLOCK_S
    s, di = start + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    in_range = s < length
    of_state = (row * length * STATES + state) * d
    keys, values = (
        load_rows(k + of_state, s, in_range, STATES, di, d),
        load_rows(v + of_state, s, in_range, STATES, di, d),
    )
    until = s * 0 + length
    if HAS_DOCUMENTS:
        until = tl.load(end + row * length + s, mask=in_range, other=0)
    if HAS_SINKS:
        is_sink = s - load_first(first + row * length, s, in_range, HAS_DOCUMENTS) < sinks
        until = tl.where(is_sink, until, tl.minimum(until, s + window))
    else:
        until = tl.minimum(until, s + window)
    high = tl.max(tl.where(in_range, until, 0), 0)
    d_keys, d_values = tl.zeros([BLOCK_S, BLOCK_D], tl.float32), tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for member in range(GROUP):
        head = state * GROUP + member
        of_head, of_row = (row * length * HEADS + head) * d, (row * HEADS + head) * length
        for near in tl.range(start, high, BLOCK_T):
            t = near + tl.arange(0, BLOCK_T)
            inside = t < high
            starts = load_first(first + row * length, t, inside, HAS_DOCUMENTS)
            queries = load_rows(q + of_head, t, inside, HEADS, di, d)
            dys = load_rows(dy + of_head, t, inside, HEADS, di, d)
            sums = tl.load(lse + of_row + t, mask=inside, other=0.0)
            deltas = tl.load(delta + of_row + t, mask=inside, other=0.0)
            products = matmul(keys, tl.trans(queries), OPERAND, PRECISION)
            logits, slope = capped_logits(products, scale, softcap, HAS_SOFTCAP)
            visible = is_visible(t[None, :], s[:, None], starts[None, :], window, sinks, HAS_SINKS)
            weights = tl.where(visible & inside[None, :], tl.exp2(logits - sums[None, :]), 0.0)
            d_values += matmul(weights, dys, OPERAND, PRECISION)
            dlogits = weights * (matmul(values, tl.trans(dys), OPERAND, PRECISION) - deltas[None, :]) * slope
            d_keys += matmul(dlogits, queries, OPERAND, PRECISION)
    store_rows(dk + of_state, d_keys * scale, s, in_range, STATES, di, d)
    store_rows(dv + of_state, d_values, s, in_range, STATES, di, d)
