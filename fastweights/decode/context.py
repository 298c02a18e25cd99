"""What the layers of a decode model share: buffers, rotary embeddings and the places of ring buffers.

Everything is allocated once and updated once per step.

Shapes: positions [B]   cos, sin [B,R]
        ring buffers for the keys and values of a window of w tokens [B,Hkv,w,d]: token t is at t % w;
        with n sinks [B,Hkv,n+w,d]: the first n tokens stay at their places, and t >= n is at n + (t - n) % w
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastweights.decode.packing import UnsupportedModel
from fastweights.modeling.families.base import ModulePaths
from fastweights.ops.cpu.program import Program
from fastweights.ops.linear import FusedLinear, Norm, SplitKWorkspace
from fastweights.ops.step import (
    can_overlap,
)


@dataclass
class DecodeContext:
    """What the layers of a decode model share: sizes, options, and buffers that are updated once per step."""

    positions: Tensor
    dtype: torch.dtype
    kernels: bool
    max_length: int | None
    weights: str | None = None
    program: Program | None = None
    model_dtype: torch.dtype = torch.float32
    rings: dict[tuple[int, int, int], RingIndex] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch_size, self.device = len(self.positions), self.positions.device
        self.overlap = self.kernels and can_overlap(self.device)
        self.workspace = SplitKWorkspace(self.device) if self.kernels else None
        in_torch = not self.kernels and self.program is None
        self.packed_rows = self.batch_size if self.device.type == "cpu" and in_torch else None

    def buffer(self, *shape: int) -> Tensor:
        """A static buffer [B,*shape]."""
        return torch.zeros(self.batch_size, *shape, dtype=self.dtype, device=self.device)

    def linear(self, weight: Tensor, bias: Tensor | None, norm: Norm | None = None, **options: Any) -> FusedLinear:
        """A linear layer [out,in] with the kernels and the workspace of this model."""
        options = dict(packed_rows=self.packed_rows, weights=self.weights) | options
        options |= dict(kernel=self.kernels, overlap=self.overlap, workspace=self.workspace)
        options["program"] = self.program
        return FusedLinear(weight, bias, norm, **options)

    def ring(self, width: int, heads: int, sinks: int) -> RingIndex:
        """The index that all layers with ring buffers of this shape share."""
        if (width, heads, sinks) not in self.rings:
            self.rings[width, heads, sinks] = RingIndex(width, heads, sinks, self.positions)
        return self.rings[width, heads, sinks]


class RotaryEmbedding:
    """cos and sin [B,R] of the current positions, float32."""

    def __init__(self, model: Any, parts: ModulePaths, kind: str, batch_size: int) -> None:
        rotary = model.get_submodule(str(parts.rotary))
        prefix = f"{kind}_" if kind else ""
        rope_type = rotary.rope_type[kind] if kind else rotary.rope_type
        if "dynamic" in rope_type or rope_type == "longrope":
            raise UnsupportedModel(f"its rotary frequencies depend on the length (rope_type {rope_type!r})")
        self.frequencies: Tensor = getattr(rotary, f"{prefix}inv_freq").float().to(model.device)
        self.scaling: float = getattr(rotary, f"{prefix}attention_scaling")
        shape = batch_size, len(self.frequencies)
        self.angle, self.cos, self.sin = (self.frequencies.new_zeros(shape) for _ in range(3))
        self.factors: dict[tuple[Any, ...], RotaryFactors] = {}

    def update(self, positions: Tensor) -> None:
        """Compute cos and sin of the positions [B]."""
        torch.mul(positions[:, None], self.frequencies, out=self.angle)
        torch.cos(self.angle, out=self.cos)
        torch.sin(self.angle, out=self.sin)
        if self.scaling != 1:
            self.cos.mul_(self.scaling)
            self.sin.mul_(self.scaling)
        for factors in self.factors.values():
            factors.update(self.cos, self.sin)

    def factors_for(self, pairs: Tensor, width: int, dtype: torch.dtype) -> RotaryFactors:
        """The factors for heads of a width whose rotary pairs are `pairs` [H,P]. Layers with the same pairs share them.

        Only for torch: the kernels compute this from cos and sin.
        """
        key = (width, dtype, pairs.shape, *pairs.flatten().tolist())
        if key not in self.factors:
            self.factors[key] = RotaryFactors(pairs, width, len(self.cos), dtype)
        return self.factors[key]


class RotaryFactors:
    """RoPE as x * cos + swapped(x) * signed_sin, with factors [B,H,r] that are computed once per step.

    A head has the first halves of its P pairs, the second halves, then elements that are not rotated.
    """

    def __init__(self, pairs: Tensor, width: int, batch_size: int, dtype: torch.dtype) -> None:
        heads, self.count = pairs.shape
        self.pairs, self.rest = pairs, width - 2 * self.count
        self.cos = torch.ones(batch_size, heads, width, dtype=dtype, device=pairs.device)
        self.signed_sin = torch.zeros_like(self.cos)

    def update(self, cos: Tensor, sin: Tensor) -> None:
        """Compute the factors from cos and sin [B,R]."""
        n, cos, sin = self.count, cos[:, self.pairs], sin[:, self.pairs]
        self.cos[..., :n], self.cos[..., n : 2 * n] = cos, cos
        self.signed_sin[..., :n], self.signed_sin[..., n : 2 * n] = -sin, sin

    def rotate(self, x: Tensor) -> Tensor:
        """Apply RoPE to x [B,H,r]."""
        first, second, rest = x.split([self.count, self.count, self.rest], dim=-1)
        swapped = torch.cat([second, first, rest] if self.rest else [second, first], dim=-1)
        return torch.addcmul(x * self.cos, swapped, self.signed_sin)


def ring_place(token: Tensor, width: int, sinks: int) -> Tensor:
    """The place of a token in a ring buffer of this width, whose first places belong to the sinks. Tokens before the
    first one, which do not exist, get places that are still empty."""
    return torch.where(token < sinks, token % width, sinks + (token - sinks) % (width - sinks))


class RingIndex:
    """Where in ring buffers of this width (sinks included) each slot's token is written, and which places are still
    empty.

    Only for attention in torch: the kernel computes this from the positions."""

    def __init__(self, width: int, heads: int, sinks: int, positions: Tensor) -> None:
        self.width, self.sinks, batch, device = width, sinks, len(positions), positions.device
        self.offsets = (torch.arange(batch * heads, device=device) * width).view(batch, heads)
        self.places = torch.arange(width, device=device)
        self.place, self.rows = torch.zeros_like(positions), torch.zeros_like(self.offsets)
        self.empty = torch.zeros(batch, width, dtype=torch.bool, device=device)

    def update(self, positions: Tensor) -> None:
        """Compute the places of the tokens at the positions [B]."""
        self.place.copy_(ring_place(positions, self.width, self.sinks))
        torch.add(self.offsets, self.place[:, None], out=self.rows)
        torch.gt(self.places, positions[:, None], out=self.empty)


def rotary_kinds(model: Any, parts: ModulePaths) -> list[str]:
    """For each layer the kind of its rotary frequencies, in models that have several; [] without rotary embedding."""
    if parts.rotary is None:
        return []
    several = isinstance(model.get_submodule(parts.rotary).rope_type, dict)
    return list(model.config.layer_types) if several else [""] * model.config.num_hidden_layers
