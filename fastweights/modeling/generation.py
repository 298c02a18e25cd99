"""How transformers' generate runs a converted model: which cache it gets, and what it cannot do."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import logging

from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.inputs import NO_CONTINUOUS_BATCHING, TOKEN_MASK, Base, InputError, own_cache
from fastweights.modeling.positions import check_length

logger = logging.get_logger(__name__)

# transformers' names for caches of constant shape; the older ones are aliases of "static".
STATIC = ("static", "sliding_window", "hybrid", "hybrid_chunked")


class FastWeightsGenerationMixin(Base):
    """What generate must do differently for a causal language model with a recurrent state."""

    config: Any

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if "prompt_lookup_num_tokens" in kwargs or kwargs.get("assistant_model") is not None:
            raise InputError("assisted decoding needs a cache that can be cropped, and a recurrent state cannot be")
        return super().generate(*args, **kwargs)

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
        check_length(self, _longest_sequence(generation_config, model_kwargs.get("attention_mask")))
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


def _longest_sequence(generation_config: Any, mask: Tensor | None) -> int:
    """Positions that generating may need: real tokens so far, and all new ones but the last, which is not read."""
    if mask is None:
        return generation_config.max_length - 1
    new = generation_config.max_new_tokens
    new = generation_config.max_length - mask.shape[1] if new is None else new
    return int(mask.sum(1).max()) + new - 1
