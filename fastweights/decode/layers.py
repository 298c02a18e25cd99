"""What a block of the lean stepper (stepper.py) attends with: a rule's state, a window, or attention that was kept.

Shapes: packed [B,P] = q | k | v | gates | window's q | k | v   state [B,S,d,m]
        keys and values of a window, rings of w tokens [B*Hkv*w,d], token t of head h of row b at (b*Hkv + h)*w + t % w
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastweights.modeling.families.base import Parts
from fastweights.modeling.layer import LocalAttention, Projections, RecurrentAttention, rotate
from fastweights.modeling.window import Past
from fastweights.ops.step import Rotary, has_window_kernel, step_kernel, step_torch, window_kernel
from fastweights.rules import RULES
from fastweights.rules.feature_maps import Identity, sum_normalize

if TYPE_CHECKING:
    from fastweights.decode.model import DecodeModel


class UnsupportedModel(Exception):
    """A model that is not built of the parts its family is known by."""


class Angles:
    """cos and sin [B,R] of this step's positions, float32."""

    def __init__(self, model: Any, parts: Parts, kind: str, batch: int) -> None:
        rotary = model.get_submodule(str(parts.rotary))
        prefix = f"{kind}_" if kind else ""
        rope_type = rotary.rope_type[kind] if kind else rotary.rope_type
        if "dynamic" in rope_type or rope_type == "longrope":  # frequencies that depend on the length
            raise UnsupportedModel
        self.frequencies: Tensor = getattr(rotary, f"{prefix}inv_freq").float().to(model.device)
        self.scaling: float = getattr(rotary, f"{prefix}attention_scaling")
        self.angle, self.cos, self.sin = (self.frequencies.new_zeros(batch, len(self.frequencies)) for _ in range(3))

    def turn(self, positions: Tensor) -> None:
        torch.mul(positions[:, None], self.frequencies, out=self.angle)
        torch.cos(self.angle, out=self.cos)
        torch.sin(self.angle, out=self.sin)
        if self.scaling != 1:
            self.cos.mul_(self.scaling)
            self.sin.mul_(self.scaling)


class Window:
    """Where in rings of this width each slot's token goes, and which places hold none yet."""

    def __init__(self, width: int, heads: int, positions: Tensor) -> None:
        self.width, batch, device = width, len(positions), positions.device
        self.first = (torch.arange(batch * heads, device=device) * width).view(batch, heads)
        self.places = torch.arange(width, device=device)
        self.place, self.row = torch.zeros_like(positions), torch.zeros_like(self.first)
        hidden = torch.zeros(batch, width, dtype=torch.bool, device=device)
        self.hidden, self.for_heads = hidden, hidden[:, None, None]
        self.moves = False  # whether anyone but a kernel, which finds all this itself, attends by it

    def move(self, positions: Tensor) -> None:
        torch.remainder(positions, self.width, out=self.place)
        torch.add(self.first, self.place[:, None], out=self.row)
        torch.gt(self.places, positions[:, None], out=self.hidden)


class Heads:
    """Queries, keys and values [B,heads,.] as views of the packed buffer."""

    def __init__(self, projections: Projections, stepper: DecodeModel, packed: Tensor, start: int, index: int) -> None:
        self.projections = projections
        widths = [linear.out_features for linear in linears_of(projections)]
        heads = (projections.heads, projections.states, projections.states)
        parts = packed[:, start : start + sum(widths)].split(widths, dim=1)
        self.q, self.k, self.v = (x.unflatten(1, (h, -1)) for x, h in zip(parts, heads, strict=True))
        self.end = start + sum(widths)
        self.rotary: Rotary | None = None
        if projections.planes.shape[1]:
            angles = stepper.angles[stepper.rotary_kinds[index]]
            self.rotary = Rotary(angles.cos, angles.sin, projections.planes)

    def normed_and_turned(self) -> tuple[Tensor, Tensor]:
        q, k = self.q, self.k
        if self.projections.q_norm is not None and self.projections.k_norm is not None:
            q, k = self.projections.q_norm(q), self.projections.k_norm(k)
        if self.rotary is not None:
            cos, sin, planes = self.rotary
            q, k = (rotate(x[:, None], cos[:, None], sin[:, None], planes)[:, 0] for x in (q, k))
        return q, k


class Rule:
    """A rule's state, and its step from the packed buffer. What a kernel does not do on the way, the layer's own
    modules do."""

    def __init__(self, rule: RecurrentAttention, stepper: DecodeModel, packed: Tensor, index: int) -> None:
        self.rule, self.config, self.decoder = rule, rule.config, stepper
        self.heads = Heads(rule.projections, stepper, packed, 0, index)
        batch, states, d = self.heads.v.shape
        self.gates, start = [], self.heads.end
        for name, width in RULES[self.config.rule].gates.items():
            end = start + rule.gates[name].out_features
            logits, start = packed[:, start:end], end
            self.gates.append(logits if width == "1" else logits.unflatten(1, (states, -1)))
        dtype = torch.promote_types(stepper.dtype, torch.float32)
        rows = d + self.config.normalizes_attention
        self.state = torch.zeros(batch, states, rows, self.config.m, dtype=dtype, device=stepper.device)
        self.y = packed.new_zeros(batch, rule.projections.heads, d)
        self.no_map = type(rule.feature_map) is Identity
        plain = self.no_map and not self.config.normalizes_sum and rule.projections.q_norm is None
        self.fused = stepper.kernels and plain

    def step(self) -> Tensor:
        heads, stepper, normalize = self.heads, self.decoder, self.config.normalizes_attention
        q, k = (heads.q, heads.k) if self.fused else self._features()
        arguments = (self.config.rule, self.state, q, k, heads.v, self.gates)
        if not stepper.kernels:
            y = step_torch(*arguments, normalize)
        else:
            turned, scaled = (heads.rotary, self.rule.key_scale) if self.fused else (None, None)
            step_kernel(*arguments, self.y, normalize, turned, scaled, stepper.overlap)
            y = self.y
        return y if self.rule.output_norm is None else self.rule.output_norm(y)

    def _features(self) -> tuple[Tensor, Tensor]:
        q, k = self.heads.normed_and_turned()
        if not self.no_map:
            q, k = (self.rule.feature_map(x[:, None])[:, 0] for x in (q, k))
        if self.config.normalizes_sum:
            q, k = sum_normalize(q), sum_normalize(k)
        if self.rule.key_scale is not None:
            k = k * self.rule.key_scale.to(k.dtype)
        return q, k

    def fill(self, slot: int, layer: Any, lengths: Tensor) -> None:
        self.state[slot].copy_(layer.tensors["state"][0])


class WindowAttention:
    def __init__(self, local: LocalAttention, stepper: DecodeModel, packed: Tensor, start: int, index: int) -> None:
        self.heads, self.softcap = Heads(local.projections, stepper, packed, start, index), local.softcap
        batch, kv_heads, d = self.heads.v.shape
        self.window = stepper.window(local.window, kv_heads)
        self.decoder, self.fused = stepper, stepper.kernels and has_window_kernel(local.window, d, stepper.device)
        self.window.moves |= not self.fused
        self.y = torch.zeros_like(self.heads.q, memory_format=torch.contiguous_format)
        self.rings = [packed.new_zeros(batch * kv_heads * local.window, d) for _ in range(2)]
        self.keys, self.values = (ring.view(batch, kv_heads, local.window, d) for ring in self.rings)

    def step(self, far: Tensor | None = None, share: Tensor | None = None) -> Tensor:
        """y [B,H,d] of the window, or a share [H,1] of that and the rest of `far`."""
        if self.fused:
            return self._step_by_kernel(far, share)
        near = self._near()
        return near if far is None or share is None else torch.lerp(far, near, share)

    def _step_by_kernel(self, far: Tensor | None, share: Tensor | None) -> Tensor:
        heads, plain = self.heads, self.heads.projections.q_norm is None
        q, k = (heads.q, heads.k) if plain else heads.normed_and_turned()
        arguments = (self.keys, self.values, self.decoder.positions, q, k, heads.v, self.y)
        turned = heads.rotary if plain else None
        window_kernel(*arguments, turned, self.softcap, far, share, self.decoder.overlap)
        return self.y

    def _near(self) -> Tensor:
        q, k = self.heads.normed_and_turned()
        for ring, new in zip(self.rings, (k, self.heads.v), strict=True):
            ring.index_copy_(0, self.window.row.view(-1), new.flatten(0, 1))
        logits = torch.matmul(q.unflatten(1, (self.keys.shape[1], -1)), self.keys.mT)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        weights = logits.masked_fill_(self.window.for_heads, float("-inf")).softmax(-1)
        return torch.matmul(weights.to(self.values.dtype), self.values).flatten(1, 2)

    def fill(self, slot: int, layer: Any, lengths: Tensor) -> None:
        past = layer.get_all(Past)
        self.fill_with(slot, past.k[0].transpose(0, 1), past.v[0].transpose(0, 1), lengths)

    def fill_with(self, slot: int, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Keys and values [Hkv,n,d] of the last n tokens."""
        count = keys.shape[1]
        places = (lengths - count + self.window.places[:count]) % self.window.width
        rows = (self.window.first[slot][:, None] + places).view(-1)
        for ring, held in zip(self.rings, (keys, values), strict=True):
            ring.index_copy_(0, rows, held.flatten(0, 1))


class RetainedAttention:
    """Attention as it was, by a window that holds the longest text: filled with the model's own keys and values."""

    def __init__(self, window: WindowAttention, scaling: float) -> None:
        self.window, self.key_scale = window, scaling**0.5  # the other half of the logits' scale is in the queries
        self.step = window.step

    def fill(self, slot: int, layer: Any, lengths: Tensor) -> None:
        self.window.fill_with(slot, layer.keys[0] * self.key_scale, layer.values[0], lengths)


def linears_of(projections: Projections) -> list[Any]:
    return [projections.q_proj, projections.k_proj, projections.v_proj]


def rotary_kinds(model: Any, parts: Parts) -> list[str]:
    """For each layer the kind of its rotary frequencies, where a model has several."""
    layers = model.config.num_hidden_layers
    if parts.rotary is None:
        return []
    several = isinstance(model.get_submodule(parts.rotary).rope_type, dict)
    return list(model.config.layer_types) if several else [""] * layers
