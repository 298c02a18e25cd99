"""A linear layer with what stands around it in a block, for a few rows: out = residual + activation(W norm(x) + b).

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

from fastweights.ops.device import has_warp_groups, multiprocessors, shared_bytes
from fastweights.ops.step import launch_options, operand

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# Numbers of a tile of weights that a program of the one-row kernel loads at once, and its warps for them.
ROW_TILE, ROW_WARPS = 8192, 4
# Inner numbers that are on their way at once, and the share of shared memory that all programs' loads may take.
PIPELINE, PIPELINE_SHARE = 512, 0.96
# A sum is shared by programs for so many rows, in tiles of so many columns, from so many numbers each.
SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_DEPTH = 32, 32, 512
# Rows and columns that a tensor core multiplies at least.
SMALLEST_TILE = 16


class Tile(NamedTuple):
    """What a program makes, and how: `split` programs share the inner dimension."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    split: int = 1


class Chip(NamedTuple):
    processors: int
    shared: int
    warp_groups: bool


class Scratch:
    """Parts of sums that programs share, and how many of a tile's have arrived: none before and after each kernel.
    Only for kernels that run one after another."""

    def __init__(self, device: torch.device) -> None:
        programs = multiprocessors(device)
        self.sums = torch.empty(programs * SPLIT_ROWS * SPLIT_COLUMNS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(programs, dtype=torch.int32, device=device)


class NormSums:
    """What a norm takes of each of the rows that one linear writes and the next one reads: sums of squares, and of
    numbers if it is `centred`, in as many parts as the writer had tiles of columns. No parts: the reader computes them.
    Whoever else writes the rows must say so by parts = 0."""

    def __init__(self, rows: int, columns: int, centred: bool, device: torch.device) -> None:
        most = -(-columns // SMALLEST_TILE)
        self.values = torch.empty((2 if centred else 1) * most * rows, dtype=torch.float32, device=device)
        self.parts, self.centred = 0, centred


@dataclass(frozen=True)
class Norm:
    """A layer norm (`centred`) or an RMS norm over the last dimension."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Linear:
    """`kernel`: run by Triton; otherwise by torch, in x's dtype. An activation is not added to what is there."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        norm: Norm | None = None,
        activation: str = "none",
        gated: bool = False,
        kernel: bool = False,
        overlap: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        self.weight, self.bias, self.norm = weight.contiguous(), bias, norm
        self.activation, self.gated, self.kernel, self.overlap = activation, gated, kernel, overlap
        self.columns = weight.shape[0] // (2 if gated else 1)
        self.column: Tensor | None = None
        if kernel and norm is not None:
            self._take_norm_in(norm)
        if kernel:
            self.weight, self.bias, self.column = (self._paired(x) for x in (self.weight, self.bias, self.column))
            self.scratch = scratch or Scratch(weight.device)
        self.transposed = self.weight.T

    def _paired(self, x: Any) -> Any:
        """Each gate's row before that of what it gates, so that one product makes both."""
        return torch.stack(x.chunk(2), dim=1).flatten(0, 1) if self.gated and x is not None else x

    def _take_norm_in(self, norm: Norm) -> None:
        """W (g (x - mean) / size + b) = (W g) (x - mean) / size + W b: g goes into W, and W b into the bias."""
        wide = self.weight.float()
        if norm.bias is not None:
            shift = wide @ norm.bias.float()
            self.bias = shift if self.bias is None else self.bias.float() + shift
        self.weight = (wide * norm.weight.float()).to(self.weight.dtype)
        if norm.centred:
            self.column = self.weight.float().sum(1)

    def __call__(self, x: Tensor, out: Tensor, add: bool = False, sums: NormSums | None = None) -> Tensor:
        """Into `out`, or added to what is there. Torch's activations are somewhere else: take what is returned.
        `sums`: of x for a layer with a norm, which takes them; of `out` for one without, which leaves them."""
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
        if self.bias is None:
            return torch.mm(x, self.transposed, out=out)
        return torch.addmm(self.bias, x, self.transposed, out=out)

    def _run_kernel(self, x: Tensor, out: Tensor, add: bool, sums: NormSums | None) -> None:
        from triton import cdiv

        from fastweights.ops.triton.decode_linear import linear_kernel

        rows, k = x.shape
        chip = Chip(multiprocessors(x.device), shared_bytes(x.device), has_warp_groups(x.device))
        given = self._parts_given(sums)
        tile = tiles(rows, self.columns, k, self.gated, self.norm is not None, self.weight.dtype, chip, given > 0)
        norm = "none" if self.norm is None else "layer" if self.norm.centred else "rms"
        grid = cdiv(rows, tile.rows), cdiv(self.columns, tile.columns), tile.split
        hands_on = "none"
        if sums is not None and self.norm is None:
            sums.parts = 0 if rows == 1 else grid[1]  # the reader of one row has them for nothing
            if sums.parts:
                hands_on = "layer" if sums.centred else "rms"
        with torch.cuda.device_of(x):
            linear_kernel[(grid[1],) if rows == 1 else grid](
                x,
                self.weight,
                x if self.column is None else self.column,
                x if self.bias is None else self.bias,
                out,
                out,
                self.scratch.sums,
                self.scratch.arrived,
                self.scratch.sums if sums is None else sums.values,
                rows,
                self.columns,
                k,
                0.0 if self.norm is None else self.norm.eps,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                BLOCK_K=tile.depth,
                SPLIT=tile.split,
                NORM=norm,
                GIVEN=given,
                HANDS_ON=hands_on,
                ACTIVATION=self.activation,
                GATED=self.gated,
                BIAS=self.bias is not None,
                RESIDUAL=add,
                OPERAND=operand(self.weight.dtype),
                PRECISION="ieee" if self.weight.dtype == torch.float32 else "tf32",
                OVERLAP=self.overlap,
                # programs of a later turn would only take the cache from those of the first
                PREFETCH=self.overlap and rows > 1 and math.prod(grid) <= chip.processors,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **launch_options(self.overlap),
            )

    def _parts_given(self, sums: NormSums | None) -> int:
        if sums is None or self.norm is None or (self.norm.centred and not sums.centred):
            return 0
        return sums.parts


@cache
def tiles(
    rows: int,
    columns: int,
    k: int,
    gated: bool,
    normed: bool,
    dtype: torch.dtype,
    chip: Chip,
    sums_given: bool = False,
) -> Tile:
    """One row: as many columns as keep a tile of whole rows of weights small. Several: the tile of the least cost, with
    the products for a norm's sums unless these are given.

    Measured on an H200: the busiest multiprocessor's loads, or products where these take longer, plus all programs'
    loads from the L2 cache, which is as fast as 0.6 of the multiprocessors. Warp groups are worth tiles of 64 rows from
    17 rows on. A long sum for few rows is better shared by programs."""
    from triton import cdiv, next_power_of_2

    halves = 2 if gated else 1
    if rows == 1:
        block_k = next_power_of_2(k)
        column_tile = max(1, min(16, ROW_TILE // (block_k * halves)))
        while column_tile > 1 and cdiv(columns, column_tile) < chip.processors:
            column_tile //= 2
        return Tile(1, column_tile, block_k, ROW_WARPS * max(1, min(2, block_k // ROW_TILE)), 4)

    summed = normed and not sums_given
    tensor_cores = dtype != torch.float32
    grouped = dtype == torch.bfloat16 and chip.warp_groups and rows > 16
    # float16 is there once more as float32
    itemsize = 2 if dtype == torch.bfloat16 else 4

    split = min(4, k // SPLIT_DEPTH, chip.processors // cdiv(columns, SPLIT_COLUMNS))
    if rows <= SPLIT_ROWS and split > 1 and not gated and not normed:
        row_tile = 16 if rows <= 16 else SPLIT_ROWS
        pipeline = _pipeline((row_tile + SPLIT_COLUMNS) * itemsize, 2, (128, 64), chip)
        if pipeline is not None:
            return Tile(row_tile, SPLIT_COLUMNS, pipeline[0], 4, pipeline[1] + 1, split)

    best: tuple[float, Tile] | None = None
    for row_tile in (128, 64) if grouped else (16, 32, 64, 128):
        for wide in (16, 32, 64, 128, 256):
            column_tile = wide // halves
            if row_tile >= 2 * max(rows, 64 if grouped else 16) or column_tile < SMALLEST_TILE:
                continue
            if wide == 256 and not (grouped and row_tile == 128):
                continue
            programs = cdiv(rows, row_tile) * cdiv(columns, column_tile)
            turns = cdiv(programs, chip.processors)
            depths = (64,) if summed else (128, 64)
            # two: this kernel's and the next one's
            pipeline = _pipeline((row_tile + wide) * itemsize, min(3, 1 + turns), depths, chip)
            if pipeline is None:
                continue
            loads = min(row_tile, rows) + wide
            work = row_tile * (wide + (row_tile if summed and tensor_cores else 0)) / (48 if tensor_cores else 4)
            cost = turns * max(loads, work) + programs / (0.6 * chip.processors) * loads
            if best is None or cost < best[0]:
                warps = 8 if row_tile * wide > 64 * 128 else 4
                best = cost, Tile(row_tile, column_tile, pipeline[0], warps, pipeline[1] + (not grouped))
    assert best is not None
    return best[1]


def _pipeline(width: int, programs: int, depths: tuple[int, ...], chip: Chip) -> tuple[int, int] | None:
    """Depth and number of buffers of `width` bytes an inner number, with room for so many programs on a multiprocessor,
    or for one if three buffers need it."""
    usable = int(PIPELINE_SHARE * chip.shared)
    for depth in depths:
        if 3 * depth * width <= usable // programs:
            return depth, min(usable // programs // (depth * width), PIPELINE // depth)
    return next(((depth, 3) for depth in (64, 32, 16) if 3 * depth * width <= usable), None)
