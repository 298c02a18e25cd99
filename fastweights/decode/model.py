"""The decode model: one token for every slot of a batch, without the model's own modules.

Weights are packed once, all buffers are allocated once and keep their addresses, so that a step can be captured in a
CUDA graph. Layers get what they share from a `DecodeContext` (context.py). block.py and mixers.py have the layers.

Shapes: tokens, positions [B]   hidden [B,D]   logits [B,V]   state [B,S,d,m]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.config import ConfigError, FastWeightsConfig
from fastweights.decode.block import DecodeBlock
from fastweights.decode.context import DecodeContext, RotaryEmbedding, rotary_kinds
from fastweights.decode.packing import UnsupportedModel, norm_of, weight_of
from fastweights.modeling.adaptive_input import AdaptiveSoftmax
from fastweights.modeling.cache import Counts, FastWeightsCache
from fastweights.modeling.families import Family
from fastweights.modeling.families.base import ModulePaths
from fastweights.modeling.layer import (
    converted_layers,
)
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import clamp_positions
from fastweights.ops import cpu
from fastweights.ops.cpu.program import RULES as C_RULES
from fastweights.ops.cpu.program import Program
from fastweights.ops.linear import FusedLinear, NormSums
from fastweights.ops.packed import WEIGHTS
from fastweights.ops.step import (
    has_kernels,
)
from fastweights.rules.feature_maps import Identity
from fastweights.utils.errors import Argument


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
        kinds = rotary_kinds(model, parts)
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
            self.head, norm = output, norm_of(model.family.blocks(model)[0].get_submodule(parts.norm))
            # log-probabilities, which need more than half precision
            wide = torch.promote_types(self.hidden.dtype, torch.float32)
            self.logits = torch.zeros(batch, output.bounds[-1], dtype=wide, device=self.hidden.device)
        else:
            weight, bias = weight_of(output)
            norm = norm_of(model.get_submodule(str(parts.final_norm)))
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
