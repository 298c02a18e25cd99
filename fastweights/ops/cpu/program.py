"""The operations of a decoding step as structures of C, and the call that runs them.

All tensors have fixed addresses, so a program is made once, as a CUDA graph is, and run for each token.

Shapes: those of decode.c
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops.cpu import library
from fastweights.ops.packed import BFLOAT16, INT8, quantize
from fastweights.rules.base import MIN_GATE_LOGIT
from fastweights.rules.feature_maps import UNIT_EPSILON
from fastweights.rules.normalizer import SMALLEST_DIVISOR

# As in decode.c, and in this order.
BLOCK, GROUP, TILE, SHIFT = 64, 32, 4, 128
OPERATIONS = ("linear", "mix")
WEIGHTS = ("float32", BFLOAT16, INT8)
NORMS = ("none", "rms", "layer")
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu")
RULES = ("add", "gated", "delta", "decay", "gated_delta")
NO_RULE = -1
CACHE_LINE = 64


def _structure(name: str, *fields: tuple[str, Any]) -> Any:
    """A structure of C; each field is some names and their type."""
    members = [(member, kind) for members, kind in fields for member in members.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


_POINTER, _NUMBER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_Linear = _structure(
    "_Linear",
    ("x weight scales bias norm_weight norm_bias out", _POINTER),
    ("x_stride out_stride columns k weights norm activation gated add", _NUMBER),
    ("eps", _REAL),
)
_Heads = _structure(
    "_Heads",
    ("q k v cos signed_sin", _POINTER),
    ("stride heads kv_heads width pairs", _NUMBER),
)
_Mix = _structure(
    "_Mix",
    ("rule_heads window_heads", _Heads),
    ("state keys values out gate gate2 key_scale mix positions", _POINTER),
    ("rule states m d normalize unit gate_stride mix_stride window sinks", _NUMBER),
    ("softcap unit_epsilon smallest_divisor smallest_logit", _REAL),
)
_Operation = _structure("_Operation", ("kind", _NUMBER), ("arguments", _POINTER))


class StoredWeight:
    """A weight as the C code reads it: float32, bfloat16, or int8 with a scale for each 32 elements of a row.

    Args:
        weight: [N,K]; with `gated` [2N,K].
        weights: "float32", "bfloat16" or "int8".
        gated: whether the first half gates the second. Each half is then padded to whole tiles of rows.
    """

    def __init__(self, weight: Tensor, weights: str, gated: bool = False) -> None:
        halves = weight.chunk(2) if gated else (weight,)
        self.columns, self.k, self.weights, self.gated = len(halves[0]), weight.shape[1], weights, gated
        rows = torch.cat([F.pad(half, (0, -self.k % BLOCK, 0, -len(half) % TILE)) for half in halves])
        self.scales: Tensor | None = None
        if weights == INT8:
            numbers, scales = quantize(rows, GROUP)
            numbers = (numbers.short() + SHIFT).to(torch.uint8)
            self.data, self.scales = _tiles(numbers), _tiles(scales, width=2)
        else:
            self.data = _tiles(rows.to(getattr(torch, weights)))


def _tiles(x: Tensor, width: int = BLOCK) -> Tensor:
    """[N,K] in the order in which the C code reads it: [N/tile,K/width,tile,width]."""
    return x.unflatten(0, (-1, TILE)).unflatten(2, (-1, width)).transpose(1, 2).contiguous()


class Program:
    """A list of operations on static tensors.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.library = batch_size, library()
        self.operations: list[tuple[int, ctypes.Structure]] = []
        self.tensors: list[Tensor] = []  # so that they stay at their addresses
        self.scratch_bytes = 0  # of a thread
        self.scratch, self.threads = torch.empty(0, dtype=torch.uint8), 0
        self.rows = torch.arange(batch_size)
        self.all_rows = list(range(batch_size))
        self.row_list = self.all_rows
        self.list: ctypes.Array[Any] | None = None

    def linear(
        self,
        weight: StoredWeight,
        bias: Tensor | None,
        norm: Any,
        activation: str,
        x: Tensor,
        out: Tensor,
        add: bool,
    ) -> None:
        """Add out = [out +] activation(weight norm(x) + bias), x [B,K], out [B,N]."""
        norm_name = "none" if norm is None else "layer" if norm.centered else "rms"
        arguments = _Linear(
            x=self._address(x),
            weight=self._address(weight.data),
            scales=self._address(weight.scales),
            bias=self._address(_float(bias)),
            norm_weight=self._address(None if norm is None else _float(norm.weight)),
            norm_bias=self._address(None if norm is None else _float(norm.bias)),
            out=self._address(out),
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            columns=weight.columns,
            k=weight.k,
            weights=WEIGHTS.index(weight.weights),
            norm=NORMS.index(norm_name),
            activation=ACTIVATIONS.index(activation),
            gated=weight.gated,
            add=add,
            eps=0.0 if norm is None else norm.eps,
        )
        k = -(-weight.k // BLOCK) * BLOCK
        # x in float32; scales, sums and numbers of x in int8
        self._append("linear", arguments, self.batch_size * (4 * k + 4 * k // GROUP + k + k))

    def mix(self, recurrence: Any, window: Any, mix_logit: Tensor | None) -> Tensor:
        """Add the step of a layer's rule, of its window, or of both mixed.

        Args:
            recurrence: A DecodeRecurrence, or None.
            window: A DecodeWindow, or None.
            mix_logit: As for DecodeWindow.step.

        Returns:
            The buffer of the result [B,H,d].
        """
        out = (recurrence or window).y
        heads, d = out.shape[1:]
        values: dict[str, Any] = dict(rule=NO_RULE, d=d, out=self._address(out), smallest_logit=MIN_GATE_LOGIT)
        values |= dict(unit_epsilon=UNIT_EPSILON, smallest_divisor=SMALLEST_DIVISOR)
        size = 2 * d + BLOCK
        if recurrence is not None:
            state, config = recurrence.state, recurrence.config
            states, m, gates = state.shape[1], state.shape[3], recurrence.gate_logits
            values |= dict(rule_heads=self._heads(recurrence.heads), state=self._address(state), states=states, m=m)
            values |= dict(rule=RULES.index(config.rule), normalize=config.normalizes_attention)
            values |= dict(unit=config.normalizes_unit, key_scale=self._address(_float(recurrence.rule.key_scale)))
            values |= dict(zip(("gate", "gate2"), map(self._address, gates), strict=False))
            values["gate_stride"] = gates[0].stride(0) if gates else 0
            size += (2 + heads // states) * m
        if window is not None:
            values |= dict(window_heads=self._heads(window.heads), keys=self._address(window.keys))
            values |= dict(values=self._address(window.values), positions=self._address(window.positions))
            values |= dict(window=window.width, sinks=window.sinks, softcap=window.softcap or 0.0)
            size += 2 * d + window.width
        if mix_logit is not None:
            mix_logit = _float(mix_logit)
            assert mix_logit is not None
            values |= dict(mix=self._address(mix_logit), mix_stride=mix_logit.stride(0) if mix_logit.ndim == 2 else 0)
        self._append("mix", _Mix(**values), 4 * size)
        return out

    def run(self, slots: Sequence[int] | None = None) -> None:
        """Run all operations for some rows; for all by default."""
        if self.list is None:
            self.list = (_Operation * len(self.operations))()
            for place, (kind, values) in zip(self.list, self.operations, strict=True):
                place.kind, place.arguments = kind, ctypes.addressof(values)
        rows = self.all_rows if slots is None else slots
        if rows != self.row_list:
            self.row_list = list(rows)
            self.rows[: len(rows)] = torch.tensor(self.row_list)
        threads = torch.get_num_threads()
        size = -(-self.scratch_bytes // CACHE_LINE) * CACHE_LINE
        if threads > self.threads:
            self.scratch, self.threads = torch.empty(size * threads, dtype=torch.uint8), threads
        arguments = ctypes.addressof(self.list), len(self.list), self.rows.data_ptr(), len(self.row_list)
        self.library.run(*arguments, self.scratch.data_ptr(), size, threads)

    def _append(self, kind: str, arguments: ctypes.Structure, scratch_bytes: int) -> None:
        self.operations.append((OPERATIONS.index(kind), arguments))
        self.scratch_bytes = max(self.scratch_bytes, scratch_bytes)

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def _heads(self, heads: Any) -> Any:
        q, k, v, factors = heads.q, heads.k, heads.v, heads.factors
        assert self.batch_size == 1 or q.stride(0) == k.stride(0) == v.stride(0)
        values = dict(q=self._address(q), k=self._address(k), v=self._address(v), stride=q.stride(0))
        values |= dict(heads=q.shape[1], kv_heads=k.shape[1], width=q.shape[2])
        if factors is not None:
            values |= dict(cos=self._address(factors.cos), signed_sin=self._address(factors.signed_sin))
            values["pairs"] = factors.count
        return _Heads(**values)


def _float(tensor: Tensor | None) -> Tensor | None:
    """Parameters as the C code reads them. Tensors that change must be float32 already."""
    return None if tensor is None else tensor.detach().float()
