"""Products with weights that are packed once, on a CPU: in oneDNN's own layout, or rounded to int8.

A plain product of one row and a matrix reads the matrix at a third of the memory's speed; the packed forms come close
to all of it, and smaller weights are read in less time.

Shapes: x [B,K]   weight [N,K]   bias [N]   -> [B,N] in x's dtype
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# What the weights of a model can be packed as, other than in its own dtype.
INT8, BFLOAT16 = "int8", "bfloat16"
WEIGHTS = (INT8, BFLOAT16)
# torch's kernel for int8 reads whole blocks of the inner dimension, also past the end of a row.
INT8_BLOCK = 16
LARGEST_INT8 = 127

Product = Callable[[Tensor], Tensor]


def pack(weight: Tensor, bias: Tensor | None, rows: int, weights: str | None = None) -> Product | None:
    """Pack a weight for products with x [rows,K].

    Args:
        weight: [N,K], on a CPU.
        bias: [N], in the weight's dtype.
        rows: B, for which the layout is chosen.
        weights: "int8", "bfloat16", or None for the weight's own dtype.

    Returns:
        A function from x [B,K] to x weight^T + bias. None where torch has no packed form of this dtype: use its
        ordinary product.
    """
    if weights == INT8:
        return _int8(weight, bias)
    dtype = torch.bfloat16 if weights == BFLOAT16 else weight.dtype
    if has_onednn(dtype):
        return _onednn(weight.to(dtype), None if bias is None else bias.to(dtype), rows)
    return None if weights is None else _narrow(weight.to(dtype), None if bias is None else bias.to(dtype))


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this CPU multiply packed matrices of a dtype."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and operations._is_mkldnn_bf16_supported())


def _onednn(weight: Tensor, bias: Tensor | None, rows: int) -> Product:
    packed, dtype = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows), weight.dtype

    def product(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, bias, "none", [], "").to(x.dtype)

    return product


def _narrow(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


def _int8(weight: Tensor, bias: Tensor | None) -> Product:
    """Whole numbers from -127 to 127 and a scale for each row of the weight; x is rounded to bfloat16.

    Each row of x is multiplied by itself, so a sequence does not depend on the others of its batch, as it would if x
    were rounded to int8 with one scale for all.
    """
    missing = -weight.shape[1] % INT8_BLOCK
    numbers, scales = quantize(weight, weight.shape[1])
    numbers, scales = F.pad(numbers, (0, missing)).contiguous(), scales[:, 0]

    def product(x: Tensor) -> Tensor:
        narrow = x.to(torch.bfloat16)
        y = torch.ops.aten._weight_int8pack_mm(F.pad(narrow, (0, missing)) if missing else narrow, numbers, scales)
        return y.to(x.dtype) if bias is None else y.to(x.dtype).add_(bias)

    return product


def quantize(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """A weight [N,K] as whole numbers from -127 to 127, int8 [N,K], and scales [N,K/group] in bfloat16."""
    groups = weight.float().unflatten(1, (-1, group))
    # The scale is rounded first, so that its own rounding is no error of the product.
    scales = (groups.abs().amax(-1) / LARGEST_INT8).clamp(min=torch.finfo(torch.float32).tiny).to(torch.bfloat16)
    numbers = (groups / scales.float()[..., None]).round().clamp(-LARGEST_INT8, LARGEST_INT8)
    return numbers.to(torch.int8).flatten(1), scales
