"""Launches the kernels: what each rule's forward and backward pass are made of.

Shapes: q, k [B,T,H,m]   v, y [B,T,H,d]   gates f [B,T,H,m], z [B,T,H,d], g [B,T,H,1]   flags [B,T] int8
        state [B,H,d,m]   tile_states [B*H,tiles,d,m]: states at the tiles' starts, as the products round them
        inverses [B*H,tiles,16,16] and through [B*H,parts,d+m,m]: delta's solved tiles and segments (wy.py)
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastweights.ops.device import multiprocessors
from fastweights.ops.triton import tiled, wy
from fastweights.ops.triton.blocks import SCAN_BLOCK, SEGMENT_TILE, TILE, blocks_for
from fastweights.ops.triton.compile import collected, compile_together, launches_of

OPERANDS = {
    torch.bfloat16: (tl.bfloat16, "tf32"),
    torch.float16: (tl.float32, "tf32"),  # running products leave float16's range
    torch.float32: (tl.float32, "tf32x3"),
}
# Programs for each multiprocessor: these hide each other's waiting. The backward pass has fewer there at a time (it
# needs more registers), and more of them leave less of the chip idle at the end.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 3, 6


class Shape(NamedTuple):
    """All that decides how a call is launched."""

    rule: str
    batch: int
    length: int
    heads: int
    m: int
    d: int
    dtype: torch.dtype
    flags: bool
    device: torch.device


def shape_of(rule: str, q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None) -> Shape:
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    batch, length, heads, m = k.shape
    return Shape(rule, batch, length, heads, m, v.shape[-1], dtype, flags is not None, v.device)


class Plan:
    """Sizes and settings of one shape's kernels."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.rule = shape, shape.rule
        self.compiled: set[bool] = set()  # with and without a backward pass
        self.rows = shape.batch * shape.heads
        self.blocks = blocks_for(shape.rule, shape.m, shape.d, shape.dtype)
        self.tiles = triton.cdiv(shape.length, TILE)
        operand, precision = OPERANDS[shape.dtype]
        if self.rule == "delta":  # it takes differences of values and what is held; a small state holds little else
            operand = tl.float32
            precision = "tf32x3" if shape.dtype == torch.float32 or self.blocks.bm == 16 else "tf32"
        self.kinds: dict[str, Any] = {
            "FLAGS": shape.flags,
            "BM": self.blocks.bm,
            "BD": self.blocks.bd,
            "M_ALIGN": 16 if shape.m % 16 == 0 else 4 if shape.m % 4 == 0 else 1,
            "D_ALIGN": 16 if shape.d % 16 == 0 else 1,
            "OPERAND": operand,
            "PRECISION": precision,
        }
        if self.rule != "delta":
            width = {"decay": self.blocks.bm, "gated": 1, "add": 0}[self.rule]
            self.kinds |= {"F_WIDTH": width, "Z": self.rule == "decay", "SHARE": self.rule == "gated"}
        self.slices = triton.cdiv(shape.d, self.blocks.bd)
        self.parts, self.segment = self._split(FORWARD_PROGRAMS)
        self.back_parts, self.back_segment = self._split(BACKWARD_PROGRAMS)
        if self.rule == "delta":  # a segment's P is made once and serves both
            self.back_parts, self.back_segment = self.parts, self.segment

    def _split(self, programs: int) -> tuple[int, int]:
        """Time is cut into segments where the heads alone do not fill the chip."""
        wanted = programs * multiprocessors(self.shape.device) // (self.rows * self.slices)
        parts = max(1, min(wanted, triton.cdiv(self.shape.length, 4 * SEGMENT_TILE)))
        segment = triton.cdiv(triton.cdiv(self.shape.length, parts), SEGMENT_TILE) * SEGMENT_TILE
        return triton.cdiv(self.shape.length, segment), segment

    @property
    def state_dtype(self) -> torch.dtype:
        """Of the kept states: as the products read them."""
        return torch.bfloat16 if self.kinds["OPERAND"] == tl.bfloat16 else torch.float32

    def sizes(self, segment: int) -> tuple[int, ...]:
        return (*self.shape[2:6], segment)

    def saved_shapes(self, keep: bool) -> list[tuple[int, ...]]:
        """Of tile_states (kept for the backward pass alone), inverses and through, empty where there are none."""
        _, _, _, _, m, d, *_ = self.shape
        solved = self.rule == "delta"
        return [
            (self.rows if keep else 0, self.tiles, d, m),
            (self.rows if solved else 0, self.tiles, TILE, TILE),
            (self.rows if solved and self.parts > 1 else 0, self.parts, d + m, m),
        ]


plan_for = functools.lru_cache(maxsize=1024)(Plan)


_compiled: dict[tuple, Any] = {}


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
    """Launch a kernel: `args`, then what it is specialised for. Triton looks a compiled kernel up by everything it is
    given, for longer than a small one runs; one that was launched before with the like is found here instead."""
    launches = collected.get()
    if launches is not None:
        launches.append((kernel, grid, args, options))
        return
    kinds = tuple(x.dtype if isinstance(x, Tensor) else x < 2**31 for x in args)
    key = (kernel, args[0].device, kinds, *options.items())
    compiled = _compiled.get(key)
    aligned = _aligned(*args)  # it may have been compiled for that
    with torch.cuda.device_of(args[0]):
        if compiled is not None and aligned:
            compiled[(*grid, 1, 1)[:3]](*args, *(options[name] for name in kernel.arg_names[len(args) :]))
            return
        compiled = kernel[grid](*args, **options)
    if compiled is not None and aligned:  # the interpreter compiles nothing
        _compiled[key] = compiled


def _aligned(*args: Any) -> bool:
    return all(x.data_ptr() % 16 == 0 for x in args if isinstance(x, Tensor))


def forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    state: Tensor | None,
    keep: bool,
    wide: bool = False,
) -> tuple[Tensor, ...]:
    """y (wide: in float32), the state at the end, and (keep) tile_states, inverses and through."""
    if keep not in plan.compiled and _can_compile(v.device):
        plan.compiled.add(keep)
        if _aligned(q, k, v, *gates, flags, state):  # the stand-ins are
            _compile_ahead(plan, (q, k, v, gates, flags), state, keep, wide)
    shape = plan.shape
    float32: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    y = v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype)
    end = torch.empty(shape.batch, shape.heads, shape.d, shape.m, **float32)
    kept, solved, through = plan.saved_shapes(keep)
    tile_states = torch.empty(kept, dtype=plan.state_dtype, device=v.device)
    inverses, ends = torch.empty(solved, **float32), torch.empty(through, **float32)
    grid, sizes = (plan.rows * plan.slices, plan.parts), plan.sizes(plan.segment)
    options: dict[str, Any] = {"KEEP": keep, "TILE": TILE, **plan.kinds, **plan.blocks.forward.options}
    starts, delta = state, plan.rule == "delta"
    if delta:
        _solve(plan, k, gates[0], flags, inverses)
        options["OUTPUT"] = True
        if plan.parts > 1:
            slices = triton.cdiv(shape.d + shape.m, plan.blocks.bd)
            arguments = (q, k, v, *_there(q, *gates, flags), inverses, q, y, q, ends, *sizes)
            unread = options | {"OUTPUT": False, "KEEP": False, "START": False}
            run(wy.forward, (plan.rows * slices, plan.parts), arguments, **unread)
            starts = _scan_delta(plan, False, _start(end, state), ends, ends)
    elif plan.parts > 1:
        starts = _segments(plan, False, plan.parts, plan.segment, k, v, gates, flags, _start(end, state))
    kernel, inputs = (wy.forward, [*gates, flags, inverses]) if delta else (tiled.forward, [*_pair(gates), flags])
    arguments = (q, k, v, *_there(q, *inputs, starts), y, *_there(q, tile_states), end, *sizes)
    run(kernel, grid, arguments, **options, START=starts is not None)
    return y, end, tile_states, inverses, ends


def backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    saved: list[Tensor],
    dy: Tensor,
    dend: Tensor,
) -> list[Tensor]:
    """Gradients of q, k, v, the state at the start and the gates."""
    tile_states, inverses, through = saved
    dv, dstart = v.new_empty(v.shape), dend.new_empty(dend.shape)
    # Where d is cut into slices each makes its share of what they have in common.
    common = [q, k, *gates[:1]]
    dq, dk, *dgates = [
        x.new_empty(x.shape) if plan.slices == 1 else x.new_empty(plan.slices, *x.shape, dtype=torch.float32)
        for x in common
    ]
    dgates += [x.new_empty(x.shape) for x in gates[1:]]
    grid, sizes = (plan.rows * plan.slices, plan.back_parts), (*plan.sizes(plan.back_segment), q.numel())
    options: dict[str, Any] = {**plan.kinds, **plan.blocks.backward.options, "TILE": TILE}
    dends = dend
    if plan.rule == "delta":
        inputs = (q, k, v, *_there(q, *gates, flags), inverses, tile_states, dy)
        if plan.parts > 1:
            sums = dend.new_empty(plan.rows, plan.parts, plan.shape.d, plan.shape.m)
            shared = (*inputs, dend, dq, dk, dv, *dgates, sums, *sizes)
            run(wy.backward, (plan.rows * plan.slices, plan.parts - 1), shared, OUTPUT=False, **options)
            dends = _scan_delta(plan, True, dend, through, sums)
        run(wy.backward, grid, (*inputs, dends, dq, dk, dv, *dgates, dstart, *sizes), OUTPUT=True, **options)
    else:
        if plan.back_parts > 1:
            dends = _segments(plan, True, plan.back_parts, plan.back_segment, q, dy, gates, flags, dend)
        inputs = (q, k, v, *_there(q, *_pair(gates), flags), tile_states, dy)
        outputs = (dq, dk, dv, *_there(q, *_pair(dgates)), dstart)
        run(tiled.backward, grid, (*inputs, dends, *outputs, *sizes), **options)
    if plan.slices > 1 and not dq.is_meta:  # torch would load more for a stand-in's sum than compiling it takes
        dq, dk, *first = [x.sum(0).to(like.dtype) for x, like in zip([dq, dk, *dgates[:1]], common, strict=True)]
        dgates[:1] = first
    return [dq, dk, dv, dstart, *dgates]


def _can_compile(device: torch.device) -> bool:
    """Not while a graph is captured: a kernel that another thread loads would end that."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _compile_ahead(plan: Plan, inputs: tuple[Any, ...], state: Tensor | None, keep: bool, wide: bool) -> None:
    """Compile what this call launches, and (keep) its backward pass: on stand-ins without memory, through the very code
    that launches, so that Triton finds the kernels by the like arguments."""
    stand_ins = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (*inputs, state))
    q, k, v, gates, flags, start = stand_ins

    def both() -> None:
        y, end, *saved = forward(plan, q, k, v, gates, flags, start, keep, wide)
        if keep:
            backward(plan, q, k, v, gates, flags, saved, y, end)  # gradients are like what they are of

    with contextlib.suppress(Exception):  # the launch itself raises it again
        compile_together(launches_of(both), plan.shape.device)


def _pair(gates: list[Tensor]) -> list[Tensor | None]:
    """tiled.py's f and z."""
    return [*gates, None, None][:2]


def _there(anything: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Pointers for a kernel: what is not there is not read, but must point somewhere."""
    return [anything if x is None or not x.numel() else x for x in tensors]


def _start(like: Tensor, state: Tensor | None) -> Tensor:
    return like.new_zeros(like.shape) if state is None else state


def _segments(
    plan: Plan,
    back: bool,
    parts: int,
    segment: int,
    a: Tensor,
    b: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    boundary: Tensor,
) -> Tensor:
    """States at the segments' starts (back: gradients at their ends), [B*H,parts,d,m]."""
    sums = torch.empty(plan.rows, parts, plan.shape.d, plan.shape.m, dtype=torch.float32, device=a.device)
    kepts, states = sums.new_empty(sums.shape), sums.new_empty(sums.shape)
    arguments = (a, b, *_there(a, *_pair(gates), flags), sums, kepts, *plan.sizes(segment))
    options = {**plan.kinds, "BACK": back, "TILE": SEGMENT_TILE, **plan.blocks.segments.options}
    run(tiled.segment_sums, (plan.rows * plan.slices, parts - 1), arguments, **options)
    size = plan.shape.d * plan.shape.m
    grid = (plan.rows, triton.cdiv(size, SCAN_BLOCK))
    run(tiled.scan_segments, grid, (boundary, sums, kepts, states, parts, size), BACK=back, BLOCK=SCAN_BLOCK)
    return states


def _solve(plan: Plan, k: Tensor, g: Tensor, flags: Tensor | None, inverses: Tensor) -> None:
    kinds = {name: plan.kinds[name] for name in ("FLAGS", "BM", "OPERAND", "PRECISION")}
    arguments = (k, *_there(k, g, flags), inverses, *plan.shape[2:5])
    run(wy.solve, (plan.rows * plan.tiles,), arguments, TILE=TILE, **kinds, num_warps=1)


def _scan_delta(plan: Plan, back: bool, boundary: Tensor, through: Tensor, sums: Tensor) -> Tensor:
    states = torch.empty(plan.rows, plan.parts, plan.shape.d, plan.shape.m, dtype=torch.float32, device=sums.device)
    arguments = (boundary, through, sums, states, plan.parts, plan.shape.m, plan.shape.d)
    kinds = {"BACK": back, "BM": plan.blocks.bm, "BD": plan.blocks.bd, "PRECISION": "tf32x3"}
    run(wy.scan_segments, (plan.rows * plan.slices,), arguments, **kinds)
    return states
