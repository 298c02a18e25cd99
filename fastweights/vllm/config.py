"""What vLLM must know about a converted model before it starts: which settings it does not support, and that it has
recurrent layers."""

from __future__ import annotations

import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from fastweights.config import FastWeightsConfig
from fastweights.utils.errors import FastWeightsError

# How the configs of transformers call attention layers and recurrent ones.
ATTENTION_TYPE, RECURRENT_TYPE = "full_attention", "linear_attention"


class UnsupportedInVllm(FastWeightsError):
    """A model or a setting with which vLLM cannot run converted models, with the reason."""


class ConvertedModelConfig(VerifyAndUpdateConfig):
    """vLLM's hooks for the configuration of a model."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Mark the converted layers, where vLLM would take them for attention."""
        config = model_config.hf_config
        if getattr(config, "layer_types", None):
            config.layer_types = recurrent_types(config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuse unsupported settings.

        Raises:
            UnsupportedInVllm: names the setting.
        """
        check_supported(vllm_config)


def recurrent_types(config: Any) -> list[str]:
    """The types of a model's layers as vLLM needs them: where all of them are full attention, as in Qwen's configs, it
    does not look for recurrent layers."""
    types, settings = list(config.layer_types), FastWeightsConfig.from_dict(config.fastweights)
    if set(types) != {ATTENTION_TYPE}:
        return types
    return [RECURRENT_TYPE if settings.converts(i) else each for i, each in enumerate(types)]


def transformers_config(config: Any) -> Any:
    """A copy of a model's config with its layer types as transformers needs them: without the marks of
    `recurrent_types`."""
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = [ATTENTION_TYPE if each == RECURRENT_TYPE else each for each in config.layer_types]
    return config


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuse settings of vLLM that converted models do not support.

    Raises:
        UnsupportedInVllm: names the setting.
    """
    config = vllm_config.model_config.hf_config
    rope = getattr(config, "rope_parameters", None) or {}
    rope_types = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)}
    for setting, unsupported, reason in (
        (
            "tensor_parallel_size",
            vllm_config.parallel_config.tensor_parallel_size > 1,
            "states are not split between devices. Use 1, or data_parallel_size",
        ),
        (
            "quantization",
            vllm_config.model_config.quantization is not None,
            "weights are used as they are saved. Leave it out",
        ),
        (
            "speculative_config",
            vllm_config.speculative_config is not None,
            "a state cannot forget tokens that were rejected. Leave it out",
        ),
        (
            "rope_type of the model's config",
            any("dynamic" in each or each == "longrope" for each in rope_types),
            f"rotary frequencies that depend on the length ({', '.join(sorted(rope_types))}) would be those of the "
            "longest sequence of a batch. Use fastweights.Engine",
        ),
    ):
        if unsupported:
            raise UnsupportedInVllm(f"converted models do not support this {setting} in vLLM: {reason}")
