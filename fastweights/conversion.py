"""Conversion of a pretrained model into a fast-weight model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch import nn

from fastweights.config import LAYER_LISTS, ConfigError, FastWeightsConfig
from fastweights.modeling.attention_weights import wide_layers
from fastweights.modeling.classes import CLASSES, FastWeightsMixin, keep_softcap, new_layer, use_converted_classes
from fastweights.modeling.families import Family, family_of
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.presets import RECOMMENDED, preset_config
from fastweights.utils.errors import Argument


def convert(model: Any, config: FastWeightsConfig | None = None) -> Any:
    """Replace the attention of a pretrained model with fast weights, in place.

    Args:
        model: a causal language model of transformers, in a float dtype and in memory.
        config: the settings; by default the preset "recommended", the best ones with constant memory that we know.

    Returns:
        The same object, with the class of converted models of its family. It generates, saves and loads as before.

    Raises:
        ConfigError: if the model is already converted, quantized or offloaded, or a setting does not fit it.
        UnknownFamilyError: if its family is not supported.
    """
    config = preset_config(RECOMMENDED, *attention_sizes(model)) if config is None else config
    family = _pretrained_family(model)
    blocks = family.blocks(model)
    check_layers(config, len(blocks))
    if getattr(model.config, "add_cross_attention", False):
        raise ConfigError("a model with cross-attention (add_cross_attention=True) cannot be converted")
    if config.wide_window and config.wide_layers is None:
        config = _with_wide_layers(model, config)
    new = {
        i: _new_layer(family, block, model.config, config, i) for i, block in enumerate(blocks) if config.converts(i)
    }
    for index, layer in new.items():
        setattr(blocks[index], family.attention, layer)
    drop_gguf_quantizer(model)
    vars(model).pop("_weight_conversions", None)  # a renaming of tensors at loading that saving would undo
    keep_softcap(model.config)
    model.config.__class__ = CLASSES[family.name][0]
    vars(model.config).pop("model_type", None)  # a loaded config has the base's, which would hide the class's
    use_converted_classes(model)
    model.config.fastweights = config.to_dict()
    model.config.architectures = [type(model).__name__]
    # An adapter names the folder of the model it belongs to, and that of the base would be wrong.
    model.name_or_path = model.config.name_or_path = ""
    return model


def _with_wide_layers(model: Any, config: FastWeightsConfig) -> FastWeightsConfig:
    """The config with the layers that get the wide window. A layer whose own sliding window is no longer than `window`
    is never chosen."""
    family, candidates = _pretrained_family(model), []
    for index, block in enumerate(family.blocks(model)):
        if config.converts(index):
            attention = family.attention_of(block)
            _check_weights(attention, index)
            own = family.shape(attention, model.config).sliding_window
            candidates += [index] if own is None or own > int(config.window or 0) else []
    chosen = wide_layers(model, candidates) if candidates else ()
    return replace(config, wide_layers=chosen) if chosen else replace(config, wide_window=0)


def attention_sizes(model: Any) -> tuple[int, int]:
    """Head dimension and width of a pretrained model.

    Raises:
        ConfigError: if the model is already converted.
        UnknownFamilyError: if its family is not supported.
    """
    family = _pretrained_family(model)
    shape = family.shape(family.attention_of(family.blocks(model)[0]), model.config)
    return shape.head_dim, shape.width


def _pretrained_family(model: Any) -> Family:
    """The family of a model that can be converted."""
    if isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"convert takes a model, found the name {str(model)!r}: load it first, fw.load({str(model)!r})"
        )
    if isinstance(model, FastWeightsMixin):
        raise ConfigError(f"this {type(model).__name__} is already converted: start from the pretrained model")
    return family_of(model)


def drop_gguf_quantizer(model: Any) -> None:
    """Remove the quantizer from a model that transformers read from a GGUF file.

    The weights are plain floats by then, but transformers still calls the model quantized and refuses to save it.
    """
    if getattr(model, "quantization_method", None) == "gguf" and all(p.is_floating_point() for p in model.parameters()):
        del model.hf_quantizer, model.is_quantized, model.quantization_method, model.config.quantization_config


def check_layers(config: FastWeightsConfig, count: int) -> None:
    """Raise ConfigError if the config names a layer that does not exist."""
    for name in LAYER_LISTS:
        beyond = [i for i in getattr(config, name) or () if i >= count]
        if beyond:
            numbered = f"the model has {count} layers, numbered 0 to {count - 1}"
            raise ConfigError(Argument(name), f"={beyond} do not exist: {numbered}")


def _new_layer(
    family: Family, block: nn.Module, model_config: Any, config: FastWeightsConfig, index: int
) -> FastWeightsAttention:
    """The converted layer of a block, on the device and in the dtype of the old one."""
    old = family.attention_of(block)
    like = _check_weights(old, index)
    layer = new_layer(family, old, model_config, config, index)
    return layer.to(device=like.device, dtype=like.dtype).train(old.training)


def _check_weights(attention: nn.Module, index: int) -> nn.Parameter:
    """A parameter of a layer's attention. Raises ConfigError if its weights cannot be read."""
    like = next(attention.parameters(), None)
    if like is None or not like.is_floating_point():
        found = "packed" if like is None else like.dtype
        raise ConfigError(
            f"the weights of layer {index} are {found}: quantized models must be loaded in a float dtype first"
        )
    if like.is_meta:
        raise ConfigError(
            f"the weights of layer {index} are not in memory (offloaded): load the model without offloading"
        )
    return like


# Modules of a converted layer that are new, and norms. They are small, so LoRA trains and saves them completely.
_SMALL_MODULES = (
    *("gates.f", "gates.z", "gates.g", "gates.s", "gates.weight", "gate_down"),
    *("feature_map", "output_norm", "mix", "q_norm", "k_norm"),
)


def lora_modules(model: Any) -> dict[str, list[str]]:
    """Return arguments for peft's LoraConfig: projections get low-rank updates, small new modules train completely.

    Args:
        model: a converted model.

    Returns:
        `target_modules` and `modules_to_save`, to be passed as LoraConfig(**fw.lora_modules(model), ...).

    Raises:
        ConfigError: if the model is not converted.
    """
    if not isinstance(model, FastWeightsMixin):
        raise ConfigError(f"lora_modules takes a converted model, found a {type(model).__name__}")
    with_parameters = [name for name, module in model.named_modules() if any(True for _ in module.parameters(False))]
    present = [part for part in _SMALL_MODULES if any(name.endswith(f".{part}") for name in with_parameters)]
    return {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "modules_to_save": present}
