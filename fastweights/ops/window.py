"""Softmax attention to a window, to the first tokens of a document (sinks), and within documents, for training.

Shapes: q, y [B,T,H,d]   k, v [B,T,S,d]   reset, first, end [B,T]
H query heads share S key-value heads. No mask of T x T exists, and the cost grows with T times what a token sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.ops.device import unsupported_reason

WIDEST_HEAD = 256


class Documents(NamedTuple):
    """Where the document of each token starts and ends, [B,T] int32: indices of its first token and after its last."""

    first: Tensor
    end: Tensor


def documents_of(reset: Tensor) -> Documents:
    """The documents of rows in which one starts at each True of reset [B,T], and at the first token."""
    length = reset.shape[1]
    index = torch.arange(length, device=reset.device, dtype=torch.int32)
    first = torch.where(reset, index, 0).cummax(1).values
    following = torch.nn.functional.pad(torch.where(reset, index, length)[:, 1:], (0, 1), value=length)
    return Documents(first, following.flip(1).cummin(1).values.flip(1))


def window_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, interpreter: bool = False) -> str | None:
    """Why the kernels cannot run on these tensors; None if they can. `interpreter` accepts Triton's on a CPU."""
    if not WIDEST_HEAD >= q.shape[-1] == v.shape[-1] > 0:
        return f"it needs heads of one width up to {WIDEST_HEAD}, found {q.shape[-1]} and {v.shape[-1]}"
    return unsupported_reason(v.device, q.dtype, k.dtype, v.dtype, interpreter=interpreter)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: int = 0,
    documents: Documents | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Attend with the kernels, from each token to the last w tokens and to the first n of its document.

    Args:
        q: Queries [B,T,H,d].
        k: Keys [B,T,S,d]; H is a multiple of S.
        v: Values [B,T,S,d].
        window: w, the number of tokens that a token sees, including itself. At least T: all of them.
        sinks: n.
        documents: Which tokens are in one document. None: each row is one.
        softcap: Cap of the logits. None: no cap.
        scale: Factor of the products of queries and keys.

    Returns:
        y [B,T,H,d], in the dtype of v.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    first, end = documents or (None, None)
    arguments = (q, k, v, first, end, min(window, q.shape[1]), sinks, float(softcap or 0), float(scale))
    if torch.compiler.is_compiling():
        return window_op(*arguments)[0]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _EagerFunction.apply(*arguments)
    return _forward(*arguments)[0]


def _blocks(width: int, itemsize: int) -> dict[str, int]:
    """Tiles of queries and keys, and warps of a program, by the padded width of heads and the bytes of an element.

    The largest at which Triton 3.6 and later spill next to nothing for a Hopper GPU.
    """
    if itemsize > 2:  # products of float32 are three products of tf32
        tiles = (32, 32, 4) if width <= 64 else (16, 16, 4 if width <= 128 else 8)
    else:
        tiles = (64, 64, 4) if width <= 64 else (64, 64, 8) if width <= 128 else (32, 32, 8)
    stages = 2 if itemsize == 2 and width <= 128 else 1
    return {"BLOCK_T": tiles[0], "BLOCK_S": tiles[1], "num_warps": tiles[2], "num_stages": stages}


def _options(q: Tensor, k: Tensor, first: Tensor | None, sinks: int, softcap: float, dtype: torch.dtype) -> Any:
    from triton import next_power_of_2

    from fastweights.ops.triton.launch import OPERANDS

    d = q.shape[-1]
    width = max(16, next_power_of_2(d))
    operand, precision = OPERANDS[dtype]
    return {
        "HEADS": q.shape[2],
        "GROUP": q.shape[2] // k.shape[2],
        "HAS_DOCUMENTS": first is not None,
        "HAS_SINKS": sinks > 0,
        "HAS_SOFTCAP": softcap > 0,
        "BLOCK_D": width,
        "D_ALIGN": 16 if d % 16 == 0 else 8 if d % 8 == 0 else 1,
        "OPERAND": operand,
        "PRECISION": precision,
        **_blocks(width, 2 if dtype == torch.bfloat16 else 4),
    }


def _widest(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for x in tensors[1:]:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    end: Tensor | None,
    window: int,
    sinks: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from triton import cdiv

    from fastweights.ops.triton import launch
    from fastweights.ops.triton import window as kernels

    batch, length, heads, d = q.shape
    y, lse = v.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=torch.float32)
    options = _options(q, k, first, sinks, softcap, _widest(q, k, v))
    arguments = (q, k, v, q if first is None else first, y, lse, length, window, sinks, d, scale, softcap)
    launch.run(kernels.forward, (cdiv(length, options["BLOCK_T"]), batch * heads), arguments, **options)
    return y, lse


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    end: Tensor | None,
    y: Tensor,
    lse: Tensor,
    dy: Tensor,
    window: int,
    sinks: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from triton import cdiv

    from fastweights.ops.triton import launch
    from fastweights.ops.triton import window as kernels

    batch, length, heads, d = q.shape
    dq, dk, dv, delta = (x.new_empty(x.shape) for x in (q, k, v, lse))
    options = _options(q, k, first, sinks, softcap, _widest(q, k, v))
    first, end = (q if x is None else x for x in (first, end))
    sizes = (length, window, sinks, d, scale, softcap)
    grid = (cdiv(length, options["BLOCK_T"]), batch * heads)
    launch.run(kernels.backward_queries, grid, (q, k, v, first, y, lse, dy, delta, dq, *sizes), **options)
    grid = (cdiv(length, options["BLOCK_S"]), batch * k.shape[2])
    launch.run(kernels.backward_keys, grid, (q, k, v, first, end, lse, dy, delta, dk, dv, *sizes), **options)
    return dq, dk, dv


class _EagerFunction(torch.autograd.Function):
    """The eager counterpart of window_op: calling a custom operator takes longer than small kernels run."""

    @staticmethod
    def forward(ctx, q, k, v, first, end, *numbers):
        y, lse = _forward(q, k, v, first, end, *numbers)
        ctx.save_for_backward(q, k, v, first, end, y, lse)
        ctx.numbers = numbers
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gradients = _backward(*ctx.saved_tensors, dy.contiguous(), *ctx.numbers)  # type: ignore[call-arg]
        return *gradients, None, None, None, None, None, None


@torch.library.custom_op("fastweights::window", mutates_args=())
def window_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    end: Tensor | None,
    window: int,
    sinks: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`window_attention` as a custom operator, which torch.compile does not look into.

    Returns y, and the log-sum-exp [B,H,T] of the logits (in base 2) for `window_backward_op`. softcap 0: no cap.
    """
    return _forward(q, k, v, first, end, window, sinks, softcap, scale)


@window_op.register_fake
def _(q, k, v, first, end, window, sinks, softcap, scale):
    batch, length, heads, _ = q.shape
    return v.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("fastweights::window_backward", mutates_args=())
def window_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    end: Tensor | None,
    y: Tensor,
    lse: Tensor,
    dy: Tensor,
    window: int,
    sinks: int,
    softcap: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of `window_op`, as a custom operator."""
    return _backward(q, k, v, first, end, y, lse, dy, window, sinks, softcap, scale)


@window_backward_op.register_fake
def _(q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output):
    q, k, v, first, end, *numbers = inputs
    ctx.save_for_backward(q, k, v, first, end, *output)
    ctx.numbers = numbers


def _op_backward(ctx, dy, _):
    dq, dk, dv = window_backward_op(*ctx.saved_tensors, dy.contiguous(), *ctx.numbers)
    return dq, dk, dv, None, None, None, None, None, None


window_op.register_autograd(_op_backward, setup_context=_setup)
