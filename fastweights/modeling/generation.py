"""How transformers' generate runs a converted model: which cache it gets, and what it cannot do."""

from __future__ import annotations

from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.inputs import NO_CONTINUOUS_BATCHING, TOKEN_MASK, Base, InputError, check_mask, own_cache
from fastweights.modeling.positions import check_length
from fastweights.utils.errors import Argument

logger = logging.get_logger(__name__)

# transformers' names for caches of constant shape; the older ones are aliases of "static".
STATIC = ("static", "sliding_window", "hybrid", "hybrid_chunked")


class FastWeightsGenerationMixin(Base):
    """What generate must do differently for a causal language model with a recurrent state."""

    config: Any

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, and the input may be only the new tokens after a state (`past_key_values`).

        An input that begins with the tokens that the state has seen is the whole sequence. Any other holds new tokens.
        """
        if "prompt_lookup_num_tokens" in kwargs or kwargs.get("assistant_model") is not None:
            raise InputError("assisted decoding needs a cache that can be cropped, and a recurrent state cannot be")
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        tokens = kwargs.get("input_ids") if inputs is None else inputs
        if _has_started(cache):
            _check_embeddings(kwargs.get("inputs_embeds"), cache)
            if tokens is not None and mask is not None:
                kwargs["attention_mask"] = _continuing_mask(tokens, mask, cache)
        return super().generate(inputs, *args, **kwargs)

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Called where no mask was given."""
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        cache = model_kwargs.get("past_key_values")
        is_ids = inputs_tensor.ndim == 2
        return _continuing_mask(inputs_tensor, mask, cache) if is_ids and _has_started(cache) else mask

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict,
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
    ) -> None:
        kind, cache = generation_config.cache_implementation, model_kwargs.get("past_key_values")
        if kind == "paged":
            raise InputError(NO_CONTINUOUS_BATCHING)
        if kind not in (None, "dynamic", *STATIC):
            logger.warning_once(
                f"cache_implementation={kind!r} is for attention and is ignored: a converted model has a state of "
                "constant size"
            )
        check_length(self, _longest_sequence(generation_config, model_kwargs["position_ids"]))
        if cache is not None:
            model_kwargs["past_key_values"] = own_cache(cache, self.config, None)
            model_kwargs["past_key_values"]._is_user_defined = True
        elif generation_config.use_cache is not False:
            longest = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            model_kwargs["past_key_values"] = FastWeightsCache(self.config, longest if kind in STATIC else None)

    @staticmethod
    def create_masks_for_generate(
        config: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Any, **kwargs: Any
    ) -> dict[str, Tensor | None]:
        """The masks of one step with a static cache: they have the same shape at every step, so that a compiled step
        is compiled once. The token mask [B,T] is for converted layers, the others are for layers that are attention."""
        length = inputs_embeds.shape[1]
        new = None if attention_mask is None else attention_mask[:, -length:]
        # a clone, since the strides of a slice would differ from step to step
        masks = {TOKEN_MASK: None if new is None else new.clone(memory_format=torch.contiguous_format)}
        if not past_key_values.attention_layers:
            return masks
        kwargs = {name: kwargs[name] for name in ("position_ids",) if name in kwargs}
        made = create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, **kwargs)
        return masks | (made if isinstance(made, dict) else {"attention": made})

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: its paged cache has no recurrent state."""
        raise InputError(NO_CONTINUOUS_BATCHING)

    continuous_batching_context_manager = init_continuous_batching
    generate_batch = init_continuous_batching


def _has_started(cache: Any) -> TypeGuard[FastWeightsCache]:
    """Whether a cache is a state that has seen tokens."""
    return isinstance(cache, FastWeightsCache) and int(cache.get_seq_length()) > 0


def _continuing_mask(input_ids: Tensor, mask: Tensor, cache: FastWeightsCache) -> Tensor:
    """The mask of all tokens. transformers takes input_ids as the new tokens if they are fewer than those of the mask,
    and as the whole sequence otherwise.

    Args:
        input_ids: the whole sequence, or only the new tokens [B,T].
        mask: of input_ids [B,T], or of all tokens [B,S+T].
        cache: the state, which has seen S tokens.
    """
    seen, (rows, length) = int(cache.get_seq_length()), input_ids.shape
    check_mask(mask, rows, length, cache)
    if mask.shape[1] > length:
        return mask
    known = cache.is_start_of(input_ids)
    whole = length > seen if known is None else known
    if whole and length == seen:
        raise InputError(
            Argument("input_ids"),
            f" are the {seen} tokens that the state has seen already: give new ones, or, to process these again, ",
            Argument("attention_mask"),
            "=cache.mask_for(input_ids, attention_mask)",
        )
    if length > seen and not whole:
        logger.warning_once(
            f"input_ids do not begin with the {seen} tokens that the state has seen: all {length} are processed as new "
            "tokens after those. To say so yourself, pass attention_mask=cache.mask_for(input_ids, attention_mask)."
        )
    return mask if whole else cache.mask_for(input_ids, mask)


def _check_embeddings(embeddings: Tensor | None, cache: FastWeightsCache) -> None:
    """transformers takes embeddings [B,T,D] as those of the whole sequence."""
    seen = int(cache.get_seq_length())
    if embeddings is not None and embeddings.shape[1] <= seen:
        raise InputError(
            Argument("inputs_embeds"),
            f" hold {embeddings.shape[1]} tokens and the state has seen {seen}: generate needs the embeddings of the "
            "whole sequence; give new tokens as ",
            Argument("input_ids"),
        )


def _longest_sequence(generation_config: Any, position_ids: Tensor) -> int:
    """Positions that generating may need: real tokens so far, and all new ones but the last, which is not read.

    Args:
        generation_config: that of the call.
        position_ids: the positions of all tokens so far, also of those that only a state has seen.
    """
    new = generation_config.max_new_tokens
    new = generation_config.max_length - position_ids.shape[1] if new is None else new
    return int(position_ids.max()) + new
