"""One token for every slot of a batch without the model's modules: weights packed once, static buffers, few calls.

Shapes: tokens, positions [B]   hidden [B,D]   packed [B,P]   logits [B,V]; what a block attends with: step_parts.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastweights.config import LOCAL, FastWeightsConfig
from fastweights.decode.layers import (
    Angles,
    RetainedAttention,
    Rule,
    UnsupportedModel,
    Window,
    WindowAttention,
    linears_of,
    rotary_kinds,
)
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.classes import new_layer
from fastweights.modeling.families import Family
from fastweights.modeling.families.base import Parts, stored_less_one
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.ops.linear import Linear, Norm, NormSums, Scratch
from fastweights.ops.step import can_overlap, has_kernels

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def make_decode_model(
    model: Any, batch: int, kernels: bool | None = None, longest: int | None = None
) -> DecodeModel | ForwardDecodeModel:
    """The lean stepper where the model can be described, the model's own forward for any other."""
    try:
        return DecodeModel(model, batch, kernels, longest)
    except UnsupportedModel:
        return ForwardDecodeModel(model, batch)


class ForwardDecodeModel:
    """The same by the model's own forward: right for everything, and slower."""

    static = False

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.cache = model, FastWeightsCache(model.config)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.step()
        self.positions.zero_()

    def step(self) -> Tensor:
        positions = self.positions[:, None]
        limit = self.model.family.learned_positions
        if limit:  # a slot that is free counts on
            positions = positions.clamp(max=getattr(self.model.config, limit) - 1)
        out = self.model(self.tokens[:, None], past_key_values=self.cache, position_ids=positions)
        self.positions += 1
        return out.logits[:, -1]

    def fill(self, slot: int, cache: FastWeightsCache) -> None:
        for own, other in zip(self.cache.layers, cache.layers, strict=True):
            for name, held in own.tensors.items():
                held[slot].copy_(other.tensors[name][0])
        assert cache.lengths is not None
        self.positions[slot : slot + 1].copy_(cache.lengths)


class DecodeModel:
    """`kernels`: Triton's; by default where they can be used. `longest`: tokens of the longest text, for layers that
    are still attention. Every address is the same at every step."""

    static = True

    def __init__(self, model: Any, batch: int, kernels: bool | None = None, longest: int | None = None) -> None:
        family: Family = model.family
        parts, config = family.parts, model.config
        devices, dtypes = {p.device for p in model.parameters()}, {p.dtype for p in model.parameters()}
        if parts is None or not parts.holds(config) or len(devices) > 1 or len(dtypes) > 1:
            raise UnsupportedModel
        self.device, self.dtype = model.device, model.dtype
        self.kernels = has_kernels(self.device, self.dtype) if kernels is None else kernels
        self.overlap = self.kernels and can_overlap(self.device)
        self.scratch = Scratch(self.device) if self.kernels else None
        self.tokens = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.positions = torch.zeros_like(self.tokens)
        self.hidden = torch.zeros(batch, config.hidden_size, dtype=self.dtype, device=self.device)
        self._read_ends(model, parts)
        self.rotary_kinds = rotary_kinds(model, parts)
        self.angles = {kind: Angles(model, parts, kind, batch) for kind in set(self.rotary_kinds)}
        self.windows: dict[tuple[int, int], Window] = {}
        self.longest = longest
        self.blocks = [_Block(self, family, block, config, i) for i, block in enumerate(family.blocks(model))]

    def _read_ends(self, model: Any, parts: Parts) -> None:
        config, head = model.config, model.get_output_embeddings()
        self.embedding: Tensor = model.get_submodule(parts.embedding).weight.detach()
        self.embedding_scale = None
        if parts.scales_embedding:
            self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype).item()
        self.position_table: Tensor | None = None
        if parts.positions is not None:
            table = model.get_submodule(parts.positions)
            self.position_table = table.weight.detach()[getattr(table, "offset", 0) :]
        weight, bias = _weight(head)
        norm = _norm(model.get_submodule(parts.final_norm))
        self.head = self.linear(weight, bias, norm)
        batch, width = self.hidden.shape
        self.sums = NormSums(batch, width, norm.centred, self.device)
        self.logits = self.hidden.new_zeros(batch, weight.shape[0])
        self.softcap = getattr(config, "final_logit_softcapping", None)

    def linear(self, weight: Tensor, bias: Tensor | None, norm: Norm | None = None, **options: Any) -> Linear:
        options |= dict(kernel=self.kernels, overlap=self.overlap, scratch=self.scratch)
        return Linear(weight, bias, norm, **options)

    def window(self, width: int, heads: int) -> Window:
        if (width, heads) not in self.windows:
            self.windows[width, heads] = Window(width, heads, self.positions)
        return self.windows[width, heads]

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Take in the tokens; logits [B,V] of the next ones, in the buffer they are always in."""
        hidden = torch.index_select(self.embedding, 0, self.tokens, out=self.hidden)
        if self.embedding_scale is not None:
            hidden.mul_(self.embedding_scale)
        if self.position_table is not None:  # beyond the table: a clamped model, or a slot that is free and counts on
            rows = self.positions.clamp(max=len(self.position_table) - 1)
            hidden.add_(self.position_table.index_select(0, rows))
        self.sums.parts = 0
        for angles in self.angles.values():
            angles.turn(self.positions)
        for window in self.windows.values():
            if window.moves:
                window.move(self.positions)
        for block in self.blocks:
            block.step(hidden, self.sums)
        self.head(hidden, self.logits, sums=self.sums)
        if self.softcap is not None:
            self.logits.div_(self.softcap).tanh_().mul_(self.softcap)
        self.positions.add_(1)
        return self.logits

    @torch.no_grad()
    def fill(self, slot: int, cache: FastWeightsCache) -> None:
        """Overwrite a slot with the state of one text."""
        assert cache.lengths is not None
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            for part in (block.rule, block.window):
                if part is not None:
                    part.fill(slot, layer, cache.lengths)
        self.positions[slot : slot + 1].copy_(cache.lengths)


class _Block:
    def __init__(self, stepper: DecodeModel, family: Family, block: nn.Module, config: Any, index: int) -> None:
        parts = family.parts
        assert parts is not None
        own = family.attention_of(block)
        kept = not isinstance(own, FastWeightsAttention)
        attention = _as_window(family, own, config, index, stepper.longest) if kept else own
        assert isinstance(attention, FastWeightsAttention)
        activation = ACTIVATION_NAMES.get(getattr(config, parts.activation))
        if activation is None:
            raise UnsupportedModel
        packed = _Packed(attention)
        self.inner = stepper.linear(packed.weight, packed.bias, _norm(block.get_submodule(parts.norm)))
        self.packed = stepper.hidden.new_zeros(len(stepper.hidden), len(packed.weight))
        self.rule = None if attention.rule is None else Rule(attention.rule, stepper, self.packed, index)
        start = packed.rule_width
        self.window: WindowAttention | RetainedAttention | None = None
        if attention.window is not None:
            self.window = WindowAttention(attention.window, stepper, self.packed, start, index)
            if kept:
                self.window = RetainedAttention(self.window, attention.shape.scaling)
        self.share = None if attention.mix is None else attention.mix.logit.detach().sigmoid()[:, None]
        self.outer = stepper.linear(*_weight(attention.o_proj))
        up = [_weight(block.get_submodule(path)) for path in parts.up]
        self.up = stepper.linear(
            torch.cat([weight for weight, _ in up]),
            None if up[0][1] is None else torch.cat([bias for _, bias in up if bias is not None]),
            _norm(block.get_submodule(parts.mlp_norm)),
            activation=activation,
            gated=len(up) == 2,
        )
        self.middle = stepper.hidden.new_zeros(len(stepper.hidden), len(up[0][0]))
        self.down = stepper.linear(*_weight(block.get_submodule(parts.down)))
        self.out_norms = [
            None if path is None else _norm(block.get_submodule(path))
            for path in (parts.attention_out_norm, parts.mlp_out_norm)
        ]
        self.aside = torch.zeros_like(stepper.hidden)
        self.parallel = bool(getattr(config, "use_parallel_residual", False))

    def step(self, hidden: Tensor, sums: NormSums) -> None:
        """hidden [B,D] in place, and its sums with it."""
        self.inner(hidden, self.packed, sums=sums)
        if self.parallel:
            middle = self.up(hidden, self.middle, sums=sums)
        self._add(hidden, sums, self.outer, self._attend().flatten(1), self.out_norms[0])
        if not self.parallel:
            middle = self.up(hidden, self.middle, sums=sums)
        self._add(hidden, sums, self.down, middle, self.out_norms[1])

    def _attend(self) -> Tensor:
        """y [B,H,d] of the rule, of the window, or of both."""
        far = None if self.rule is None else self.rule.step()
        y = far if self.window is None else self.window.step(far, self.share)
        assert y is not None
        return y

    def _add(self, hidden: Tensor, sums: NormSums, linear: Linear, x: Tensor, norm: Norm | None) -> None:
        if norm is None:
            linear(x, hidden, add=True, sums=sums)
        else:
            hidden.add_(norm(linear(x, self.aside)))
            sums.parts = 0


def _as_window(
    family: Family, attention: nn.Module, config: Any, index: int, longest: int | None
) -> FastWeightsAttention:
    """A layer that is still attention, as one whose window holds the longest text."""
    strange = [x for x in attention.children() if type(x) not in (nn.Linear, Conv1D)]
    if longest is None or any(held.ndim > 1 for x in strange for held in (*x.parameters(), *x.buffers())):
        raise UnsupportedModel
    weight, settings = next(attention.parameters()), FastWeightsConfig(rule=LOCAL, window=longest)
    with torch.random.fork_rng(devices=[]):  # new parameters are drawn before they are overwritten
        layer = new_layer(family, attention, config, settings, index)
    return layer.to(weight.device, weight.dtype).requires_grad_(False)


class _Packed:
    """One weight for all that a layer's attention makes of its input."""

    def __init__(self, attention: FastWeightsAttention) -> None:
        linears: list[Any] = []
        if attention.rule is not None:
            linears += [*linears_of(attention.rule.projections), *attention.rule.gates.values()]
        self.rule_width = sum(linear.out_features for linear in linears)
        if attention.window is not None:
            linears += linears_of(attention.window.projections)
        pairs = [_weight(linear) for linear in linears]
        self.weight = torch.cat([weight for weight, _ in pairs])
        self.bias = None
        if any(bias is not None for _, bias in pairs):
            self.bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])


def _weight(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [N,K] and bias; an adapter or a quantized layer has neither in this form."""
    if type(linear) not in (nn.Linear, Conv1D):
        raise UnsupportedModel
    weight = linear.weight.detach()
    return (weight.T if type(linear) is Conv1D else weight), None if linear.bias is None else linear.bias.detach()


def _norm(norm: Any) -> Norm:
    if isinstance(norm, nn.LayerNorm):
        if norm.weight is None:
            raise UnsupportedModel
        return Norm(norm.weight.detach(), None if norm.bias is None else norm.bias.detach(), norm.eps, centred=True)
    weight = norm.weight.detach().float() + 1 if stored_less_one(norm) else norm.weight.detach()
    return Norm(weight, None, getattr(norm, "variance_epsilon", None) or norm.eps, centred=False)
