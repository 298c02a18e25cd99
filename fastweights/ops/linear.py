"""A fused linear layer for a few rows: out = residual + activation(W norm(x) + b).

Shapes: x [B,K]   weight [N,K], or [2N,K] where one half gates the other   bias [N] or [2N]   out, residual [B,N]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.cpu.program import Program, StoredWeight
from fastweights.ops.device import has_warp_groups, multiprocessors, shared_bytes
from fastweights.ops.packed import pack
from fastweights.ops.step import operand_dtype, pdl_options

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# Weight elements that a program of the one-row kernel loads at once, and its warps for them.
ROW_TILE, ROW_WARPS = 8192, 4
# Elements of the inner dimension that are in flight at once, and the share of shared memory for the loads of all
# programs.
PIPELINE, PIPELINE_SHARE = 512, 0.96
# Split-K: up to this many rows, with tiles of this many columns, and at least this many inner elements per program.
SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_DEPTH = 32, 32, 512
# The fewest rows and columns that tensor cores multiply.
SMALLEST_TILE = 16


class TileConfig(NamedTuple):
    """The tile [rows,columns] that a program computes, and how: `split` programs share the inner dimension."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    split: int = 1


class DeviceLimits(NamedTuple):
    """What decides the choice of a tile: multiprocessors, shared memory per program, warp-group products."""

    processors: int
    shared: int
    warp_groups: bool


class SplitKWorkspace:
    """Partial sums of split-K programs, and a counter of arrived programs per tile, 0 before and after each kernel.

    One workspace serves all layers, since their kernels run one after another.
    """

    def __init__(self, device: torch.device) -> None:
        programs = multiprocessors(device)
        self.sums = torch.empty(programs * SPLIT_ROWS * SPLIT_COLUMNS, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(programs, dtype=torch.int32, device=device)


class NormSums:
    """Partial sums for the norm between two linear layers: the first leaves them, the second uses them.

    Sums of squares and, for a layer norm (`centered`), sums of elements, in as many parts as the writer had column
    tiles. parts = 0: there are none and the reader computes them. Anything else that writes the rows must set parts to
    0.
    """

    def __init__(self, rows: int, columns: int, centered: bool, device: torch.device) -> None:
        most = -(-columns // SMALLEST_TILE)
        self.values = torch.empty((2 if centered else 1) * most * rows, dtype=torch.float32, device=device)
        self.parts, self.centered = 0, centered


@dataclass(frozen=True)
class Norm:
    """A layer norm (`centered`) or an RMS norm over the last dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.centered:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)


class FusedLinear:
    """A linear layer with an optional norm before it and an activation, or an addition to a residual, after it.

    Args:
        weight: [N,K]; with `gated` [2N,K], gates first.
        bias: [N] or [2N].
        norm: applied to x.
        activation: a key of ACTIVATIONS, or "none". It cannot be combined with an addition.
        gated: out = activation(gate) * value, from the two halves of the weight.
        kernel: run the Triton kernel. Otherwise torch, in x's dtype.
        overlap: launch the kernel before the previous one has ended.
        workspace: shared by the layers of a model. None: an own one.
        packed_rows: pack the weight for this many rows B, on a CPU and without the kernel. None: it stays as it is.
        weights: what a packed weight is stored as, "int8" or "bfloat16". None: in its own dtype.
        program: on a CPU, a call adds the layer to this program instead of computing it.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        activation: str = "none",
        gated: bool = False,
        kernel: bool = False,
        overlap: bool = False,
        workspace: SplitKWorkspace | None = None,
        packed_rows: int | None = None,
        weights: str | None = None,
        program: Program | None = None,
    ) -> None:
        self.norm, self.bias, self.program = norm, bias, program
        self.activation, self.gated, self.kernel, self.overlap = activation, gated, kernel, overlap
        self.columns = weight.shape[0] // (2 if gated else 1)
        if program is not None:
            self.stored = StoredWeight(weight, weights or str(weight.dtype).removeprefix("torch."), gated)
            return
        self.packed = None if packed_rows is None else pack(weight, bias, packed_rows, weights)
        if self.packed is not None:  # so that the weight itself need not stay in memory
            return
        self.weight, self.weight_sums = weight.contiguous(), None
        if kernel and norm is not None:
            self._fold_norm(norm)
        if kernel:
            self.weight, self.bias, self.weight_sums = (
                self._interleave_gate(x) for x in (self.weight, self.bias, self.weight_sums)
            )
            self.workspace = workspace or SplitKWorkspace(weight.device)
        self.transposed = self.weight.T

    def _interleave_gate(self, x: Any) -> Any:
        """Put each gate's row before the row that it multiplies, so that one product computes both."""
        return torch.stack(x.chunk(2), dim=1).flatten(0, 1) if self.gated and x is not None else x

    def _fold_norm(self, norm: Norm) -> None:
        """W (g (x - mean) / std + b) = (W g) (x - mean) / std + W b: fold g into W and W b into the bias."""
        wide = self.weight.float()
        if norm.bias is not None:
            shift = wide @ norm.bias.float()
            self.bias = shift if self.bias is None else self.bias.float() + shift
        self.weight = (wide * norm.weight.float()).to(self.weight.dtype)
        if norm.centered:
            self.weight_sums = self.weight.float().sum(1)

    def __call__(self, x: Tensor, out: Tensor, add: bool = False, sums: NormSums | None = None) -> Tensor:
        """Write the result into `out`, or add it to what is there.

        Args:
            x: [B,K], rows of consecutive elements.
            out: [B,N]. Torch does not write activated results here: use the returned tensor.
            add: add to `out` (the residual).
            sums: partial sums for a norm. A layer with a norm reads those of x, one without leaves those of `out`.

        Returns:
            The result [B,N].
        """
        if self.program is not None:
            self.program.linear(self.stored, self.bias, self.norm, self.activation, x, out, add)
            return out
        if self.kernel:
            self._run_kernel(x, out, add, sums)
            return out
        x = x if self.norm is None else self.norm(x)
        if add:
            return out.add_(self._product(x, None))
        if self.activation == "none":
            return self._product(x, out)
        activation, y = ACTIVATIONS[self.activation], self._product(x, None)
        if not self.gated:
            return activation(y)
        gate, y = y.chunk(2, dim=-1)
        return activation(gate) * y

    def _product(self, x: Tensor, out: Tensor | None) -> Tensor:
        if self.packed is not None:
            y = self.packed(x)
            return y if out is None else out.copy_(y)
        if self.bias is None:
            return torch.mm(x, self.transposed, out=out)
        return torch.addmm(self.bias, x, self.transposed, out=out)

    def _run_kernel(self, x: Tensor, out: Tensor, add: bool, sums: NormSums | None) -> None:
        from triton import cdiv

        from fastweights.ops.triton.decode_linear import linear_kernel

        rows, k = x.shape
        limits = DeviceLimits(multiprocessors(x.device), shared_bytes(x.device), has_warp_groups(x.device))
        given = self._parts_given(sums)
        tile = choose_tile(
            rows, self.columns, k, self.gated, self.norm is not None, self.weight.dtype, limits, given > 0
        )
        norm = "none" if self.norm is None else "layer" if self.norm.centered else "rms"
        grid = cdiv(rows, tile.rows), cdiv(self.columns, tile.columns), tile.split
        write_sums_for = "none"
        if sums is not None and self.norm is None:
            sums.parts = (
                0 if rows == 1 else grid[1]
            )  # the one-row kernel holds its whole row and computes them at no cost
            if sums.parts:
                write_sums_for = "layer" if sums.centered else "rms"
        with torch.cuda.device_of(x):
            linear_kernel[(grid[1],) if rows == 1 else grid](
                x,
                self.weight,
                x if self.weight_sums is None else self.weight_sums,
                x if self.bias is None else self.bias,
                out,
                out,
                self.workspace.sums,
                self.workspace.arrivals,
                self.workspace.sums if sums is None else sums.values,
                rows,
                self.columns,
                k,
                x.stride(0),
                0.0 if self.norm is None else self.norm.eps,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                BLOCK_K=tile.depth,
                SPLIT=tile.split,
                NORM=norm,
                NORM_PARTS=given,
                WRITE_SUMS_FOR=write_sums_for,
                ACTIVATION=self.activation,
                GATED=self.gated,
                BIAS=self.bias is not None,
                RESIDUAL=add,
                OPERAND=operand_dtype(self.weight.dtype),
                PRECISION="ieee" if self.weight.dtype == torch.float32 else "tf32",
                OVERLAP=self.overlap,
                # with more than one wave of programs, the later ones would only evict what the first ones need
                PREFETCH=self.overlap and rows > 1 and math.prod(grid) <= limits.processors,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **pdl_options(self.overlap),
            )

    def _parts_given(self, sums: NormSums | None) -> int:
        if sums is None or self.norm is None or (self.norm.centered and not sums.centered):
            return 0
        return sums.parts


@cache
def choose_tile(
    rows: int,
    columns: int,
    k: int,
    gated: bool,
    normed: bool,
    dtype: torch.dtype,
    limits: DeviceLimits,
    sums_given: bool = False,
) -> TileConfig:
    """Choose the tile of a layer for a number of rows.

    One row: as many columns as keep a tile of whole weight rows small. Several: the tile of the least cost; the
    products for a norm's sums count too, unless the sums are given.

    The cost was measured on an H200: the loads of the busiest multiprocessor, or its products where these take longer,
    plus the loads of all programs from the L2 cache, which is as fast as 0.6 of the multiprocessors. Warp groups are
    worth tiles of 64 rows from 17 rows on. A long sum for few rows is better split over programs.
    """
    from triton import cdiv, next_power_of_2

    halves = 2 if gated else 1
    if rows == 1:
        block_k = next_power_of_2(k)
        column_tile = max(1, min(16, ROW_TILE // (block_k * halves)))
        while column_tile > 1 and cdiv(columns, column_tile) < limits.processors:
            column_tile //= 2
        return TileConfig(1, column_tile, block_k, ROW_WARPS * max(1, min(2, block_k // ROW_TILE)), 4)

    summed = normed and not sums_given
    tensor_cores = dtype != torch.float32
    grouped = dtype == torch.bfloat16 and limits.warp_groups and rows > 16
    # float16 is also held as float32
    itemsize = 2 if dtype == torch.bfloat16 else 4

    split = min(4, k // SPLIT_DEPTH, limits.processors // cdiv(columns, SPLIT_COLUMNS))
    if rows <= SPLIT_ROWS and split > 1 and not gated and not normed:
        row_tile = 16 if rows <= 16 else SPLIT_ROWS
        pipeline = _pipeline((row_tile + SPLIT_COLUMNS) * itemsize, 2, (128, 64), limits)
        if pipeline is not None:
            return TileConfig(row_tile, SPLIT_COLUMNS, pipeline[0], 4, pipeline[1] + 1, split)

    best: tuple[float, TileConfig] | None = None
    for row_tile in (128, 64) if grouped else (16, 32, 64, 128):
        for wide in (16, 32, 64, 128, 256):
            column_tile = wide // halves
            if row_tile >= 2 * max(rows, 64 if grouped else 16) or column_tile < SMALLEST_TILE:
                continue
            if wide == 256 and not (grouped and row_tile == 128):
                continue
            programs = cdiv(rows, row_tile) * cdiv(columns, column_tile)
            waves = cdiv(programs, limits.processors)
            depths = (64,) if summed else (128, 64)
            # at least two programs per multiprocessor: this kernel's and, with overlap, the next one's
            pipeline = _pipeline((row_tile + wide) * itemsize, min(3, 1 + waves), depths, limits)
            if pipeline is None:
                continue
            loads = min(row_tile, rows) + wide
            work = row_tile * (wide + (row_tile if summed and tensor_cores else 0)) / (48 if tensor_cores else 4)
            cost = waves * max(loads, work) + programs / (0.6 * limits.processors) * loads
            if best is None or cost < best[0]:
                warps = 8 if row_tile * wide > 64 * 128 else 4
                best = cost, TileConfig(row_tile, column_tile, pipeline[0], warps, pipeline[1] + (not grouped))
    assert best is not None
    return best[1]


def _pipeline(width: int, programs: int, depths: tuple[int, ...], limits: DeviceLimits) -> tuple[int, int] | None:
    """Depth and number of pipeline buffers of `width` bytes per inner element.

    Leaves room for `programs` programs on a multiprocessor, or for one if three buffers need it.
    """
    usable = int(PIPELINE_SHARE * limits.shared)
    for depth in depths:
        if 3 * depth * width <= usable // programs:
            return depth, min(usable // programs // (depth * width), PIPELINE // depth)
    return next(((depth, 3) for depth in (64, 32, 16) if 3 * depth * width <= usable), None)
