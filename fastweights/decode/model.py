"""The decode model: one token for every slot of a batch, without the model's own modules.

Weights are packed once, all buffers are allocated once and keep their addresses, so that a step can be captured in a
CUDA graph. Layers get what they share from a `DecodeContext`.

Shapes: tokens, positions [B]   hidden [B,D]   logits [B,V]   state [B,S,d,m]
        packed [B,P] = q | k | v of the rule | q | k | v of the window | gates | mix
        with shared projections q | k | v once; with low-rank gates their input [B,r] instead of gates and mix
        ring buffers for the keys and values of a window of w tokens [B,Hkv,w,d]: token t is at t % w;
        with n sinks [B,Hkv,n+w,d]: the first n tokens stay at their places, and t >= n is at n + (t - n) % w
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastweights.config import LOCAL, ConfigError, FastWeightsConfig
from fastweights.modeling.adaptive_input import AdaptiveSoftmax
from fastweights.modeling.cache import Counts, FastWeightsCache, put_keys_or_values
from fastweights.modeling.classes import new_layer
from fastweights.modeling.families import Family
from fastweights.modeling.families.base import ModulePaths, adds_one_to_weight
from fastweights.modeling.layer import (
    FastWeightsAttention,
    LocalAttention,
    Projections,
    RecurrentAttention,
    converted_layers,
)
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import clamp_positions
from fastweights.modeling.window import WindowCache, cached_tokens
from fastweights.ops import cpu
from fastweights.ops.cpu.program import RULES as C_RULES
from fastweights.ops.cpu.program import Program
from fastweights.ops.linear import FusedLinear, Norm, NormSums, SplitKWorkspace
from fastweights.ops.packed import WEIGHTS
from fastweights.ops.step import (
    Rotary,
    can_overlap,
    has_kernels,
    has_window_kernel,
    step_kernel,
    step_torch,
    window_kernel,
)
from fastweights.rules import RULES
from fastweights.rules.feature_maps import Identity, sum_normalize, unit_normalize
from fastweights.utils.errors import Argument

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


class UnsupportedModel(ConfigError):
    """A model that the decode model cannot be built from, with the reason."""


def make_decode_model(
    model: Any,
    batch_size: int,
    kernels: bool | None = None,
    max_length: int | None = None,
    weights: str | None = None,
) -> DecodeModel | ForwardDecodeModel:
    """Return a DecodeModel where the model is supported, otherwise one that calls the model's own forward.

    Raises:
        ConfigError: `weights` is given, and the model is not supported.
    """
    try:
        return DecodeModel(model, batch_size, kernels, max_length, weights)
    except UnsupportedModel as error:
        if weights is not None:
            raise ConfigError(
                Argument("weights"),
                f"={weights!r} needs a model that the engine can pack, and this one runs its own forward: {error}; "
                "leave it out",
            ) from error
        return ForwardDecodeModel(model, batch_size, str(error))


def check_weights(model: Any, weights: str | None, kernels: bool | None = None) -> None:
    """Raise ConfigError if weights cannot be stored as `weights`, for a model on this device."""
    if weights is None:
        return
    name = Argument("weights")
    if weights not in WEIGHTS:
        raise ConfigError(name, f" must be one of {', '.join(WEIGHTS)}, found {weights!r}")
    if model.device.type != "cpu":
        raise ConfigError(name, f"={weights!r} works on a CPU only, and the model is on {model.device}: leave it out")
    if kernels:
        raise ConfigError(name, f"={weights!r} cannot be combined with ", Argument("kernels"), "=True: leave one out")


class ForwardDecodeModel:
    """The same interface through the model's own forward. It works for every converted model, but is slower."""

    static = False
    program = None

    def __init__(self, model: Any, batch_size: int, unsupported_reason: str = "") -> None:
        self.model, self.cache, self.unsupported_reason = model, FastWeightsCache(model.config), unsupported_reason
        self.tokens = torch.zeros(batch_size, dtype=torch.long, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.counts: dict[int, Counts] = {}
        self.step()  # allocates the cache for all slots
        self.positions.zero_()

    def step(self, slots: Sequence[int] | None = None) -> Tensor:
        """Feed `tokens` to the model and return the logits [B,V] of the next ones, of all slots in any case."""
        positions = clamp_positions(self.model, self.positions[:, None])  # the position of a free slot keeps growing
        with evaluating(self.model):
            out = self.model(self.tokens[:, None], past_key_values=self.cache, position_ids=positions)
        self.positions += 1
        return out.logits[:, -1]

    def set_slot(self, slot: int, cache: FastWeightsCache) -> None:
        """Overwrite a slot with the state of one sequence."""
        for own, other in zip(self.cache.layers, cache.layers, strict=True):
            for name, tensor in own.tensors.items():
                tensor[slot].copy_(other.tensors[name][0])
        assert cache.lengths is not None
        self.positions[slot : slot + 1].copy_(cache.lengths)
        self.counts[slot] = cache.counts

    @torch.no_grad()
    def get_slot(self, slot: int, tokens: Sequence[int]) -> FastWeightsCache:
        """As for `DecodeModel`."""
        cache = _cache_after(self.model.config, self.counts[slot], tokens)
        for own, other in zip(self.cache.layers, cache.layers, strict=True):
            for name, tensor in own.tensors.items():
                other.put(name, tensor[slot : slot + 1])
        return cache


class DecodeModel:
    """A converted model as packed weights and static buffers.

    Args:
        model: A converted model.
        batch_size: Number of slots B.
        kernels: Whether to use the Triton kernels. By default these on a GPU and the C code on a CPU, where they are
            supported. False: torch operators.
        max_length: Tokens of the longest sequence; needed if some layers are still attention.
        weights: What the weights of linear layers are stored as, "int8" or "bfloat16", on a CPU; by default in the
            model's dtype. Everything else is in the model's dtype.

    Raises:
        UnsupportedModel: The model is not built from the modules that its family describes.
    """

    static = True

    def __init__(
        self,
        model: Any,
        batch_size: int,
        kernels: bool | None = None,
        max_length: int | None = None,
        weights: str | None = None,
    ) -> None:
        family: Family = model.family
        parts, config = family.module_paths, model.config
        _check_supported(model)
        assert parts is not None
        self.tokens = torch.zeros(batch_size, dtype=torch.long, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.config, self.counts = config, dict[int, Counts]()
        in_c = kernels is None and c_code_unsupported_reason(model) is None
        self.program = Program(batch_size) if in_c else None
        self.context = DecodeContext(
            positions=self.positions,
            dtype=torch.float32 if in_c else model.dtype,
            kernels=has_kernels(model.device, model.dtype) if kernels is None else kernels,
            max_length=max_length,
            weights=weights,
            program=self.program,
            model_dtype=model.dtype,
        )
        self.hidden = self.context.buffer(config.hidden_size)
        self._pack_embedding(model, parts)
        self._pack_head(model, parts)
        kinds = _rotary_kinds(model, parts)
        self.rotary = {kind: RotaryEmbedding(model, parts, kind, batch_size) for kind in set(kinds)}
        self.blocks = [
            DecodeBlock(self.context, family, block, config, i, self.rotary[kinds[i]] if kinds else None)
            for i, block in enumerate(family.blocks(model))
        ]
        if self.program is not None:  # the same calls as those of a step in torch add it to the program
            self._run_blocks()

    def _pack_embedding(self, model: Any, parts: ModulePaths) -> None:
        embedding = model.get_submodule(parts.embedding)
        self.embedding: Tensor | nn.Module = embedding
        if isinstance(embedding, nn.Embedding):
            self.embedding = embedding.weight.detach()
        self.embedding_scale = None
        if parts.scales_embedding:
            self.embedding_scale = torch.tensor(model.config.hidden_size**0.5, dtype=model.dtype).item()
        self.position_table: Tensor | nn.Module | None = None
        if parts.positions is not None:
            table = model.get_submodule(parts.positions)
            self.position_table = table
            if isinstance(table, nn.Embedding):
                self.position_table = table.weight.detach()[getattr(table, "offset", 0) :]

    def _pack_head(self, model: Any, parts: ModulePaths) -> None:
        output, (batch, width) = model.get_output_embeddings(), self.hidden.shape
        self.softcap = getattr(model.config, "final_logit_softcapping", None)
        self.head: FusedLinear | AdaptiveSoftmax
        if isinstance(output, AdaptiveSoftmax):
            assert parts.final_norm is None
            self.head, norm = output, _norm(model.family.blocks(model)[0].get_submodule(parts.norm))
            # log-probabilities, which need more than half precision
            wide = torch.promote_types(self.hidden.dtype, torch.float32)
            self.logits = torch.zeros(batch, output.bounds[-1], dtype=wide, device=self.hidden.device)
        else:
            weight, bias = _weight(output)
            norm = _norm(model.get_submodule(str(parts.final_norm)))
            self.head = self.context.linear(weight, bias, norm)
            self.logits = self.context.buffer(weight.shape[0])
        self.sums = NormSums(batch, width, norm.centered, self.hidden.device)

    @torch.inference_mode()
    def step(self, slots: Sequence[int] | None = None) -> Tensor:
        """Feed `tokens` to the model and return the logits [B,V] of the next ones, always in the same buffer.

        Args:
            slots: The slots that are needed; all by default. Where the step runs in C, the other ones cost no time, and
                their logits mean nothing.
        """
        self._embed()
        for rotary in self.rotary.values():
            rotary.update(self.positions)
        for ring in self.context.rings.values():
            ring.update(self.positions)
        if self.program is None:
            self._run_blocks()
        else:
            self.program.run(slots)
        if isinstance(self.head, AdaptiveSoftmax):
            rows = slice(None) if slots is None else list(slots)
            self.logits[rows] = self.head(self.hidden[rows].to(self.context.model_dtype))
        if self.softcap is not None:
            self.logits.div_(self.softcap).tanh_().mul_(self.softcap)
        self.positions.add_(1)
        return self.logits

    def _embed(self) -> None:
        """Embed tokens and positions, into the buffer `hidden` [B,D]."""
        hidden = self.hidden
        if not isinstance(self.embedding, Tensor):
            hidden.copy_(self.embedding(self.tokens))
        elif hidden.dtype == self.embedding.dtype:
            torch.index_select(self.embedding, 0, self.tokens, out=hidden)
        else:
            hidden.copy_(self.embedding.index_select(0, self.tokens))
        if self.embedding_scale is not None:
            hidden.mul_(self.embedding_scale)
        if isinstance(self.position_table, Tensor):
            # positions="clamp", or a free slot, whose position keeps growing
            rows = self.positions.clamp(max=len(self.position_table) - 1)
            hidden.add_(self.position_table.index_select(0, rows))
        elif self.position_table is not None:
            hidden.add_(self.position_table(self.positions).to(hidden.dtype))

    def _run_blocks(self) -> None:
        self.sums.parts = 0
        for block in self.blocks:
            block.step(self.hidden, self.sums)
        if isinstance(self.head, FusedLinear):
            self.head(self.hidden, self.logits, sums=self.sums)

    @torch.no_grad()
    def set_slot(self, slot: int, cache: FastWeightsCache) -> None:
        """Overwrite a slot with the state of one sequence."""
        assert cache.lengths is not None
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            for mixer in (block.recurrence, block.window):
                if mixer is not None:
                    mixer.set_slot(slot, layer, cache.lengths)
        self.positions[slot : slot + 1].copy_(cache.lengths)
        self.counts[slot] = cache.counts

    @torch.no_grad()
    def get_slot(self, slot: int, tokens: Sequence[int]) -> FastWeightsCache:
        """Return a copy of the state in a slot.

        Args:
            slot: The slot.
            tokens: The tokens that the slot was fed since `set_slot`.
        """
        cache = _cache_after(self.config, self.counts[slot], tokens)
        assert cache.lengths is not None
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            for mixer in (block.recurrence, block.window):
                if mixer is not None:
                    mixer.get_slot(slot, layer, cache.lengths)
        return cache


def _cache_after(config: Any, before: Counts, tokens: Sequence[int]) -> FastWeightsCache:
    """A cache without a state that counts what was counted before, and the tokens."""
    cache = FastWeightsCache(config)
    cache.counts = before
    assert cache.lengths is not None
    cache.advance(torch.tensor([tokens], dtype=torch.long, device=cache.lengths.device), None)
    return cache


# what layers share


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
    """RoPE as x * stay + swapped(x) * move, with factors [B,H,r] that are computed once per step.

    A head has the first halves of its P pairs, the second halves, then elements that are not rotated.
    """

    def __init__(self, pairs: Tensor, width: int, batch_size: int, dtype: torch.dtype) -> None:
        heads, self.count = pairs.shape
        self.pairs, self.rest = pairs, width - 2 * self.count
        self.stay = torch.ones(batch_size, heads, width, dtype=dtype, device=pairs.device)
        self.move = torch.zeros_like(self.stay)

    def update(self, cos: Tensor, sin: Tensor) -> None:
        """Compute the factors from cos and sin [B,R]."""
        n, cos, sin = self.count, cos[:, self.pairs], sin[:, self.pairs]
        self.stay[..., :n], self.stay[..., n : 2 * n] = cos, cos
        self.move[..., :n], self.move[..., n : 2 * n] = -sin, sin

    def rotate(self, x: Tensor) -> Tensor:
        """Apply RoPE to x [B,H,r]."""
        first, second, rest = x.split([self.count, self.count, self.rest], dim=-1)
        swapped = torch.cat([second, first, rest] if self.rest else [second, first], dim=-1)
        return torch.addcmul(x * self.stay, swapped, self.move)


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


# what mixes tokens: a rule's state, a window, full attention


class PackedHeads:
    """Queries, keys and values [B,heads,.] as views of the packed buffer; a rule and a window may share them."""

    def __init__(self, projections: Projections, packed: Tensor, start: int, rotary: RotaryEmbedding | None) -> None:
        self.projections = projections
        widths = [linear.out_features for linear in _qkv_linears(projections)]
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
        qkv = [_weight(linear) for part in projections for linear in _qkv_linears(part)]
        gates = _gate_weights(attention)
        weight, bias = _concatenate(qkv + (gates if down is None else [_weight(down)]))
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
            self.gate_linear = context.linear(*_concatenate(gates), weights=None)
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


class DecodeBlock:
    """One block of the model: a rule, a window or full attention, and the MLP."""

    def __init__(
        self,
        context: DecodeContext,
        family: Family,
        block: nn.Module,
        config: Any,
        index: int,
        rotary: RotaryEmbedding | None,
    ) -> None:
        parts = family.module_paths
        assert parts is not None
        original = family.attention_of(block)
        converted = isinstance(original, FastWeightsAttention)
        attention: Any = original if converted else _as_window(family, original, config, index, context.max_length)

        self.program = context.program
        self.inputs = LayerInputs(attention, context, _norm(block.get_submodule(parts.norm)), rotary)
        self.recurrence: DecodeRecurrence | None = None
        if attention.rule is not None:
            self.recurrence = DecodeRecurrence(attention.rule, context, self.inputs)
        self.window: DecodeWindow | None = None
        if attention.window is not None:
            kind, source = (DecodeWindow, attention.window) if converted else (DecodeAttention, attention)
            self.window = kind(source, context, self.inputs)
        self.out_proj = context.linear(*_weight(attention.o_proj))

        self._pack_mlp(context, parts, block, config)
        self.out_norms = [
            None if path is None else _norm(block.get_submodule(path))
            for path in (parts.attention_out_norm, parts.mlp_out_norm)
        ]
        self.branch = context.buffer(config.hidden_size)
        self.parallel = bool(getattr(config, "use_parallel_residual", False))

    def _pack_mlp(self, context: DecodeContext, parts: ModulePaths, block: nn.Module, config: Any) -> None:
        name = getattr(config, parts.activation)
        if name not in ACTIVATION_NAMES:
            raise UnsupportedModel(f"the decode engine has no activation {name!r}")
        up = [_weight(block.get_submodule(path)) for path in parts.up]
        self.up_proj = context.linear(
            torch.cat([weight for weight, _ in up]),
            None if up[0][1] is None else torch.cat([bias for _, bias in up if bias is not None]),
            _norm(block.get_submodule(parts.mlp_norm)),
            activation=ACTIVATION_NAMES[name],
            gated=len(up) == 2,
        )
        self.mlp_hidden = context.buffer(len(up[0][0]))
        self.down_proj = context.linear(*_weight(block.get_submodule(parts.down)))

    def step(self, hidden: Tensor, sums: NormSums) -> None:
        """Update hidden [B,D] and the norm sums of its rows in place."""
        self.inputs.step(hidden, sums)
        if self.parallel:
            mlp = self.up_proj(hidden, self.mlp_hidden, sums=sums)
        self._add(hidden, sums, self.out_proj, self._attend().flatten(1), self.out_norms[0])
        if not self.parallel:
            mlp = self.up_proj(hidden, self.mlp_hidden, sums=sums)
        self._add(hidden, sums, self.down_proj, mlp, self.out_norms[1])

    def _attend(self) -> Tensor:
        """y [B,H,d] of the rule, of the window, or of both."""
        if self.program is not None:
            return self.program.mix(self.recurrence, self.window, self.inputs.mix_logit)
        y = None if self.recurrence is None else self.recurrence.step()
        y = y if self.window is None else self.window.step(y, self.inputs.mix_logit)
        assert y is not None
        return y

    def _add(self, hidden: Tensor, sums: NormSums, linear: FusedLinear, x: Tensor, norm: Norm | None) -> None:
        if norm is None:
            linear(x, hidden, add=True, sums=sums)
        else:
            hidden.add_(norm(linear(x, self.branch)))
            sums.parts = 0


# reading the model


def _check_supported(model: Any) -> None:
    parts, parameters = model.family.module_paths, list(model.parameters())
    if parts is None or not parts.supports(model.config):
        raise UnsupportedModel(f"the decode engine does not know this form of {model.family.name}")
    settings = FastWeightsConfig.from_dict(model.config.fastweights)
    if settings.changes_layer:
        raise UnsupportedModel(f"it has the ablation {settings.ablation}")
    for name, values in (("devices", {p.device for p in parameters}), ("dtypes", {p.dtype for p in parameters})):
        if len(values) > 1:
            raise UnsupportedModel(f"its parameters have several {name}: {', '.join(sorted(map(str, values)))}")


def c_code_unsupported_reason(model: Any) -> str | None:
    """Why a step of this model cannot run in C, as one program; None if it can. It then runs as torch operators."""
    reason = cpu.unsupported_reason(model.device, model.dtype)
    if reason is not None or model.family.module_paths is None:
        return reason or f"the engine does not know this form of {model.family.name}"
    parts = model.family.module_paths
    if parts.attention_out_norm is not None or parts.mlp_out_norm is not None:
        return "it has norms after its attention or its MLP"
    if any(getattr(module, "q_norm", None) is not None for module in model.modules()):
        return "it has norms of queries and keys"
    for layer in converted_layers(model).values():
        rule = layer.rule
        if rule is not None and rule.config.rule not in C_RULES:
            return f"it has the rule {rule.config.rule}"
        if rule is not None and (type(rule.feature_map) is not Identity or rule.config.normalizes_sum):
            return f"it has the feature map {rule.config.feature_map}"
        if rule is not None and rule.output_norm is not None:
            return "it has output_norm"
    return None


def _as_window(
    family: Family, attention: nn.Module, config: Any, index: int, max_length: int | None
) -> FastWeightsAttention:
    """An attention layer as a local one whose window holds the longest sequence."""
    others = [x for x in attention.children() if type(x) not in (nn.Linear, Conv1D)]
    unknown = [x for x in others if any(tensor.ndim > 1 for tensor in (*x.parameters(), *x.buffers()))]
    if unknown:
        raise UnsupportedModel(f"the attention of layer {index} has a {type(unknown[0]).__name__}")
    if max_length is None:
        raise UnsupportedModel(f"layer {index} is still attention, and max_length is not given")
    weight, settings = next(attention.parameters()), FastWeightsConfig(rule=LOCAL, window=max_length)
    with torch.random.fork_rng(devices=[]):  # new parameters are drawn before they are overwritten
        layer = new_layer(family, attention, config, settings, index)
    return layer.to(weight.device, weight.dtype).requires_grad_(False)


def _gate_weights(attention: FastWeightsAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weights and biases of a layer's gates, in the rule's order, and of a mix that follows the token."""
    pairs: list[tuple[Tensor, Tensor | None]] = []
    if attention.rule is not None and not RULES[attention.rule.config.rule].by_position:
        pairs += [_weight(linear) for linear in attention.rule.gates.values()]
    if attention.mix is not None and attention.mix.from_token is not None:
        pairs.append((_weight(attention.mix.from_token)[0], attention.mix.logit.detach()))
    return pairs


def _concatenate(pairs: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linear layers with the same input as one layer's."""
    bias = None
    if any(bias is not None for _, bias in pairs):
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
    return torch.cat([weight for weight, _ in pairs]), bias


def _qkv_linears(projections: Projections) -> list[Any]:
    return [projections.q_proj, projections.k_proj, projections.v_proj]


def _weight(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [N,K] and bias. Adapters and quantized layers do not have them in this form."""
    if type(linear) not in (nn.Linear, Conv1D):
        raise UnsupportedModel(f"it has a {type(linear).__name__} where a linear layer is expected")
    weight = linear.weight.detach()
    return (weight.T if type(linear) is Conv1D else weight), None if linear.bias is None else linear.bias.detach()


def _norm(norm: Any) -> Norm:
    if isinstance(norm, nn.LayerNorm):
        if norm.weight is None:
            raise UnsupportedModel("it has a layer norm without weights")
        return Norm(norm.weight.detach(), None if norm.bias is None else norm.bias.detach(), norm.eps, centered=True)
    weight = norm.weight.detach().float() + 1 if adds_one_to_weight(norm) else norm.weight.detach()
    return Norm(weight, None, getattr(norm, "variance_epsilon", None) or norm.eps, centered=False)


def _rotary_kinds(model: Any, parts: ModulePaths) -> list[str]:
    """For each layer the kind of its rotary frequencies, in models that have several; [] without rotary embedding."""
    if parts.rotary is None:
        return []
    several = isinstance(model.get_submodule(parts.rotary).rope_type, dict)
    return list(model.config.layer_types) if several else [""] * model.config.num_hidden_layers
