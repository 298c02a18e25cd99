"""What the layers of a converted model must know about their input: which tokens are real, where documents start, which
positions tokens have, and the cache that holds the state.

Whoever runs the layers prepares this: a family's decoder (LlamaModel, OPTDecoder). So the decoder alone, the causal
language model and the classifier all treat padding and packed documents alike.

Shapes: tokens [B,T] or embeddings [B,T,D]   attention_mask [B,S+T] with S tokens seen before   positions, resets [B,T]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache

from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.document_attention import documents_mask, uses_document_kernels
from fastweights.modeling.families import Family
from fastweights.modeling.layer import SequenceInfo
from fastweights.modeling.packing import document_mask, packed_starts
from fastweights.modeling.positions import limit_positions
from fastweights.utils.errors import Argument, FastWeightsError

# A mixin stands before a family's class; to a type checker it has that class's attributes.
Base: Any = transformers.PreTrainedModel if TYPE_CHECKING else object

# Key of the token mask among the masks that generate prepares for a static cache.
TOKEN_MASK = "fast_weights"
NO_CONTINUOUS_BATCHING = (
    "continuous batching (generate_batch, cache_implementation='paged', transformers serve --continuous-batching) "
    "pages keys and values, and a converted model has a recurrent state instead: use generate with a padded batch, or "
    "fastweights.Engine"
)


class InputError(FastWeightsError):
    """Inputs that do not fit each other, or that a converted model cannot use."""


class DecoderMixin(Base):
    """The forward of a module that runs converted layers."""

    family: Family
    config: Any

    def _run(self, forward: Any, inputs: dict[str, Any]) -> Any:
        """Call the pretrained class's forward with prepared inputs.

        Args:
            forward: the pretrained class's forward.
            inputs: its arguments by name, changed in place.
        """
        if inputs.get("cache") is not None or inputs.get("write_index") is not None:
            raise InputError(NO_CONTINUOUS_BATCHING)
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise InputError("give ", Argument("input_ids"), " or ", Argument("inputs_embeds"))
        batch, length = tokens.shape[:2]
        attention_mask = inputs.get("attention_mask")
        given = attention_mask.get(TOKEN_MASK) if isinstance(attention_mask, dict) else attention_mask
        mask = token_mask(given, batch, length, inputs.get("past_key_values"))
        reset = packed_starts(inputs, batch)
        cache = self._cache(inputs, batch, packed=reset is not None)
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = positions(batch, length, mask, cache, tokens.device)
        inputs["position_ids"] = limit_positions(self, inputs["position_ids"])
        inputs |= {"past_key_values": cache, "use_cache": cache is not None}
        inputs["attention_mask"] = self._attention_mask(inputs, reset, tokens, cache)
        info = SequenceInfo(mask, reset) if mask is not None else SequenceInfo.packed(reset)
        outputs = forward(self, **inputs, fast_weights=info)
        if cache is not None:
            cache.advance(tokens, mask)
        return outputs

    @property
    def _is_hybrid(self) -> bool:
        """Whether some layers are still attention."""
        layers = self.config.fastweights.get("layers")
        return layers is not None and len(layers) < self.config.num_hidden_layers

    def _cache(self, inputs: dict[str, Any], batch: int, packed: bool) -> FastWeightsCache | None:
        """The cache to use: the given one, a new one, or none."""
        cache, use_cache = inputs.get("past_key_values"), inputs.get("use_cache")
        if cache is None and use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        if packed and (cache is not None or use_cache):
            raise InputError("packed documents leave no state to continue from: pass ", Argument("use_cache"), "=False")
        if self.is_gradient_checkpointing and self.training:
            return None
        if cache is not None:
            return own_cache(cache, self.config, batch)
        return FastWeightsCache(self.config) if use_cache else None

    def _attention_mask(
        self, inputs: dict[str, Any], reset: Tensor | None, tokens: Tensor, cache: FastWeightsCache | None
    ) -> Any:
        """The mask for layers that are still attention. Where there are none, an empty 4-D mask keeps transformers
        from building one of T x T."""
        mask, (batch, length) = inputs.get("attention_mask"), tokens.shape[:2]
        if not self._is_hybrid:
            return torch.empty(batch, 1, length, 0, dtype=torch.bool, device=tokens.device)
        if mask is None and cache is None and uses_document_kernels(self):
            return documents_mask(tokens, reset)
        if isinstance(mask, dict):
            by_layer_type = {name: each for name, each in mask.items() if name != TOKEN_MASK}
            return by_layer_type.get("attention", by_layer_type)
        if reset is not None and not self.family.masks_documents:
            return document_mask(self, inputs["position_ids"])
        if cache is None or cache.batch_size < 0:
            return mask
        if mask is not None:
            return cache.mask_for(tokens, mask) if mask.shape[1] == length else mask
        if _can_read(tokens):
            cache.check_padding()
        return None


def _can_read(tokens: Tensor) -> bool:
    """Whether values may be read on the host: not while compiling, and not at each step of a GPU, which would wait."""
    return not torch.compiler.is_compiling() and (tokens.device.type == "cpu" or tokens.shape[1] > 1)


def check_mask(attention_mask: Tensor, batch: int, length: int, cache: Cache | None) -> None:
    """Refuse a mask that is neither of the new tokens [B,T] nor of all tokens [B,S+T].

    Raises:
        InputError: says which shapes would fit.
    """
    if attention_mask.ndim != 2:
        raise InputError(
            Argument("attention_mask"), f" must be [B,T] for a converted model, found {list(attention_mask.shape)}"
        )
    found = list(attention_mask.shape)
    if found == [batch, length] or (cache is not None and torch.compiler.is_compiling()):
        return
    seen = 0 if cache is None else int(cache.get_seq_length())
    if found != [batch, seen + length]:
        whole = f", or [{batch},{seen + length}] with the {seen} that the state has seen" if seen else ""
        raise InputError(
            Argument("attention_mask"), f" must be [{batch},{length}] like the tokens{whole}, found {found}"
        )


def token_mask(attention_mask: Tensor | None, batch: int, length: int, cache: Cache | None) -> Tensor | None:
    """True for the real tokens among the new ones, [B,T]; None when all are real."""
    if attention_mask is None:
        return None
    check_mask(attention_mask, batch, length, cache)
    mask = attention_mask[:, -length:].bool()
    return None if _can_read(mask) and bool(mask.all()) else mask


def positions(
    batch: int, length: int, mask: Tensor | None, cache: FastWeightsCache | None, device: torch.device
) -> Tensor:
    """Each token's index among the real tokens of its row, those seen before included, [B,T]."""
    seen = cache.lengths[:, None] if cache is not None and cache.lengths is not None else 0
    if mask is None:
        return torch.arange(length, device=device).expand(batch, -1) + seen
    return (mask.long().cumsum(1) - 1 + seen).clamp(min=0)


def own_cache(cache: Cache, config: Any, batch: int | None) -> FastWeightsCache:
    """The given cache, which must have `batch` rows (None: any number); a new one instead of an empty DynamicCache."""
    if isinstance(cache, FastWeightsCache):
        if batch is not None:
            cache.check_rows(batch)
        return cache
    if cache.get_seq_length() == 0:
        return FastWeightsCache(config)
    raise InputError(
        Argument("past_key_values"),
        f" is a {type(cache).__name__} of another model: start from a FastWeightsCache",
    )
