"""A linear layer with what stands around it in a block, for a few rows: out = residual + activation(W norm(x) + b).

Shapes: x [B,K]   weight [N,K], or [2N,K] where one half gates the other   bias [N] or [2N]   out, residual [B,N]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.device import multiprocessors, shared_bytes
from fastweights.ops.step import launch_options

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
# Numbers of a tile of weights that a program of the one-row kernel loads at once, and its warps for them.
ROW_TILE, ROW_WARPS = 8192, 4
TILES = (16, 32, 64, 128)
# Depth of the pipeline of loads, and its share of a program's shared memory.
STAGES, PIPELINE_SHARE = 4, 0.7


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
    ) -> None:
        self.weight, self.bias, self.norm = weight.contiguous(), bias, norm
        self.activation, self.gated, self.kernel, self.overlap = activation, gated, kernel, overlap
        self.columns = weight.shape[0] // (2 if gated else 1)
        self.column: Tensor | None = None
        if kernel and norm is not None:
            self._take_norm_in(norm)
        self.transposed = self.weight.T

    def _take_norm_in(self, norm: Norm) -> None:
        """W (g (x - mean) / size + b) = (W g) (x - mean) / size + W b: g goes into W, and W b into the bias."""
        wide = self.weight.float()
        if norm.bias is not None:
            shift = wide @ norm.bias.float()
            self.bias = shift if self.bias is None else self.bias.float() + shift
        self.weight = (wide * norm.weight.float()).to(self.weight.dtype)
        if norm.centred:
            self.column = self.weight.float().sum(1)

    def __call__(self, x: Tensor, out: Tensor, add: bool = False) -> Tensor:
        """Into `out`, or added to what is there. Torch's activations are somewhere else: take what is returned."""
        if self.kernel:
            self._run_kernel(x, out, add)
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

    def _run_kernel(self, x: Tensor, out: Tensor, add: bool) -> None:
        from triton import cdiv

        from fastweights.ops.decode_kernels import linear_kernel

        rows, k = x.shape
        chip = multiprocessors(x.device), shared_bytes(x.device)
        row_tile, column_tile, block_k, warps = tiles(rows, self.columns, k, self.gated, self.weight.dtype, *chip)
        norm = "none" if self.norm is None else "layer" if self.norm.centred else "rms"
        with torch.cuda.device_of(x):
            linear_kernel[(cdiv(self.columns, column_tile), cdiv(rows, row_tile))](
                x,
                self.weight,
                x if self.column is None else self.column,
                x if self.bias is None else self.bias,
                out,
                out,
                rows,
                self.columns,
                k,
                0.0 if self.norm is None else self.norm.eps,
                ROWS=row_tile,
                COLUMNS=column_tile,
                BLOCK_K=block_k,
                NORM=norm,
                ACTIVATION=self.activation,
                GATED=self.gated,
                BIAS=self.bias is not None,
                RESIDUAL=add,
                OPERAND=_operand(self.weight.dtype),
                PRECISION="ieee" if self.weight.dtype == torch.float32 else "tf32",
                OVERLAP=self.overlap,
                num_warps=warps,
                num_stages=STAGES,
                **launch_options(self.overlap),
            )


def _operand(dtype: torch.dtype) -> object:
    """What goes into the tensor cores. Not float16: a number that still waits for its norm may be too large for it."""
    import triton.language as tl

    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def tiles(
    rows: int, columns: int, k: int, gated: bool, dtype: torch.dtype, processors: int, shared: int
) -> tuple[int, int, int, int]:
    """Rows, columns and inner numbers of a program's tile, and its warps. One row: as many columns as keep a tile of
    whole rows of weights small. Several: the tile for which the busiest multiprocessor has the least to load."""
    from triton import cdiv, next_power_of_2

    halves = 2 if gated else 1
    if rows == 1:
        block_k = next_power_of_2(k)
        column_tile = max(1, min(16, ROW_TILE // (block_k * halves)))
        while column_tile > 1 and cdiv(columns, column_tile) < processors:
            column_tile //= 2
        return 1, column_tile, block_k, ROW_WARPS * max(1, min(2, block_k // ROW_TILE))

    def load(tile: tuple[int, int]) -> int:
        programs = cdiv(rows, tile[0]) * cdiv(columns, tile[1])
        return cdiv(programs, processors) * (tile[0] + halves * tile[1])

    def depth(tile: tuple[int, int]) -> int:
        """As deep as shared memory allows, so that most of a program's loads are on their way together."""
        width = (tile[0] + halves * tile[1]) * dtype.itemsize
        deepest = min(128, int(PIPELINE_SHARE * shared) // (STAGES * width))
        return 1 << deepest.bit_length() - 1 if deepest else 0

    useful = [tile for tile in TILES if tile < 2 * rows] or [16]
    fitting = [(r, c) for r in useful for c in TILES if depth((r, c)) >= 16]
    row_tile, column_tile = min(fitting, key=load)
    numbers, block_k = row_tile * column_tile * halves, depth((row_tile, column_tile))
    return row_tile, column_tile, block_k, 8 if numbers >= 128 * 64 else 4
