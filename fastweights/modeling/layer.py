"""The layer that replaces attention: projections, gates, rule and state.

Shapes: x [B,T,D]   q [B,T,H,r]   k [B,T,S,r]   v [B,T,S,d]   y [B,T,H,d]   state [B,S,d,m], with slots [B,S,d+r+1,m]
H query heads, S states (S = H, or one for each key-value head), r the width of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights import ops
from fastweights.config import LOCAL, ONE_GATE, ConfigError, FastWeightsConfig
from fastweights.modeling import ablations
from fastweights.modeling.window import WindowCache, local_attention, whole_sequence_attention
from fastweights.ops.window import Documents, documents_of
from fastweights.rules import RULES
from fastweights.rules.feature_maps import MAPS, input_width, sum_normalize, unit_normalize
from fastweights.utils.errors import Argument


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options of a model's attention, independent of the names in its family.

    Attributes:
        width: model width D.
        heads: query heads H.
        kv_heads: key-value heads.
        head_dim: width d of a head.
        scaling: factor of the attention logits.
        rotary_dim: how many elements of a head RoPE rotates; 0: no RoPE.
        qkv_bias: whether the query, key and value projections have biases.
        out_bias: whether the output projection has one.
        qk_norm_eps: epsilon of the norms of queries and keys. None: no such norms.
        softcap: cap of the attention logits. None: no cap.
        sliding_window: tokens that the pretrained attention sees. None: all.
        dropout: dropout after the output projection.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    rotary_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    dropout: float = 0.0

    def window(self, config: FastWeightsConfig) -> int:
        """Window of a converted layer, in tokens: never wider than the pretrained layer's own."""
        window = int(config.window or 0)
        return window if self.sliding_window is None else min(window, self.sliding_window)


class SequenceInfo(NamedTuple):
    """What every layer must know about the tokens.

    Attributes:
        mask: [B,T] bool, True for real tokens. None: all are real.
        reset: [B,T] bool, True at document starts. None: no boundaries.
        documents: those of `reset`, so that not every layer finds them. None: a layer does.
    """

    mask: Tensor | None = None
    reset: Tensor | None = None
    documents: Documents | None = None

    @classmethod
    def packed(cls, reset: Tensor | None) -> SequenceInfo:
        """For rows of whole documents, without padding."""
        return cls(None, reset, None if reset is None else documents_of(reset))


class HeadNorm(nn.Module):
    """RMS norm over the first n elements of each head, with a weight for each: x [B,T,H,r], weight [H,n], n <= r."""

    def __init__(self, heads: int, n: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        n = self.weight.shape[1]
        head = x[..., :n].to(torch.promote_types(x.dtype, torch.float32))
        head = head * (head.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        head = head.to(x.dtype) * self.weight
        return head if n == x.shape[-1] else torch.cat([head, x[..., n:]], dim=-1)


class OutputMix(nn.Module):
    """Mix of the outputs of rule and window: sigmoid(logit) of the window for each head, the rest of the rule.

    With `width`, a linear map of the gates' input [B,T,width] is added to the logit, so that the share follows the
    token. A module of its own, so that peft can train and save it.
    """

    def __init__(self, heads: int, width: int | None = None) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.zeros(heads))
        self.from_token = None if width is None else nn.Linear(width, heads, bias=False)

    def forward(self, from_rule: Tensor, from_window: Tensor, x: Tensor) -> Tensor:
        logit = self.logit if self.from_token is None else self.logit + project(self.from_token, x)
        share = logit.sigmoid()[..., None].to(from_rule.dtype)
        return torch.lerp(from_rule, from_window.to(from_rule.dtype), share)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, pairs: Tensor) -> Tensor:
    """Apply RoPE to x, where each state uses its own choice of the model's rotary pairs.

    Args:
        x: [B,T,heads,r]: first halves of the pairs, second halves, then elements that are not rotated.
        cos, sin: [B,T,.], for all angles of the model.
        pairs: [S,P], the angles that each state uses; heads is a multiple of S.

    Returns:
        x, rotated.
    """
    pairs = pairs.repeat_interleave(x.shape[2] // pairs.shape[0], dim=0)
    cos, sin = cos[:, :, pairs].to(x.dtype), sin[:, :, pairs].to(x.dtype)
    count = pairs.shape[1]
    first, second, rest = x.split([count, count, x.shape[-1] - 2 * count], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def project(linear: Any, x: Tensor) -> Tensor:
    """Apply a Linear, also a dynamically quantized one, whose weight is a method."""
    return _project_quantized(linear, x) if callable(getattr(linear, "weight", None)) else linear(x)


def _project_quantized(linear: Any, x: Tensor) -> Tensor:
    """torch's dynamically quantized Linear takes float32 only. Made from half precision, it fails on its own bias."""
    if not getattr(linear, "has_float_bias", False):
        bias = linear.bias()
        linear.set_weight_bias(linear.weight(), None if bias is None else bias.float())
        linear.has_float_bias = True
    return linear(x.float()).to(x.dtype)


class Projections(nn.Module):
    """Queries, keys and values with the norms and RoPE of the pretrained model; queries and keys are `qk_width` wide.

    The buffer `planes` [S,P] holds the indices of the rotary pairs that each state uses (the name is part of
    checkpoints).
    """

    planes: Tensor

    def __init__(self, shape: AttentionShape, states: int, qk_width: int, rotary_pairs: int) -> None:
        super().__init__()
        self.heads, self.states = shape.heads, states
        self.q_proj = nn.Linear(shape.width, shape.heads * qk_width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.width, states * qk_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.width, states * shape.head_dim, bias=shape.qkv_bias)
        normed = min(qk_width, shape.head_dim)
        self.q_norm = self.k_norm = None
        if shape.qk_norm_eps is not None:
            self.q_norm = HeadNorm(shape.heads, normed, shape.qk_norm_eps)
            self.k_norm = HeadNorm(states, normed, shape.qk_norm_eps)
        # Empty tensors have no storage of their own, so in a checkpoint they would look tied.
        planes = torch.zeros(states, rotary_pairs, dtype=torch.long)
        self.register_buffer("planes", planes, persistent=rotary_pairs > 0)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if not self.planes.numel():  # saved by earlier versions
            state_dict.pop(f"{prefix}planes", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        q = project(self.q_proj, x).unflatten(-1, (self.heads, -1))
        k = project(self.k_proj, x).unflatten(-1, (self.states, -1))
        v = project(self.v_proj, x).unflatten(-1, (self.states, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None and self.planes.shape[1]:
            q, k = apply_rotary(q, *rotary, self.planes), apply_rotary(k, *rotary, self.planes)
        return q, k, v


class LocalAttention(nn.Module):
    """The pretrained attention, limited to a window and to the first tokens of a document (sinks)."""

    def __init__(self, shape: AttentionShape, window: int, sinks: int) -> None:
        super().__init__()
        self.window, self.sinks, self.softcap = window, sinks, shape.softcap
        self.projections = Projections(shape, shape.kv_heads, shape.head_dim, shape.rotary_dim // 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, info: SequenceInfo, layer_cache: Any) -> Tensor:
        options: dict[str, Any] = dict(
            window=self.window, mask=info.mask, reset=info.reset, softcap=self.softcap, sinks=self.sinks
        )
        if layer_cache is None:
            return whole_sequence_attention(q, k, v, documents=info.documents, **options)
        y, past = local_attention(q, k, v, past=layer_cache.get_all(WindowCache), **options)
        layer_cache.put_all(past)
        return y


class PositionWeights(nn.Module):
    """Weights that are looked up by a token's position in its document: weight [N,m], zero from position N on.

    All states of a layer have the same ones, as Linformer's projections are shared by its heads.
    """

    def __init__(self, length: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(length, m))

    def forward(self, positions: Tensor) -> Tensor:
        """The weights [...,m] of positions [...]."""
        length = len(self.weight)
        return self.weight[positions.clamp(max=length - 1)].masked_fill((positions >= length)[..., None], 0)


def positions_after(seen: Tensor, batch: int, length: int, info: SequenceInfo) -> Tensor:
    """The position of each token in its document, [B,T], where the first document continues after `seen` [B] tokens."""
    real = torch.ones(batch, length, dtype=torch.long, device=seen.device) if info.mask is None else info.mask.long()
    before = real.cumsum(1) - real
    if info.reset is None:
        return before + seen[:, None]
    # How many tokens came before the document; fewer than none in one that continues.
    start = torch.where(info.reset, before, -seen[:, None]).cummax(1).values
    return before - start


class RecurrentAttention(nn.Module):
    """An update rule with its projections (None: the window's), feature map and gates."""

    key_scale: Tensor | None

    def __init__(self, shape: AttentionShape, config: FastWeightsConfig) -> None:
        super().__init__()
        self.config = config
        self.state_shape = state_shape(shape, config)
        self.states = states = self.state_shape[0]
        self.projections: Projections | None = None
        if not config.shares_projections:
            self.projections = Projections(shape, states, qk_width(shape, config), rotary_pair_count(shape, config))
        self.feature_map = MAPS[str(config.feature_map)](states, config.m, shape.head_dim)
        self.gates = nn.ModuleDict(
            {name: self._new_gate(shape, width) for name, width in RULES[config.rule].gates.items()}
        )
        self.output_norm = HeadNorm(shape.heads, shape.head_dim) if config.output_norm else None
        self.register_buffer("key_scale", torch.ones(states, config.m) if scales_keys(config) else None)

    def _new_gate(self, shape: AttentionShape, width: str) -> nn.Module:
        config = self.config
        if RULES[config.rule].by_position:
            return PositionWeights(config.train_length, config.m)
        gates = 1 if config.has_ablation(ONE_GATE) else self.states
        outputs = gates * {"m": config.m, "d": shape.head_dim, "1": 1}[width]
        # A constant in the control of a slot would change all its weights alike, and so nothing.
        return nn.Linear(config.gate_rank or shape.width, outputs, bias=not config.has_slots)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, gate_input: Tensor, info: SequenceInfo, layer_cache: Any
    ) -> Tensor:
        config, state = self.config, None if layer_cache is None else layer_cache.get("state")
        if k.shape[2] < self.states:  # the window's, of which several states use one
            k, v = (x.repeat_interleave(self.states // k.shape[2], dim=2) for x in (k, v))
        q, k = self.feature_map(q), self.feature_map(k)
        if config.normalizes_sum:
            q, k = sum_normalize(q), sum_normalize(k)
        if config.normalizes_unit:
            q, k = unit_normalize(q), unit_normalize(k)
        if self.key_scale is not None:
            k = k * self.key_scale.to(k.dtype)
        gates = self._gates(gate_input, state, info)
        y, state = self._run(q, k, v, gates, state, mask=info.mask, reset=info.reset)
        if layer_cache is not None:
            layer_cache.put("state", state)
        return y if self.output_norm is None else self.output_norm(y)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, gate_logits: tuple[Tensor, ...], state: Tensor | None, **flags: Any
    ) -> tuple[Tensor, Tensor]:
        """The rule's outputs and new state; `flags` are mask and reset."""
        config = self.config
        for name, run in ablations.RUNS.items():
            if config.has_ablation(name):
                return run(q, k, v, gate_logits, state, **flags)
        return ops.apply(config.rule, q, k, v, gate_logits, state, config.normalizes_attention, **flags)

    def _gates(self, gate_input: Tensor, state: Tensor | None, info: SequenceInfo) -> tuple[Tensor, ...]:
        if not RULES[self.config.rule].by_position:
            return self.gate_logits(gate_input)
        batch, length = gate_input.shape[:2]
        seen = gate_input.new_zeros(batch, dtype=torch.long) if state is None else tokens_seen(state)
        positions = positions_after(seen, batch, length, info)
        return tuple(gate(positions)[:, :, None].expand(-1, -1, self.states, -1) for gate in self.gates.values())

    def gate_logits(self, gate_input: Tensor) -> tuple[Tensor, ...]:
        """The rule's gate logits [B,T,S,m], [B,T,S,d] or [B,T,S], in the order of its gates."""
        logits = []
        for name, width in RULES[self.config.rule].gates.items():
            logit = project(self.gates[name], gate_input)
            if width != "1":
                logit = logit.unflatten(-1, (self.states, -1))
            elif self.config.has_ablation(ONE_GATE):
                logit = logit.expand(*logit.shape[:-1], self.states)
            logits.append(logit)
        return tuple(logits)


def tokens_seen(state: Tensor) -> Tensor:
    """The number of tokens [B] in a state of linformer, whose last row counts them."""
    return state[:, 0, -1, 0].long()


def state_shape(shape: AttentionShape, config: FastWeightsConfig) -> tuple[int, int, int]:
    """The shape of a rule's state, [S,d,m], with one more row for a normalizer; with slots [S,d+r+1,m]."""
    states = shape.heads if config.state_heads == "query" else shape.kv_heads
    rows = RULES[config.rule].state_rows(shape.head_dim, qk_width(shape, config)) + config.normalizes_attention
    return states, rows, config.m


def qk_width(shape: AttentionShape, config: FastWeightsConfig) -> int:
    """Width r of queries and keys before the feature map: that of the pretrained ones if they attend to slots."""
    return shape.head_dim if config.has_slots else input_width(str(config.feature_map), config.m, shape.head_dim)


def scales_keys(config: FastWeightsConfig) -> bool:
    """Whether keys are multiplied by the constants `key_scale`.

    Log-spaced gates remember for very different times, so the keys are scaled by one minus their gate. The
    factor is a constant and not part of the projection: there, an optimizer's steps would be as large for the small
    rows as for the others. A sum of all values starts small, too; values that are the window's cannot be scaled, but
    the keys of the state can.
    """
    if config.rule == "decay":
        return config.spreads_gates
    return config.shares_projections and sums_values(config)


def sums_values(config: FastWeightsConfig) -> bool:
    """Whether the rule's output grows with the number of tokens, so that it must start small."""
    return config.rule == "add" and config.feature_map == "none" and not config.normalizes_attention


def rotary_pair_count(shape: AttentionShape, config: FastWeightsConfig) -> int:
    """How many rotary pairs narrower queries and keys keep: the same proportion as in the model."""
    width = qk_width(shape, config)
    if config.rotary == "drop" or not shape.rotary_dim:
        return 0
    if width >= shape.head_dim:
        return shape.rotary_dim // 2
    return max(1, width * shape.rotary_dim // shape.head_dim // 2) if width >= 2 else 0


def check_sizes(shape: AttentionShape, config: FastWeightsConfig) -> None:
    """Raise ConfigError if a setting does not fit the sizes of a model's attention."""
    if config.shares_projections and config.m != shape.head_dim and not config.has_slots:
        raise ConfigError(
            Argument("projections"),
            "='shared' needs ",
            Argument("m"),
            f" equal to the model's head dimension: found {config.m} and {shape.head_dim}; use ",
            Argument("m"),
            f"={shape.head_dim}",
        )
    if config.gate_rank is not None and config.gate_rank > shape.width:
        raise ConfigError(
            Argument("gate_rank"),
            f"={config.gate_rank} is larger than the model's width, {shape.width}: choose a smaller one, or 0 for "
            "gates of full rank",
        )


class FastWeightsAttention(nn.Module):
    """Replaces a pretrained attention module and has the same call signature.

    Args:
        shape: sizes of the pretrained attention.
        config: the settings of the conversion; the layer's own, `config.of_layer(layer_index)`, are its attribute.
        layer_index: index of the layer in the model, and of its state in the cache.

    Raises:
        ConfigError: A setting does not fit the sizes.
    """

    def __init__(self, shape: AttentionShape, config: FastWeightsConfig, layer_index: int) -> None:
        super().__init__()
        check_sizes(shape, config)
        config = config.of_layer(layer_index)
        self.shape, self.config, self.layer_idx = shape, config, layer_index
        self.rule = None if config.rule == LOCAL else RecurrentAttention(shape, config)
        self.window = LocalAttention(shape, shape.window(config), config.sinks) if config.window else None
        self.mix: OutputMix | None = None
        if self.rule is not None and self.window is not None:
            self.mix = OutputMix(shape.heads, config.gate_rank or shape.width if config.mix == "token" else None)
        # One projection for all gates and the mix: fewer parameters, and when decoding it is part of one product.
        self.gate_down = None if config.gate_rank is None else nn.Linear(shape.width, config.gate_rank, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=shape.out_bias)
        self.dropout = nn.Dropout(shape.dropout)
        # [B] or [1] bool, True for rows whose window is left out (modes.without_window). None: no row.
        self.rows_without_window: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        layer_past: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        fast_weights: SequenceInfo | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute the layer's output and update its state in the cache.

        Args:
            hidden_states: [B,T,D].
            past_key_values: a FastWeightsCache. None: starts from a zero state and discards the final one.
            layer_past: GPT-NeoX's name for `past_key_values`.
            position_embeddings: cos and sin of RoPE, for models that have it.
            fast_weights: mask and document starts. None: all tokens are real and in one document.
            **_: other arguments that families pass to attention; they have no effect.

        Returns:
            The output [B,T,D], and None in the place of attention weights.
        """
        cache = past_key_values if past_key_values is not None else layer_past
        layer_cache = None if cache is None else cache.layers[self.layer_idx]
        info = fast_weights or SequenceInfo()
        gate_input = hidden_states if self.gate_down is None else project(self.gate_down, hidden_states)
        y = qkv = None
        if self.window is not None:
            qkv = self.window.projections(hidden_states, position_embeddings)
            y = self.window(*qkv, info, layer_cache)
        if self.rule is not None:
            if self.rule.projections is not None:
                qkv = self.rule.projections(hidden_states, position_embeddings)
            assert qkv is not None
            from_rule = self.rule(*qkv, gate_input, info, layer_cache)
            y = from_rule if y is None else self._mix(from_rule, y, gate_input)
        assert y is not None
        return self.dropout(project(self.o_proj, y.flatten(2).to(hidden_states.dtype))), None

    def _mix(self, from_rule: Tensor, from_window: Tensor, gate_input: Tensor) -> Tensor:
        assert self.mix is not None
        mixed = self.mix(from_rule, from_window, gate_input)
        if self.rows_without_window is None:
            return mixed
        # The window is computed all the same: its cache goes on, and under DDP every parameter has a gradient.
        return torch.where(self.rows_without_window.to(from_rule.device)[:, None, None, None], from_rule, mixed)


def converted_layers(model: Any) -> dict[int, FastWeightsAttention]:
    """The fast-weight layers of a model by number."""
    return {module.layer_idx: module for module in model.modules() if isinstance(module, FastWeightsAttention)}
