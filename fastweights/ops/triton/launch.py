"""Plans and launches of the training kernels: what the forward and the backward pass of each rule consist of.

Shapes: q, k [B,T,H,m]   v, y [B,T,H,d]   gates f [B,T,H,m], z [B,T,H,d], g [B,T,H,1]   flags [B,T] int8
        state [B,H,d,m]   tile_states [B*H,tiles,d,m]: states at the tiles' starts, in the precision of the products
        what the delta rules' kernels leave for each other: see wy.py

Where the heads alone do not fill the GPU, time is cut into segments: a first kernel finds what each segment does to the
state, a scan over the segments finds the states at their starts, and then all segments run in parallel.
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
from fastweights.ops.triton.blocks import CHUNK, SCAN_BLOCK, SEGMENT_TILE, TILE, blocks_for
from fastweights.ops.triton.compile import compile_in_parallel, record_calls, recording
from fastweights.rules import DELTA_RULES, RULES

# Operands and precision of the products for each input dtype. float16 inputs are multiplied as float32 (in tf32), since
# cumulative products reach e^80; float32 inputs use the three-way tf32 split, to stay within 1e-4 of a float64 loop.
OPERANDS = {
    torch.bfloat16: (tl.bfloat16, "tf32"),
    torch.float16: (tl.float32, "tf32"),
    torch.float32: (tl.float32, "tf32x3"),
}
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# What a launch may set besides the constants of the kernel.
LAUNCH_OPTIONS = {"num_warps", "maxnreg"}
# Programs per multiprocessor that a split targets. Several hide each other's memory latency. The backward pass needs
# more registers, so fewer of its programs run at a time; more and shorter ones leave less of the GPU idle at the end.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 3, 6
# For the delta rules: their programs are larger, and each state is cut into slices besides.
DELTA_PROGRAMS = 2


class ProblemShape(NamedTuple):
    """Everything that decides how a call is launched."""

    rule: str
    batch: int
    length: int
    heads: int
    m: int
    d: int
    dtype: torch.dtype
    flags: bool
    device: torch.device


def problem_shape(rule: str, q: Tensor, k: Tensor, v: Tensor, flags: Tensor | None) -> ProblemShape:
    """The ProblemShape of a call; `dtype` is the widest of q, k and v."""
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    batch, length, heads, m = k.shape
    return ProblemShape(rule, batch, length, heads, m, v.shape[-1], dtype, flags is not None, v.device)


class Plan:
    """Sizes and compile-time constants of the kernels for one ProblemShape."""

    def __init__(self, shape: ProblemShape) -> None:
        self.shape, self.rule, self.solved = shape, shape.rule, shape.rule in DELTA_RULES
        self.compiled: set[bool] = set()  # whether compiled: True with a backward pass, False without
        self.sequences = shape.batch * shape.heads
        self.blocks = blocks_for(shape.rule, shape.m, shape.d, shape.dtype)
        operand, precision = OPERANDS[shape.dtype]
        self.stored = torch.bfloat16 if operand == tl.bfloat16 else torch.float32
        if self.solved:  # wy.py says why these need more precision
            self.stored = torch.float32 if self.blocks.bm == 16 else self.stored
            operand = tl.float32
            precision = "tf32x3" if shape.dtype == torch.float32 or self.blocks.bm == 16 else "tf32"
        self.constants: dict[str, Any] = {
            "HAS_FLAGS": shape.flags,
            "BM": self.blocks.bm,
            "BD": self.blocks.bd,
            "M_ALIGN": 16 if shape.m % 16 == 0 else 4 if shape.m % 4 == 0 else 1,
            "D_ALIGN": 16 if shape.d % 16 == 0 else 1,
            "OPERAND": operand,
            "PRECISION": precision,
        }
        bm = self.blocks.bm
        self.constants["F_WIDTH"] = {"decay": bm, "gated_delta": bm, "gated": 1}.get(self.rule, 0)
        # Launches of the kernels that split the pairs of a chunk if its gates are small (wy.py).
        self.splits = (False, True) if self.rule == "gated_delta" else (False,)
        self.slices = triton.cdiv(shape.d, self.blocks.bd)
        self.tiles = triton.cdiv(shape.length, CHUNK if self.solved else TILE)
        if self.solved:
            self.constants |= {"STORED": DTYPES[self.stored], "CHUNK": CHUNK}
            # A state's transition costs as much as the state itself, so heads that fill the GPU are not cut.
            programs = self.sequences * self.slices * self.blocks.bd // _slice_rows(self, "backward")
            fills = programs >= multiprocessors(shape.device)
            self.segments, self.segment_length = self._split(0 if fills else DELTA_PROGRAMS)
        else:
            self.constants |= {"HAS_Z": self.rule == "decay", "INPUT_GATE": self.rule == "gated", "TILE": TILE}
            self.segments, self.segment_length = self._split(FORWARD_PROGRAMS)
            self.backward_segments, self.backward_segment_length = self._split(BACKWARD_PROGRAMS)

    def _split(self, programs: int) -> tuple[int, int]:
        """Number and length of the segments, for about `programs` programs per multiprocessor.

        One segment if the heads alone are enough. A segment has at least about 4 tiles of SEGMENT_TILE tokens. Its
        length is a multiple of SEGMENT_TILE, so that no tile or chunk crosses a boundary.
        """
        target = programs * multiprocessors(self.shape.device) // (self.sequences * self.slices)
        segments = max(1, min(target, triton.cdiv(self.shape.length, 4 * SEGMENT_TILE)))
        segment_length = triton.cdiv(triton.cdiv(self.shape.length, segments), SEGMENT_TILE) * SEGMENT_TILE
        return triton.cdiv(self.shape.length, segment_length), segment_length

    def options(self, kernel: Any, launch: str, **others: Any) -> dict[str, Any]:
        """The constants that the kernel takes, and the recorded settings of a launch."""
        given = {**self.constants, **self.blocks.kernels[launch].options, **others}
        return {name: value for name, value in given.items() if name in kernel.arg_names or name in LAUNCH_OPTIONS}

    def sizes(self, segment_length: int) -> tuple[int, ...]:
        """The size arguments that most kernels share: length, heads, m, d and the length of a segment."""
        return (*self.shape[2:6], segment_length)

    def saved(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what the forward pass leaves for the backward pass.

        tile_states for the tiled rules; w, u, k_end, q_start, scores, inverses, decays, splits, transitions and states
        for the delta rules.
        """
        _, _, _, _, m, d, *_ = self.shape
        if not self.solved:
            return [((self.sequences, self.tiles, d, m), self.stored)]
        chunks, bm, wide = self.sequences * self.tiles, self.blocks.bm, self.slices * self.blocks.bd
        stored, exact = self.stored, torch.float32
        # u goes into the state, and its rounding stays there for as long as the gates are open.
        tokens = [(bm, stored), (wide, exact), (bm, stored), (bm, stored), (CHUNK, stored), (CHUNK, stored)]
        by_token = [((chunks, CHUNK, width), dtype) for width, dtype in tokens]
        transitions = (self.sequences * self.segments if self.segments > 1 else 0, bm, bm)
        by_chunk = [((chunks, bm), exact), ((chunks,), torch.int8), (transitions, exact)]
        return [*by_token, *by_chunk, ((chunks, bm, wide), stored)]


plan_for = functools.lru_cache(maxsize=1024)(Plan)


_compiled: dict[tuple, Any] = {}


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
    """Launch a kernel with `args`, followed by the constants in `options`.

    Triton looks up a compiled kernel by all its arguments, which takes longer than a small kernel runs. A kernel that
    was launched before with the same dtypes and constants is found here instead, and launched directly.
    """
    launches = recording.get()
    if launches is not None:
        launches.append((kernel, grid, args, options))
        return
    signature = tuple(x.dtype if isinstance(x, Tensor) else x < 2**31 for x in args)
    key = (kernel, args[0].device, signature, *options.items())
    compiled = _compiled.get(key)
    aligned = _aligned(*args)  # Triton may have compiled the kernel for pointers that are multiples of 16
    with torch.cuda.device_of(args[0]):
        if compiled is not None and aligned:
            compiled[(*grid, 1, 1)[:3]](*args, *(options[name] for name in kernel.arg_names[len(args) :]))
            return
        compiled = kernel[grid](*args, **options)
    if compiled is not None and aligned:  # the interpreter compiles nothing
        _compiled[key] = compiled


def _aligned(*args: Any) -> bool:
    """Whether all tensors start at a multiple of 16 bytes."""
    return all(x.data_ptr() % 16 == 0 for x in args if isinstance(x, Tensor))


def forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    state: Tensor | None,
    save_states: bool,
    float32_output: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run a rule's forward pass.

    Returns y (in float32 with float32_output, else in v's dtype), the state at the end and, with save_states, what the
    backward pass needs. The first call of a plan compiles all its kernels.
    """
    if save_states not in plan.compiled and _can_compile(v.device):
        plan.compiled.add(save_states)
        if _aligned(q, k, v, *gates, flags, state):  # the tensors that stand in for these are aligned
            _compile_all(plan, (q, k, v, gates, flags), state, save_states, float32_output)
    shape = plan.shape
    float32: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    y = v.new_empty(v.shape, dtype=torch.float32 if float32_output else v.dtype)
    end = torch.empty(shape.batch, shape.heads, shape.d, shape.m, **float32)
    pass_of = _forward_delta if plan.solved else _forward_tiled
    return y, end, pass_of(plan, q, k, v, gates, flags, state, save_states, y, end)


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
    """Run a rule's backward pass; returns the gradients of q, k, v, the state at the start and the gates."""
    return (_backward_delta if plan.solved else _backward_tiled)(plan, q, k, v, gates, flags, saved, dy, dend)


def _forward_tiled(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    state: Tensor | None,
    save_states: bool,
    y: Tensor,
    end: Tensor,
) -> list[Tensor]:
    """Fill y and end; returns [tile_states], with save_states."""
    saved = [v.new_empty(size, dtype=dtype) for size, dtype in plan.saved() if save_states]
    starts = state
    if plan.segments > 1:
        starts = _segment_boundaries(
            plan, False, plan.segments, plan.segment_length, k, v, gates, flags, _zeros_if_none(end, state)
        )
    inputs = (q, k, v, *_pointers(q, *_f_and_z(gates), flags, starts))
    arguments = (*inputs, y, *(saved or [q]), end, *plan.sizes(plan.segment_length))
    options = plan.options(tiled.forward, "forward", HAS_START=starts is not None, SAVE_STATES=save_states)
    run(tiled.forward, (plan.sequences * plan.slices, plan.segments), arguments, **options)
    return saved


def _backward_tiled(
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
    dv, dstart = v.new_empty(v.shape), dend.new_empty(dend.shape)
    # Where d is cut into slices, each slice writes its own share of these gradients; they are summed below.
    shared = sum(width != "d" for width in RULES[plan.rule].gates.values())
    common = [q, k, *gates[:shared]]
    dq, dk, *dgates = [
        x.new_empty(x.shape) if plan.slices == 1 else x.new_empty(plan.slices, *x.shape, dtype=torch.float32)
        for x in common
    ]
    dgates += [x.new_empty(x.shape) for x in gates[shared:]]
    dends = dend
    if plan.backward_segments > 1:
        dends = _segment_boundaries(
            plan, True, plan.backward_segments, plan.backward_segment_length, q, dy, gates, flags, dend
        )
    inputs = (q, k, v, *_pointers(q, *_f_and_z(gates), flags), *saved, dy, dends)
    outputs = (dq, dk, dv, *_pointers(q, *_f_and_z(dgates)), dstart)
    arguments = (*inputs, *outputs, *plan.sizes(plan.backward_segment_length), q.numel())
    grid = (plan.sequences * plan.slices, plan.backward_segments)
    run(tiled.backward, grid, arguments, **plan.options(tiled.backward, "backward"))
    if plan.slices > 1 and not dq.is_meta:  # not while compiling on meta tensors
        summed = [x.sum(0).to(like.dtype) for x, like in zip([dq, dk, *dgates[:shared]], common, strict=True)]
        dq, dk, dgates[:shared] = summed[0], summed[1], summed[2:]
    return [dq, dk, dv, dstart, *dgates]


def _forward_delta(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    state: Tensor | None,
    save_states: bool,
    y: Tensor,
    end: Tensor,
) -> list[Tensor]:
    """Fill y and end; returns what Plan.saved names, with save_states."""
    *first, last = plan.saved()
    made = [v.new_empty(size, dtype=dtype) for size, dtype in first]
    states = v.new_empty(last[0], dtype=last[1]) if save_states else v
    *prepared, transitions = made
    w, u, k_end, q_start, scores, _, decays, _ = prepared
    sizes = plan.shape[2:6]
    arguments = (q, k, v, *_pointers(q, *_f_and_g(gates), flags), *prepared, *sizes)
    for split in plan.splits:
        options = plan.options(wy.prepare, "prepare", SPLIT=split)
        run(wy.prepare, (plan.sequences * plan.tiles,), arguments, **options)
    by_chunk, starts = (w, u, k_end, q_start, scores, decays), state
    if plan.segments > 1:
        starts = _delta_boundaries(plan, False, (*by_chunk, v), transitions, _zeros_if_none(end, state))
    options = plan.options(wy.forward, "forward", HAS_START=starts is not None, SAVE_STATES=save_states)
    outputs = (y, states, end, *plan.sizes(plan.segment_length))
    grid, slice_rows = _delta_slices(plan, "forward")
    run(wy.forward, grid, (*by_chunk, *_pointers(q, starts), *outputs), SLICE=slice_rows, **options)
    return [*made, states] if save_states else []


def _backward_delta(
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
    w, u, k_end, q_start, scores, inverses, decays, splits, transitions, states = saved
    du, dstates, dstart = torch.empty_like(u), torch.empty_like(states), dend.new_empty(dend.shape)
    sizes, dends = plan.shape[2:6], dend
    if plan.segments > 1:
        dends = _delta_boundaries(plan, True, (w, u, k_end, q_start, scores, decays, dy), transitions, dend)
    grid, slice_rows = _delta_slices(plan, "backward")
    arguments = (w, k_end, q_start, scores, decays, dy, dends, du, dstates, dstart, *plan.sizes(plan.segment_length))
    run(wy.backward, grid, arguments, SLICE=slice_rows, **plan.options(wy.backward, "backward"))
    dq, dk, dv, *dgates = [x.new_empty(x.shape) for x in (q, k, v, *gates)]
    inputs = (q, k, *_pointers(q, *_f_and_g(gates), flags), u, inverses, decays, splits, states, dy, du, dstates)
    arguments = (*inputs, dq, dk, dv, *_pointers(q, *_f_and_g(dgates)), *sizes)
    for split in plan.splits:
        options = plan.options(wy.gradients, "gradients", SPLIT=split)
        run(wy.gradients, (plan.sequences * plan.tiles,), arguments, SLICE=_slice_rows(plan, "gradients"), **options)
    return [dq, dk, dv, dstart, *dgates]


def _delta_slices(plan: Plan, kernel: str, transition: bool = False) -> tuple[tuple[int, ...], int]:
    """The grid of a kernel that goes from chunk to chunk, and the rows of the state in each of its programs. With
    `transition`, programs for the bm columns of a transition come after those of the state."""
    wide, rows = plan.slices * plan.blocks.bd, _slice_rows(plan, kernel)
    if transition:
        wide, rows = wide + plan.blocks.bm, min(rows, plan.blocks.bm)
    return (plan.sequences * (wide // rows), plan.segments), rows


def _delta_boundaries(
    plan: Plan, reverse: bool, by_chunk: tuple[Tensor, ...], transitions: Tensor, boundary: Tensor
) -> Tensor:
    """States at the segments' starts (reverse: gradients of states at their ends), [B*H,segments,d,m].

    `by_chunk` are the first arguments of segment_effects, and `boundary` is the state at the first start (reverse: its
    gradient at the last end). Not in reverse, `transitions` is filled.
    """
    sums = boundary.new_empty(plan.sequences, plan.segments, plan.shape.d, plan.shape.m)
    states, kernel = torch.empty_like(sums), "backward" if reverse else "forward"
    grid, rows = _delta_slices(plan, kernel, transition=not reverse)
    options = plan.options(wy.segment_effects, kernel, REVERSE=reverse)
    arguments = (*by_chunk, sums, transitions, *plan.sizes(plan.segment_length))
    run(wy.segment_effects, grid, arguments, SLICE=rows, **options)
    sizes = (plan.segments, plan.shape.m, plan.shape.d)
    (programs, _), rows = _delta_slices(plan, kernel)
    arguments = (boundary, sums, transitions, states, *sizes)
    run(wy.scan_segments, (programs,), arguments, REVERSE=reverse, SLICE=rows, BM=plan.blocks.bm, BD=plan.blocks.bd)
    return states


def _slice_rows(plan: Plan, kernel: str) -> int:
    """The rows of the state that a program of a kernel has in registers at a time."""
    return min(plan.blocks.kernels[kernel].rows or plan.blocks.bd, plan.blocks.bd)


def _can_compile(device: torch.device) -> bool:
    """Not while a CUDA graph is captured: loading a kernel in another thread would end the capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _compile_all(
    plan: Plan, inputs: tuple[Any, ...], state: Tensor | None, save_states: bool, float32_output: bool
) -> None:
    """Compile the kernels of this call and, with save_states, of its backward pass.

    Runs the launching code itself on meta tensors, so that Triton finds the compiled kernels by the same arguments.
    """
    meta = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (*inputs, state))
    q, k, v, gates, flags, start = meta

    def both() -> None:
        y, end, saved = forward(plan, q, k, v, gates, flags, start, save_states, float32_output)
        if save_states:
            backward(plan, q, k, v, gates, flags, saved, y, end)  # a gradient has the shape and dtype of its tensor

    with contextlib.suppress(Exception):  # the launch itself raises it again
        compile_in_parallel(record_calls(both), plan.shape.device)


def _f_and_z(gates: list[Tensor]) -> list[Tensor | None]:
    """The f and z arguments of tiled.py's kernels, None for those that the rule does not have."""
    return [*gates, None, None][:2]


def _f_and_g(gates: list[Tensor]) -> list[Tensor | None]:
    """The f and g arguments of wy.py's kernels; delta has no f."""
    return [None, *gates][-2:]


def _pointers(anything: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Kernel arguments: a tensor that does not exist is not read, but must point to some memory."""
    return [anything if x is None or not x.numel() else x for x in tensors]


def _zeros_if_none(like: Tensor, state: Tensor | None) -> Tensor:
    return like.new_zeros(like.shape) if state is None else state


def _segment_boundaries(
    plan: Plan,
    reverse: bool,
    segments: int,
    segment_length: int,
    a: Tensor,
    b: Tensor,
    gates: list[Tensor],
    flags: Tensor | None,
    boundary: Tensor,
) -> Tensor:
    """States at the segments' starts (reverse: gradients of states at their ends), [B*H,segments,d,m].

    `a` and `b` are keys and values (reverse: queries and output gradients); `boundary` is the state at the first start
    (reverse: its gradient at the last end).
    """
    sums = torch.empty(plan.sequences, segments, plan.shape.d, plan.shape.m, dtype=torch.float32, device=a.device)
    decays, states = sums.new_empty(sums.shape), sums.new_empty(sums.shape)
    arguments = (a, b, *_pointers(a, *_f_and_z(gates), flags), sums, decays, *plan.sizes(segment_length))
    options = plan.options(tiled.segment_sums, "segments", REVERSE=reverse, TILE=SEGMENT_TILE)
    run(tiled.segment_sums, (plan.sequences * plan.slices, segments - 1), arguments, **options)
    size = plan.shape.d * plan.shape.m
    grid = (plan.sequences, triton.cdiv(size, SCAN_BLOCK))
    run(tiled.scan_segments, grid, (boundary, sums, decays, states, segments, size), REVERSE=reverse, BLOCK=SCAN_BLOCK)
    return states
