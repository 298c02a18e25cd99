"""What a model is and how much memory its cache takes during generation: plain arithmetic, without weights.

Bytes are for one sequence, in the model's own dtype. An attention layer caches keys and values of every token (up to
its sliding window, where it has one); a converted layer has a state of constant size.
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from fastweights.config import LOCAL, FastWeightsConfig
from fastweights.model_paths import CONFIG, FAIRSEQ, locate
from fastweights.modeling import fairseq
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.families import Family, family_of
from fastweights.modeling.layer import AttentionShape, FastWeightsAttention, state_shape
from fastweights.modeling.source_files import check_config, check_gguf, empty_model, loading_errors, read_config
from fastweights.modeling.window import cached_tokens

SEQUENCE_LENGTHS = (1024, 8192, 65536)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes cached after `tokens` tokens by this model (`here`) and by its base model (`attention`)."""

    tokens: int
    here: int
    attention: int


@dataclass(frozen=True)
class Description:
    """What a model is. `settings` is None if it is not converted; `state_bytes` counts the converted layers."""

    family: str
    settings: FastWeightsConfig | None
    dtype: str
    layers: int
    converted: tuple[int, ...]
    parameters: int
    base_parameters: int
    state_bytes: int
    memory: tuple[MemoryUse, ...]

    @property
    def added_parameters(self) -> int:
        """Parameters that the conversion added."""
        return self.parameters - self.base_parameters


def describe(model: Any) -> Description:
    """Describe a model, converted or not; its parameters may be on the meta device."""
    converted = isinstance(model, FastWeightsMixin)
    family = family_of(model)
    layers = layer_memory(model, family)
    state_bytes = sum(layer.state_bytes for layer in layers)
    return Description(
        family=family.name,
        settings=FastWeightsConfig.from_dict(model.config.fastweights) if converted else None,
        dtype=str(model.dtype).removeprefix("torch."),
        layers=len(layers),
        converted=tuple(i for i, layer in enumerate(layers) if layer.converted),
        parameters=_count(model),
        base_parameters=_count(_base_on_meta(model, family)) if converted else _count(model),
        state_bytes=state_bytes,
        memory=tuple(_memory(layers, state_bytes, tokens) for tokens in SEQUENCE_LENGTHS),
    )


def describe_source(source: str | os.PathLike) -> Description:
    """Describe a saved model from its config.json or the header of its GGUF file. No code of the model's is run.

    Args:
        source: a folder, a hub id, a GGUF file, a fairseq checkpoint or the folder of a training run.

    Raises:
        CheckpointError: if there is no model, or its config does not describe one.
        UnknownFamilyError: if the model's family is not supported.
    """
    folder, file = locate(source)
    with loading_errors(source, folder, f"{file or CONFIG} does not describe a model"):
        if file is not None and file.endswith(FAIRSEQ):
            return describe(empty_model(fairseq.read_config(Path(folder) / file)))
        if file is not None:
            check_gguf(Path(folder) / file)
            return describe(empty_model(read_config(folder, gguf_file=file)))
        check_config(folder)
        return describe(empty_model(read_config(folder)))


def summarize(described: Description) -> dict[str, str]:
    """A description as labels and texts, for printing."""
    model = {"family": described.family, "dtype": described.dtype}
    if described.settings is None:
        return model | {"rule": "softmax attention (not converted)", "parameters": f"{described.parameters:,}"}
    settings = {name: str(value) for name, value in described.settings.to_dict().items() if name != "layers"}
    hybrid = len(described.converted) < described.layers
    indices = f": {', '.join(map(str, described.converted))}" if hybrid else ""
    return model | {
        **settings,
        "layers converted": f"{len(described.converted)} of {described.layers}{indices}",
        "parameters": f"{described.parameters:,} ({_added_text(described)} against the base model)",
        "state": f"{described.state_bytes:,} bytes, at any context length",
    }


def _added_text(described: Description) -> str:
    share = described.added_parameters / described.base_parameters
    return f"{described.added_parameters:+,} or {share:+.1%}"


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer.

    Attributes:
        converted: whether the layer has a state instead of attention.
        state_bytes: size of that state.
        token_bytes: keys and values of one token, if the layer is attention.
        max_tokens: the most tokens that attention caches: one less than its sliding window, since the new token
            completes it. None: all.
    """

    converted: bool
    state_bytes: int
    token_bytes: int
    max_tokens: int | None

    def attention_bytes(self, tokens: int) -> int:
        """Bytes of keys and values after `tokens` tokens, if the layer is attention."""
        return self.token_bytes * (tokens if self.max_tokens is None else min(tokens, self.max_tokens))


def layer_memory(model: Any, family: Family) -> list[LayerMemory]:
    """The memory of each layer of a model."""
    caches = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    layers = []
    for block, cache in zip(family.blocks(model), caches, strict=True):
        attention: Any = family.attention_of(block)
        converted = isinstance(attention, FastWeightsAttention)
        shape = attention.shape if converted else family.shape(attention, model.config)
        state_bytes = _state_bytes(shape, attention.config, model.dtype) if converted else 0
        token_bytes = _token_bytes(shape, model.dtype)
        window = getattr(cache, "sliding_window", None)
        layers.append(LayerMemory(converted, state_bytes, token_bytes, None if window is None else window - 1))
    return layers


def _token_bytes(shape: AttentionShape, dtype: torch.dtype) -> int:
    """Bytes of the key and value of one token."""
    return 2 * shape.kv_heads * shape.head_dim * dtype.itemsize


def _state_bytes(shape: AttentionShape, config: FastWeightsConfig, dtype: torch.dtype) -> int:
    """Bytes of a converted layer: its state, in at least float32, and the cached keys and values of a window."""
    state = 0
    if config.rule != LOCAL:
        state = math.prod(state_shape(shape, config)) * torch.promote_types(dtype, torch.float32).itemsize
    mask_byte = 1
    cached = cached_tokens(shape.window(config), config.sinks) if config.window else 0
    return state + cached * (_token_bytes(shape, dtype) + mask_byte)


def _memory(layers: list[LayerMemory], state_bytes: int, tokens: int) -> MemoryUse:
    cached = sum(layer.attention_bytes(tokens) for layer in layers if not layer.converted)
    return MemoryUse(tokens, state_bytes + cached, sum(layer.attention_bytes(tokens) for layer in layers))


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _base_on_meta(model: Any, family: Family) -> nn.Module:
    """The model from which this one was converted, on the meta device."""
    with torch.device("meta"):
        return family.pretrained_class(copy.deepcopy(model.config))
