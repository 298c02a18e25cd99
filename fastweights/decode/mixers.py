"""What mixes tokens in a decode model: a rule's state, a window, full attention.

Shapes: hidden [B,D]   state [B,S,d,m]
        packed [B,P] = q | k | v of the rule | q | k | v of the window | gates | mix
        with shared projections q | k | v once; with low-rank gates their input [B,r] instead of gates and mix
        ring buffers [B,Hkv,w,d]: see context.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.decode.context import DecodeContext, RingIndex, RotaryEmbedding, RotaryFactors, ring_place
from fastweights.decode.packing import concatenate, gate_weights, qkv_linears, weight_of
from fastweights.modeling.cache import put_keys_or_values
from fastweights.modeling.layer import (
    FastWeightsAttention,
    LocalAttention,
    Projections,
    RecurrentAttention,
)
from fastweights.modeling.window import WindowCache, cached_tokens
from fastweights.ops.linear import Norm, NormSums
from fastweights.ops.step import (
    Rotary,
    has_window_kernel,
    step_kernel,
    step_torch,
    window_kernel,
)
from fastweights.rules import RULES
from fastweights.rules.feature_maps import Identity, sum_normalize, unit_normalize


class PackedHeads:
    """Queries, keys and values [B,heads,.] as views of the packed buffer; a rule and a window may share them."""

    def __init__(self, projections: Projections, packed: Tensor, start: int, rotary: RotaryEmbedding | None) -> None:
        self.projections = projections
        widths = [linear.out_features for linear in qkv_linears(projections)]
        heads = (projections.heads, projections.states, projections.states)
        self.end = start + sum(widths)
        parts = packed[:, start : self.end].split(widths, dim=1)
        self.q, self.k, self.v = (x.unflatten(1, (h, -1)) for x, h in zip(parts, heads, strict=True))
        self.queries_and_keys = packed[:, start : self.end - widths[2]].unflatten(1, (heads[0] + heads[1], -1))
        self.rotary: Rotary | None = None
        self.factors: RotaryFactors | None = None
        if projections.planes.shape[1] and rotary is not None:
            pairs = projections.planes
            self.rotary = Rotary(rotary.cos, rotary.sin, pairs)
            for_queries = pairs.repeat_interleave(heads[0] // len(pairs), dim=0)
            of_all = torch.cat([for_queries, pairs.repeat_interleave(heads[1] // len(pairs), dim=0)])
            self.factors = rotary.factors_for(of_all, self.q.shape[-1], packed.dtype)
        self.prepared: tuple[Tensor, Tensor] | None = None

    def normed_and_rotated(self) -> tuple[Tensor, Tensor]:
        """Queries and keys as attention uses them, computed once per step."""
        if self.prepared is None:
            self.prepared = self._normed_and_rotated()
        return self.prepared

    def _normed_and_rotated(self) -> tuple[Tensor, Tensor]:
        both = self.queries_and_keys
        if self.projections.q_norm is not None and self.projections.k_norm is not None:
            both = torch.cat([self.projections.q_norm(self.q), self.projections.k_norm(self.k)], dim=1)
        if self.factors is not None:
            both = self.factors.rotate(both)
        q, k = both.split([self.q.shape[1], self.k.shape[1]], dim=1)
        return q, k


class LayerInputs:
    """What a layer computes from its input: queries, keys and values of rule and window, gate logits, mix logits.

    One product computes all of it. Gates of low rank need a second, small one.
    """

    def __init__(
        self, attention: FastWeightsAttention, context: DecodeContext, norm: Norm, rotary: RotaryEmbedding | None
    ) -> None:
        rule, window, down = attention.rule, attention.window, attention.gate_down
        projections = [part.projections for part in (rule, window) if part is not None and part.projections is not None]
        qkv = [weight_of(linear) for part in projections for linear in qkv_linears(part)]
        gates = gate_weights(attention)
        weight, bias = concatenate(qkv + (gates if down is None else [weight_of(down)]))
        self.linear = context.linear(weight, bias, norm)
        self.packed = context.buffer(len(weight))
        self.heads: list[PackedHeads] = []
        start = 0
        for part in projections:
            self.heads.append(PackedHeads(part, self.packed, start, rotary))
            start = self.heads[-1].end
        self.gate_input, self.gate_linear = self.packed[:, start:], None
        self.logits = self.gate_input
        if down is not None:
            # a small product, in the model's dtype: gates are multiplied over all tokens, and so are their errors
            self.gate_linear = context.linear(*concatenate(gates), weights=None)
            self.logits = context.buffer(sum(len(weight) for weight, _ in gates))
        self.mix_logit: Tensor | None = None
        if attention.mix is not None:
            follows_token = attention.mix.from_token is not None
            logit = attention.mix.logit.detach()
            self.mix_logit = self.logits[:, -len(logit) :] if follows_token else logit

    def step(self, hidden: Tensor, sums: NormSums) -> None:
        """Compute everything from hidden [B,D] and the norm sums of its rows."""
        self.linear(hidden, self.packed, sums=sums)
        if self.gate_linear is not None:
            self.gate_linear(self.gate_input, self.logits)
        for heads in self.heads:
            heads.prepared = None


class DecodeRecurrence:
    """The state of a rule and its update from a layer's inputs.

    `fused`: the kernel also rotates, normalizes to unit length and scales. Otherwise torch prepares queries and keys
    with the layer's modules."""

    def __init__(self, rule: RecurrentAttention, context: DecodeContext, inputs: LayerInputs) -> None:
        self.rule, self.config = rule, rule.config
        self.by_position, self.positions = RULES[self.config.rule].by_position, context.positions
        self.kernels, self.overlap = context.kernels and not self.config.has_slots, context.overlap
        self.heads = inputs.heads[0]
        (batch, kv_heads, d), states = self.heads.v.shape, rule.states
        self.states_per_key = states // kv_heads
        gates = {} if self.by_position else RULES[self.config.rule].gates
        self.gate_logits, start = [], 0
        for name, width in gates.items():
            linear: Any = rule.gates[name]
            end = start + linear.out_features
            logits, start = inputs.logits[:, start:end], end
            self.gate_logits.append(logits if width == "1" else logits.unflatten(1, (states, -1)))
        dtype = torch.promote_types(context.dtype, torch.float32)
        self.state = torch.zeros(batch, *rule.state_shape, dtype=dtype, device=context.device)
        self.y = context.buffer(self.heads.q.shape[1], d)
        self.no_feature_map = type(rule.feature_map) is Identity
        plain = self.no_feature_map and not self.config.normalizes_sum and self.heads.projections.q_norm is None
        self.fused = self.kernels and plain

    def step(self) -> Tensor:
        """Update the state with the current token and return y [B,H,d]."""
        heads, normalize = self.heads, self.config.normalizes_attention
        q, k, v = (heads.q, heads.k, heads.v) if self.fused else self._features()
        arguments = (self.config.rule, self.state, q, k, v, self._gates())
        if not self.kernels:
            y = step_torch(*arguments, normalize)
        else:
            rotary, key_scale = (heads.rotary, self.rule.key_scale) if self.fused else (None, None)
            unit = self.fused and self.config.normalizes_unit
            step_kernel(*arguments, self.y, normalize, rotary, key_scale, unit, self.overlap)
            y = self.y
        return y if self.rule.output_norm is None else self.rule.output_norm(y)

    def _gates(self) -> list[Tensor]:
        if not self.by_position:
            return self.gate_logits
        return [gate(self.positions)[:, None].expand(-1, self.rule.states, -1) for gate in self.rule.gates.values()]

    def _features(self) -> tuple[Tensor, Tensor, Tensor]:
        (q, k), v = self.heads.normed_and_rotated(), self.heads.v
        if self.states_per_key > 1:
            k, v = (x.repeat_interleave(self.states_per_key, dim=1) for x in (k, v))
        if not self.no_feature_map:
            q, k = (self.rule.feature_map(x[:, None])[:, 0] for x in (q, k))
        if self.config.normalizes_sum:
            q, k = sum_normalize(q), sum_normalize(k)
        if self.config.normalizes_unit:
            q, k = unit_normalize(q), unit_normalize(k)
        if self.rule.key_scale is not None:
            k = k * self.rule.key_scale.to(k.dtype)
        return q, k, v

    def set_slot(self, slot: int, layer: Any, lengths: Tensor) -> None:
        """Overwrite a slot with the state of one sequence, from that layer's cache."""
        self.state[slot].copy_(layer.tensors["state"][0])

    def get_slot(self, slot: int, layer: Any, lengths: Tensor) -> None:
        """Write the state of a slot to a layer's cache."""
        layer.put("state", self.state[slot : slot + 1])


class DecodeWindow:
    """Softmax attention to the first n and the last w tokens, whose keys and values are in ring buffers."""

    def __init__(self, local: LocalAttention, context: DecodeContext, inputs: LayerInputs) -> None:
        self.heads, self.softcap = inputs.heads[-1], local.softcap
        self.positions, self.overlap, self.cache_dtype = context.positions, context.overlap, context.model_dtype
        self.width, self.sinks = local.sinks + local.window, local.sinks
        _, kv_heads, d = self.heads.v.shape
        self.fused = context.kernels and has_window_kernel(self.width, d, context.device)
        in_torch = not self.fused and context.program is None
        self.ring = context.ring(self.width, kv_heads, self.sinks) if in_torch else None
        self.y = context.buffer(*self.heads.q.shape[1:])
        self.keys, self.values = (context.buffer(kv_heads, self.width, d) for _ in range(2))

    def step(self, from_rule: Tensor | None = None, mix_logit: Tensor | None = None) -> Tensor:
        """Add the current token to the window and attend to it.

        Args:
            from_rule: The rule's output [B,H,d] in a layer that has both.
            mix_logit: Logit of the window's share of the mixture, [H] or [B,H]; the rest is the rule's.

        Returns:
            y [B,H,d].
        """
        if self.ring is None:
            return self._attend_with_kernel(from_rule, mix_logit)
        y = self._attend(self.ring)
        if from_rule is None or mix_logit is None:
            return y
        return torch.lerp(from_rule, y, mix_logit.sigmoid()[..., None])

    def _attend_with_kernel(self, from_rule: Tensor | None, mix_logit: Tensor | None) -> Tensor:
        heads, plain = self.heads, self.heads.projections.q_norm is None
        q, k = (heads.q, heads.k) if plain else heads.normed_and_rotated()
        arguments = (self.keys, self.values, self.positions, q, k, heads.v, self.y)
        rotary = heads.rotary if plain else None
        window_kernel(*arguments, rotary, self.softcap, from_rule, mix_logit, self.sinks, self.overlap)
        return self.y

    def _attend(self, ring: RingIndex) -> Tensor:
        q, k = self.heads.normed_and_rotated()
        for buffer, new in ((self.keys, k), (self.values, self.heads.v)):
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, ring.rows.view(-1), new.flatten(0, 1))
        logits = torch.matmul(q.unflatten(1, (self.keys.shape[1], -1)), self.keys.mT)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        weights = logits.masked_fill_(ring.empty[:, None, None], float("-inf")).softmax(-1)
        return torch.matmul(weights.to(self.values.dtype), self.values).flatten(1, 2)

    def set_slot(self, slot: int, layer: Any, lengths: Tensor) -> None:
        """Overwrite a slot with the last keys and values of one sequence of `lengths` [1] tokens."""
        past = layer.get_all(WindowCache)
        self._write(slot, past.k[0].transpose(0, 1), past.v[0].transpose(0, 1), lengths)

    def get_slot(self, slot: int, layer: Any, lengths: Tensor) -> None:
        """Write the last keys and values of a slot, whose sequence has `lengths` [1] tokens, to a layer's cache."""
        tokens = self._cached_tokens(cached_tokens(self.width - self.sinks, self.sinks), lengths)
        exists = tokens >= 0
        k, v = (x.masked_fill(~exists[:, None], 0).transpose(0, 1)[None] for x in self._read(slot, tokens))
        layer.put_all(WindowCache(k, v, exists[None]))

    def _cached_tokens(self, count: int, lengths: Tensor) -> Tensor:
        """The positions [N] of the first n and then the last tokens, N = `count` in all, of a sequence of `lengths` [1]
        tokens; of the last N if it is no longer than that. Those of tokens that do not exist are negative."""
        index = torch.arange(count, device=lengths.device)
        is_sink = (index < self.sinks) & (lengths > count)
        return torch.where(is_sink, index, lengths - count + index)

    def _write(self, slot: int, keys: Tensor, values: Tensor, lengths: Tensor) -> None:
        """Store keys and values [Hkv,N,d] of a sequence of `lengths` [1] tokens."""
        places = ring_place(self._cached_tokens(keys.shape[1], lengths), self.width, self.sinks)
        self.keys[slot].index_copy_(1, places, keys.to(self.keys.dtype))
        self.values[slot].index_copy_(1, places, values.to(self.values.dtype))

    def _read(self, slot: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [Hkv,N,d] of tokens [N]."""
        places = ring_place(tokens, self.width, self.sinks)
        k, v = (x[slot].index_select(1, places).to(self.cache_dtype) for x in (self.keys, self.values))
        return k, v


class DecodeAttention(DecodeWindow):
    """Full attention of a layer that was not converted: a window that holds the longest sequence."""

    def __init__(self, attention: FastWeightsAttention, *args: Any) -> None:
        assert attention.window is not None
        super().__init__(attention.window, *args)
        self.key_scale = attention.shape.scaling**0.5  # the other half of the logits' scale is in the queries

    def set_slot(self, slot: int, layer: Any, lengths: Tensor) -> None:
        """Overwrite a slot with the keys and values of one sequence of `lengths` [1] tokens."""
        self._write(slot, layer.keys[0] * self.key_scale, layer.values[0], lengths)

    def get_slot(self, slot: int, layer: Any, lengths: Tensor) -> None:
        """Write the keys and values of a slot, whose sequence has `lengths` [1] tokens, to a layer's cache."""
        seen = int(lengths)
        count = min(seen, layer.sliding_window - 1) if layer.is_sliding else seen
        keys, values = self._read(slot, self._cached_tokens(count, lengths))
        put_keys_or_values(layer, "keys", (keys / self.key_scale)[None])
        put_keys_or_values(layer, "values", values[None])
        if layer.is_sliding:
            layer.cumulative_length = seen
