"""What the kernels are made of: reading tiles of tokens, gates and their running products, flags.

Shapes in a program: tokens t [TILE]   q, k, f [TILE,BM]   v, z [TILE,BD]   S [BD,BM], BM and BD padded sizes
A tensor [B,T,H,w] is contiguous: number c of token t of head h is at ((b*T + t)*H + h)*w + c.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastweights.rules.base import MIN_GATE_LOGIT

FLOOR = tl.constexpr(MIN_GATE_LOGIT)
# Sizes that change from call to call, without a kernel compiled for each kind of number.
SIZES = ["length", "heads", "segment", "sliced", "parts", "size", "m", "d"]
LOG2_E = tl.constexpr(1.4426950408889634)
# Below this log(1 + u) is its series: 1 + u would round away what a slow gate forgets. (A bfloat16 logit that makes
# such a gate is known less well than that.)
SMALL = tl.constexpr(1 / 64)
PAD = tl.constexpr(1)
RESET = tl.constexpr(2)
# Triton's interpreter multiplies bfloat16 numbers as if their bits were integers, and cuts off where a GPU rounds.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, OPERAND: tl.constexpr):
    """x as a product will see it, still float32. On the bits, since converting to bfloat16 and back is slow."""
    if OPERAND == tl.bfloat16:  # noqa: SIM300
        x = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrowed(x, TYPE: tl.constexpr):
    """x as a number of this type, rounded in the interpreter too."""
    if INTERPRETED:
        x = rounded(x, TYPE)
    return x.to(TYPE)


@triton.jit
def aligned(n, ALIGN: tl.constexpr):
    """n, a multiple of ALIGN, in a form that tells so: rows of aligned width are read in one go."""
    return n // ALIGN * ALIGN


@triton.jit
def place(rows, m, heads, length, BM: tl.constexpr, BD: tl.constexpr):
    """Which head and slice of the state's rows a program has, where the head's sequence begins, and its numbers of the
    state: columns, rows, offsets and which of them there are."""
    slices = tl.cdiv(rows, BD)
    head, slice = tl.program_id(0) // slices, tl.program_id(0) % slices
    mi, di = tl.arange(0, BM), slice * BD + tl.arange(0, BD)
    inside = (di < rows)[:, None] & (mi < m)[None, :]
    return head, slice, (head // heads).to(tl.int64) * length, mi, di, di[:, None] * m + mi[None, :], inside


@triton.jit
def read(x, i, real, heads, columns, width):
    """Numbers of some tokens in float32; zeros where there is no token or no column. x points to token i = 0."""
    there = real[:, None] & (columns < width)[None, :]
    return tl.load(x + i[:, None] * (heads * width) + columns[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def write(x, value, i, there, heads, columns, width):
    there = there[:, None] & (columns < width)[None, :]
    tl.store(x + i[:, None] * (heads * width) + columns[None, :], narrowed(value, x.dtype.element_ty), mask=there)


@triton.jit
def read_flags(flags, i, there, FLAGS: tl.constexpr):
    """Which tokens are real, which begin a document, and which gates count as 1 (no token, or nothing to forget)."""
    real = there
    reset = i < 0
    if FLAGS:
        flag = tl.load(flags + i, mask=there, other=PAD)
        reset = there & ((flag & RESET) != 0)
        real = there & ((flag & PAD) == 0)
    return real, reset, reset | (real == 0)


@triton.jit
def fast(NAME: tl.constexpr, x):
    """log2 or the reciprocal in one instruction, within 2^-22."""
    if INTERPRETED:
        return tl.log2(x) if NAME == "lg2" else 1 / x
    return tl.inline_asm_elementwise(NAME + ".approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_gate(logit, quiet, OPERAND: tl.constexpr):
    """log2 of a gate, one minus the gate, and the gate."""
    u = tl.exp2(tl.maximum(logit, FLOOR, propagate_nan=tl.PropagateNan.ALL) * -LOG2_E)
    log = fast("lg2", 1 + u)
    if OPERAND == tl.float32:  # noqa: SIM300
        log = tl.where(u < SMALL, u * (LOG2_E - u * (LOG2_E / 2 - u * (LOG2_E / 3))), log)
    gate = fast("rcp", 1 + u)
    return tl.where(quiet[:, None], 0.0, -log), u * gate, gate


@triton.jit
def sum_of_tokens(log, OPERAND: tl.constexpr):
    """Sums [W] of a tile [TILE,W] over its tokens: as a product, whose rows are all alike."""
    return tl.max(exact_product(tl.full([16, log.shape[0]], 1.0, tl.float32), log, OPERAND), 0)


@triton.jit
def running_products(log, OPERAND: tl.constexpr, TILE: tl.constexpr):
    """Running products [TILE,W] of a tile's gates, divided by the root of their product so that they stay within e^80,
    their inverses, and that root [W]. Sums over time are products with a constant matrix, which on this
    hardware cost less than a scan."""
    i = tl.arange(0, TILE)
    total = exact_product(tl.where(i[:, None] >= i[None, :], 0.5, -0.5), log, OPERAND)
    half = tl.max(exact_product(tl.full([TILE, TILE], 0.5, tl.float32), log, OPERAND), 0)
    return tl.exp2(total), tl.exp2(-total), tl.exp2(half)


@triton.jit
def document_masks(reset, TILE: tl.constexpr):
    """From the resets in a tile: the number of each token's document [TILE] and of the last one."""
    reset = reset.to(tl.int32)
    return tl.cumsum(reset, 0), tl.sum(reset, 0)


@triton.jit
def below(TILE: tl.constexpr, AT_LEAST: tl.constexpr):
    """Pairs (t, s) with t - s >= AT_LEAST."""
    i = tl.arange(0, TILE)
    return i[:, None] - i[None, :] >= AT_LEAST


@triton.jit
def product(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    if INTERPRETED:
        a, b = rounded(a.to(tl.float32), OPERAND), rounded(b.to(tl.float32), OPERAND)
    else:
        a, b = a.to(OPERAND), b.to(OPERAND)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def exact_product(a, b, OPERAND: tl.constexpr):
    """a @ b to nearly float32's precision, for an `a` that is exact in bfloat16 (where that is the operands' type)."""
    if OPERAND == tl.bfloat16:  # noqa: SIM300
        high = (b.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
        return product(a, high, OPERAND, "tf32") + product(a, b - high, OPERAND, "tf32")
    return product(a, b, OPERAND, "tf32x3")


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one, then let the next one start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
