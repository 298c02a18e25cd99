"""Converted models as registered Hugging Face classes, one for each family, made from the family's own class.

A converted model is the pretrained class with some attention modules replaced: everything else (embeddings, losses,
sharding, checkpointing, generate) is inherited.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache

from fastweights.config import MODEL_TYPE_PREFIX, FastWeightsConfig
from fastweights.modeling.cache import FastWeightsCache
from fastweights.modeling.families import FAMILIES, Family, family_of
from fastweights.modeling.initialization import initialize
from fastweights.modeling.layer import FastWeightsAttention, SequenceInfo
from fastweights.modeling.packing import _document_starts, _positions, document_mask
from fastweights.utils.errors import CheckpointError


def new_layer(
    family: Family, old: nn.Module, model_config: Any, settings: FastWeightsConfig, index: int
) -> FastWeightsAttention:
    """The layer that takes an attention module's place, with numbers made from it (none yet on the meta device)."""
    shape = family.shape(old, model_config)
    layer = FastWeightsAttention(shape, settings, index)
    if not next(old.parameters()).is_meta:
        initialize(layer, family.weights(old, shape))
    return layer


def check_tensors(source: Any, info: dict[str, Any], extra_is_error: bool) -> None:
    """Refuse a checkpoint from which transformers could not fill a model (it would leave random numbers there)."""
    problems = [
        f"{what}: {', '.join(sorted(map(str, info[key])))}"
        for what, key in (
            ("missing tensors", "missing_keys"),
            ("tensors the model does not have", "unexpected_keys" if extra_is_error else ""),
            ("tensors of another shape", "mismatched_keys"),
            ("tensors that could not be converted", "error_msgs"),
        )
        if info.get(key)
    ]
    if problems:
        raise CheckpointError(f"the checkpoint {source} does not fit its config.json; {'; '.join(problems)}")


# The mixin stands before a family's class; to a type checker it has that class's attributes.
_Base: Any = transformers.PreTrainedModel if TYPE_CHECKING else object


def keep_softcap(config: Any) -> None:
    """transformers 5.17 takes SDPA for Gemma 2, too, which leaves the cap of its attention's logits out."""
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        config._attn_implementation = "eager"


class FastWeightsMixin(_Base):
    """What converted models do differently from the class they come from."""

    family: Family
    config: Any
    _is_stateful = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        keep_softcap(config)
        settings = FastWeightsConfig.from_dict(config.fastweights)
        for index, block in enumerate(self.family.blocks(self)):
            if settings.converts(index):
                old = self.family.attention_of(block)
                setattr(block, self.family.attention, new_layer(self.family, old, config, settings, index))

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but a missing, extra or misshapen tensor is an error."""
        model, info = super().from_pretrained(
            *args, **kwargs | {"output_loading_info": True, "ignore_mismatched_sizes": True}
        )
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        check_tensors(source, info, extra_is_error=True)
        return (model, info) if output_loading_info else model

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is for attention; "
                "a converted model keeps a state of constant size and needs none"
            )
        cache = model_kwargs.get("past_key_values")
        self._check_length(_longest_text(generation_config, model_kwargs.get("attention_mask")))
        if cache is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = FastWeightsCache(self.config)
        elif cache is not None:
            model_kwargs["past_key_values"] = _own_cache(cache, self.config, None)
            model_kwargs["past_key_values"]._is_user_defined = True

    def _run(self, forward: Any, inputs: dict[str, Any]) -> Any:
        """Call the pretrained class's forward with a cache of ours, and tell our layers which tokens are real."""
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ValueError("give input_ids or inputs_embeds")
        batch, length = tokens.shape[:2]
        mask = _token_mask(inputs.get("attention_mask"), batch, length, inputs.get("past_key_values"))
        reset = _document_starts(inputs, batch)
        cache = self._cache(inputs, batch, packed=reset is not None)
        if inputs.get("position_ids") is None:
            inputs["position_ids"] = _positions(batch, length, mask, cache, tokens.device)
        if self.family.learned_positions:
            inputs["position_ids"] = self._limit_positions(inputs["position_ids"])
        inputs |= {"past_key_values": cache, "use_cache": cache is not None}
        inputs["attention_mask"] = self._attention_mask(inputs, reset, tokens, length, cache)
        outputs = forward(self, **inputs, fast_weights=SequenceInfo(mask, reset))
        if cache is not None:
            cache.advance(length, mask, batch, tokens.device)
        return outputs

    @property
    def _is_hybrid(self) -> bool:
        """Whether some layers are still attention."""
        layers = self.config.fastweights["layers"]
        return layers is not None and len(layers) < len(self.family.blocks(self))

    def _cache(self, inputs: dict[str, Any], batch: int, packed: bool) -> FastWeightsCache | None:
        cache, wanted = inputs.get("past_key_values"), inputs.get("use_cache")
        if cache is None and wanted is None:
            wanted = self.config.use_cache and not self.training and not packed
        if packed and (cache is not None or wanted):
            raise ValueError("packed documents are not one text to go on with and leave no cache: pass use_cache=False")
        if self.is_gradient_checkpointing and self.training:
            return None
        if cache is not None:
            return _own_cache(cache, self.config, batch)
        return FastWeightsCache(self.config) if wanted else None

    def _attention_mask(
        self, inputs: dict[str, Any], reset: Tensor | None, tokens: Tensor, length: int, cache: FastWeightsCache | None
    ) -> Tensor | None:
        """The mask for layers that are still attention. Where there are none, an empty 4-D mask keeps transformers
        from building one of T x T."""
        mask = inputs.get("attention_mask")
        if not self._is_hybrid:
            return torch.empty(tokens.shape[0], 1, length, 0, dtype=torch.bool, device=tokens.device)
        if reset is not None and not self.family.masks_documents:
            return document_mask(self, inputs["position_ids"])
        if mask is not None and cache is not None and mask.shape[1] != int(cache.get_seq_length()) + length:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens, but the layers kept as attention have seen "
                f"{int(cache.get_seq_length())} and get {length} more: pass a mask for all of them"
            )
        return mask

    def _limit_positions(self, position_ids: Tensor) -> Tensor:
        if self.config.fastweights["positions"] == "clamp":
            return position_ids.clamp(max=getattr(self.config, str(self.family.learned_positions)) - 1)
        if not torch.compiler.is_compiling():
            self._check_length(int(position_ids.max()) + 1)
        return position_ids

    def _check_length(self, length: int) -> None:
        """Before generating, too: a text cut off by an error in its middle is worse than none."""
        if not self.family.learned_positions or self.config.fastweights["positions"] == "clamp":
            return
        table = getattr(self.config, self.family.learned_positions)
        if length > table:
            raise ValueError(
                f"{self.family.name} has learned positions for {table} tokens and this text may reach {length}. The "
                "state has no end, but the position table does: ask for fewer tokens, or set "
                "model.config.fastweights['positions'] = 'clamp' (convert --positions clamp) to give every later "
                "token the last position"
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if "prompt_lookup_num_tokens" in kwargs or kwargs.get("assistant_model") is not None:
            raise ValueError("assisted decoding needs a cache that can be cut back; a recurrent state cannot be")
        return super().generate(*args, **kwargs)


def _longest_text(generation_config: Any, mask: Tensor | None) -> int:
    """Positions that generating may need: real tokens so far, and all the new ones but the last, which is not read."""
    if mask is None:
        return generation_config.max_length - 1
    new = generation_config.max_new_tokens
    new = generation_config.max_length - mask.shape[1] if new is None else new
    return int(mask.sum(1).max()) + new - 1


def _own_cache(cache: Cache, config: Any, batch: int | None) -> FastWeightsCache:
    if isinstance(cache, FastWeightsCache):
        if batch is not None and cache.batch_size not in (-1, batch):
            fork = f"past_key_values=cache.fork({batch})"
            raise ValueError(
                f"the state is of {cache.batch_size} texts and the input of {batch}: fork it first, {fork}"
            )
        return cache
    if cache.get_seq_length() == 0:
        return FastWeightsCache(config)
    raise ValueError(f"past_key_values is a {type(cache).__name__} of another model: start from a FastWeightsCache")


def _token_mask(attention_mask: Tensor | None, batch: int, length: int, cache: Cache | None) -> Tensor | None:
    """Which of the new tokens are real, [B,T]; None when all are."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must be [B,T] for a converted model, found {list(attention_mask.shape)}")
    rows, columns = attention_mask.shape
    if rows != batch or columns < length or (cache is None and columns > length):
        raise ValueError(f"attention_mask must be [{batch},{length}] like the tokens, found [{rows},{columns}]")
    mask = attention_mask[:, -length:].bool()
    on_host = mask.device.type == "cpu" or length > 1
    if on_host and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


@contextmanager
def evaluating(*models: Any) -> Iterator[None]:
    """Eval mode and no gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def is_low_precision(device: torch.device, precision: str) -> bool:
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def autocast(device: torch.device, precision: str = "auto") -> Any:
    """The arithmetic of a model whose weights are in float32, by a recipe's `precision`."""
    return torch.autocast(device.type, torch.bfloat16) if is_low_precision(device, precision) else nullcontext()


def position_limit(model: Any) -> int | None:
    """The length of a learned position table; None where there is none, or later tokens get the last position."""
    field = family_of(model).learned_positions
    clamped = isinstance(model, FastWeightsMixin) and model.config.fastweights["positions"] == "clamp"
    return None if field is None or clamped else int(getattr(model.config, field))


def _make_classes(family: Family) -> tuple[Any, Any]:
    """The config and model classes of a family's converted models."""
    base: Any = getattr(transformers, family.model_class)
    base_forward = base.forward
    names = list(inspect.signature(base_forward).parameters)[1:]

    @functools.wraps(base_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(base_forward, dict(zip(names, args, strict=False)) | kwargs)

    config_class = type(
        f"FastWeights{base.config_class.__name__}",
        (base.config_class,),
        {"model_type": MODEL_TYPE_PREFIX + family.name, "__module__": __name__},
    )
    model_class = type(
        f"FastWeights{family.model_class}",
        (FastWeightsMixin, base),
        {"config_class": config_class, "family": family, "forward": forward, "__module__": __name__},
    )
    return config_class, model_class


CLASSES: dict[str, tuple[Any, Any]] = {name: _make_classes(family) for name, family in FAMILIES.items()}

for _config_class, _model_class in CLASSES.values():
    globals()[_config_class.__name__] = _config_class
    globals()[_model_class.__name__] = _model_class
    AutoConfig.register(_config_class.model_type, _config_class)
    AutoModelForCausalLM.register(_config_class, _model_class)
    # `transformers serve` looks an architecture up as an attribute of the package
    setattr(transformers, _model_class.__name__, _model_class)
