"""Building blocks of the training kernels: loads and stores of tiles, gates, flags and matrix products.

Shapes in a program: tokens t [TILE]   q, k, f [TILE,BM]   v, z [TILE,BD]   S [BD,BM]
BM and BD are m and d (or one slice of d) padded to a power of two, at least 16.
A tensor [B,T,H,w] is contiguous: element c of token t of head h is at ((b*T + t)*H + h)*w + c.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.rules.base import MIN_GATE_LOGIT

MIN_LOGIT = tl.constexpr(MIN_GATE_LOGIT)
# Arguments that change from call to call. Triton would otherwise compile a kernel again for values that are 1 or a
# multiple of 16.
SIZES = ["length", "heads", "segment_length", "slice_stride", "segments", "size", "m", "d"]
LOG2_E = tl.constexpr(1.4426950408889634)
# Below this, log(1 + u) is computed by its series. A gate near 1 has a tiny u, and 1 + u would round away how much the
# gate forgets. In bfloat16 this is not needed: the logit itself is known less precisely.
SERIES_BELOW = tl.constexpr(1 / 64)
PAD = tl.constexpr(1)
RESET = tl.constexpr(2)
# Triton's interpreter multiplies bfloat16 values as if their bits were integers, and truncates where a GPU rounds.
# It multiplies tf32 as float32. In the interpreter operands are therefore rounded by hand and multiplied in float32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to_operand(x, OPERAND: tl.constexpr):
    """Round x to the precision of a matmul operand, still as float32.

    On the bits: a conversion to bfloat16 and back is slower.
    """
    if OPERAND == tl.bfloat16:  # noqa: SIM300
        x = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def round_to_product(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Round x to the precision in which products multiply it: that of the operand, or tf32. Still as float32.

    NaN stays NaN: a GPU's own has all bits set but the sign, and would become a zero.
    """
    x = round_to_operand(x, OPERAND)
    if OPERAND == tl.float32 and PRECISION == "tf32":  # noqa: SIM300
        rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x


@triton.jit
def cast_rounded(x, TYPE: tl.constexpr):
    """Convert x to TYPE, with rounding to nearest in the interpreter too."""
    if INTERPRETED:
        x = round_to_operand(x, TYPE)
    return x.to(TYPE)


@triton.jit
def assume_multiple(n, ALIGN: tl.constexpr):
    """n, which is a multiple of ALIGN, in a form from which the compiler can see it.

    It then knows the alignment of rows of n elements and uses wide loads.
    """
    return n // ALIGN * ALIGN


@triton.jit
def locate_program(rows, m, heads, length, BM: tl.constexpr, BD: tl.constexpr):
    """Find what this program works on: program_id(0) counts heads, and slices of BD state rows within a head.

    Returns the head (over batch and heads), the slice, the index of the first token of the head's sequence, the state
    columns mi [BM] and rows di [BD], the offsets [BD,BM] of the slice within one state, and the mask [BD,BM] of those
    that exist (BM and BD are padded).
    """
    slices = tl.cdiv(rows, BD)
    head, slice = tl.program_id(0) // slices, tl.program_id(0) % slices
    mi, di = tl.arange(0, BM), slice * BD + tl.arange(0, BD)
    in_state = (di < rows)[:, None] & (mi < m)[None, :]
    return head, slice, (head // heads).to(tl.int64) * length, mi, di, di[:, None] * m + mi[None, :], in_state


@triton.jit
def load_tile(x, i, is_real, heads, columns, width):
    """Load [TILE,columns] as float32; x points to the first token of the tile, in this head.

    Padding tokens, tokens beyond the end and columns beyond `width` are 0: a zero key adds nothing to the state.
    """
    in_range = is_real[:, None] & (columns < width)[None, :]
    return tl.load(x + i[:, None] * (heads * width) + columns[None, :], mask=in_range, other=0.0).to(tl.float32)


@triton.jit
def store_tile(x, value, i, in_range, heads, columns, width):
    """Store [TILE,columns] in the dtype of x; x points to the first token of the tile, in this head.

    Padding tokens are stored too, since outputs are allocated empty: only tokens beyond the end are skipped.
    """
    in_range = in_range[:, None] & (columns < width)[None, :]
    tl.store(
        x + i[:, None] * (heads * width) + columns[None, :], cast_rounded(value, x.dtype.element_ty), mask=in_range
    )


@triton.jit
def load_flags(flags, i, in_range, HAS_FLAGS: tl.constexpr):
    """Masks [TILE]: real tokens, first tokens of a document, and tokens whose gates count as 1.

    A gate counts as 1 for padding (the state must pass unchanged) and at a document start (the state is dropped there
    by masks instead). HAS_FLAGS is False without a mask and resets: nothing is loaded then.
    """
    is_real = in_range
    reset = i < 0
    if HAS_FLAGS:
        flag = tl.load(flags + i, mask=in_range, other=PAD)
        reset = in_range & ((flag & RESET) != 0)
        is_real = in_range & ((flag & PAD) == 0)
    return is_real, reset, reset | (is_real == 0)


@triton.jit
def approx(NAME: tl.constexpr, x):
    """log2 or the reciprocal in one instruction, with a relative error of about 2^-22."""
    if INTERPRETED:
        return tl.log2(x) if NAME == "lg2" else 1 / x
    return tl.inline_asm_elementwise(NAME + ".approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_gate(logit, gate_is_one, OPERAND: tl.constexpr):
    """log2 of sigmoid(logit), one minus the gate, and the gate, from u = exp(-logit).

    The logit is clamped at MIN_LOGIT: at smaller gates the cumulative products of a tile would leave float32's range.
    NaN logits stay NaN instead of being hidden by the clamp.
    """
    u = tl.exp2(tl.maximum(logit, MIN_LOGIT, propagate_nan=tl.PropagateNan.ALL) * -LOG2_E)
    log = approx("lg2", 1 + u)
    if OPERAND == tl.float32:  # noqa: SIM300
        log = tl.where(u < SERIES_BELOW, u * (LOG2_E - u * (LOG2_E / 2 - u * (LOG2_E / 3))), log)
    gate = approx("rcp", 1 + u)
    return tl.where(gate_is_one[:, None], 0.0, -log), u * gate, gate


@triton.jit
def sum_over_tokens(log, OPERAND: tl.constexpr):
    """Sum a tile [TILE,W] over its tokens, -> [W].

    As a product with ones, like all sums over time here (see cumulative_products). All rows of the result are equal;
    max takes one of them.
    """
    return tl.max(matmul_exact(tl.full([16, log.shape[0]], 1.0, tl.float32), log, OPERAND), 0)


@triton.jit
def cumulative_products(log, OPERAND: tl.constexpr, TILE: tl.constexpr):
    """Scaled cumulative products of a tile's gates from their log2 [TILE,W].

    Returns F_t / sqrt(F_end) and its inverse, [TILE,W], and sqrt(F_end) [W]. The factor sqrt(F_end) is the reference
    point: relative to it the products of 16 gates at the floor stay within e^80, however the gates are spread over the
    tile, and e^88 is the largest float32. Relative to the tile's start they would reach e^160.

    The cumulative sum of logs is a product with a constant matrix, which costs less here than a scan: +1/2 for tokens
    up to t and -1/2 for later ones is c_t - c_end / 2.
    """
    i = tl.arange(0, TILE)
    total = matmul_exact(tl.where(i[:, None] >= i[None, :], 0.5, -0.5), log, OPERAND)
    half = tl.max(matmul_exact(tl.full([TILE, TILE], 0.5, tl.float32), log, OPERAND), 0)
    return tl.exp2(total), tl.exp2(-total), tl.exp2(half)


@triton.jit
def load_gate(
    x, i, is_real, gate_is_one, heads, columns, width, WIDTH: tl.constexpr, OPERAND: tl.constexpr, TILE: tl.constexpr
):
    """Load a gate of WIDTH elements per token (0: the rule has no such gate, all results are ones).

    Returns its cumulative products and their inverses [TILE,columns], the square root of the whole product [columns],
    one minus the gate, the gate, and d log gate / d logit. The last is one minus the gate, but 0 below the floor: a
    clamped logit has no effect.
    """
    running, inverse, one_minus_gate, gate, slope = ones(), ones(), ones(), ones(), ones()
    root = tl.full([1], 1.0, tl.float32)
    if WIDTH > 0:
        logit = load_tile(x, i, is_real, heads, columns if WIDTH > 1 else tl.arange(0, 1), width if WIDTH > 1 else 1)
        log, one_minus_gate, gate = log2_gate(logit, gate_is_one, OPERAND)
        log = tl.broadcast_to(log, [TILE, columns.shape[0]])
        running, inverse, root = cumulative_products(log, OPERAND, TILE)
        slope = tl.where(logit < MIN_LOGIT, 0.0, one_minus_gate)
    return running, inverse, root, one_minus_gate, gate, slope


@triton.jit
def ones():
    """A broadcastable 1: what stands for a gate that the rule does not have."""
    return tl.full([1, 1], 1.0, tl.float32)


@triton.jit
def document_ids(reset):
    """From the resets in a tile: the index of each token's document [TILE], and that of the last one.

    Document 0 is the one that started before the tile.
    """
    reset = reset.to(tl.int32)
    return tl.cumsum(reset, 0), tl.sum(reset, 0)


@triton.jit
def lower_triangle(TILE: tl.constexpr, AT_LEAST: tl.constexpr):
    """Mask [TILE,TILE] of the pairs (t, s) with t - s >= AT_LEAST."""
    i = tl.arange(0, TILE)
    return i[:, None] - i[None, :] >= AT_LEAST


@triton.jit
def matmul(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b on the tensor cores, with operands rounded to OPERAND and a float32 accumulator."""
    if INTERPRETED:
        a = round_to_product(a.to(tl.float32), OPERAND, PRECISION)
        b = round_to_product(b.to(tl.float32), OPERAND, PRECISION)
    else:
        a, b = a.to(OPERAND), b.to(OPERAND)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def matmul_exact(a, b, OPERAND: tl.constexpr):
    """a @ b to nearly float32's precision, for sums of log gates and of gate gradients.

    `a` must be exact in bfloat16 (entries 0, 1 or +-1/2). With bfloat16 operands b is split into two bfloat16 parts,
    which keeps 17 bits in two products; with float32 operands Triton's three-way tf32 split does the same.
    """
    if OPERAND == tl.bfloat16:  # noqa: SIM300
        high = (b.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        return matmul(a, high, OPERAND, "tf32") + matmul(a, b - high, OPERAND, "tf32")
    return matmul(a, b, OPERAND, "tf32x3")


@triton.jit
def gate_gradient(flow, into_end, OPERAND: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr):
    """sum_{s>=t} flow_s + sum_{s<t} into_end_s, [TILE,W]: the gradient of log gate t, except what passes through.

    `flow` is what reads inside the tile across t contribute, `into_end` what tokens before t wrote into the tile's end
    state. `flow` cancels, so its sum is taken to nearly float32's precision; `into_end` does not.
    """
    i = tl.arange(0, TILE)
    later, earlier = (i[:, None] <= i[None, :]).to(tl.float32), (i[:, None] > i[None, :]).to(tl.float32)
    return matmul_exact(later, flow, OPERAND) + matmul(earlier, into_end, OPERAND, PRECISION)


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """With programmatic dependent launch: wait for the previous kernel, then let the next one start.

    Everything before this call may read only what the previous kernel does not write, such as weights. The order
    matters: because each kernel waits before it releases the next, anything written two kernels ago is complete.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
