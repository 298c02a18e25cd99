"""The layers of a converted model whose memory is vLLM's.

vLLM flattens the tokens of all sequences of a step into one row: first the sequences that decode one token each, then
those that read a part of their prompt. Each sequence has a page of the cache, which a converted layer divides into its
state and the keys and values of its window.

Shapes: hidden [1,N,D]   cos, sin [1,N,R]   pages, seen [B]   in a page: state [S,d,m], window k and v [n+w-1,Hkv,d]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from fastweights.modeling.cache import StateLayer
from fastweights.modeling.layer import AttentionShape, FastWeightsAttention
from fastweights.modeling.window import cached_tokens

# What attention layers of a hybrid call in transformers instead of softmax attention.
ATTENTION = "fastweights_vllm"


class StateTensor(NamedTuple):
    """One tensor of a page."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Sequences(NamedTuple):
    """Some sequences of a step that have equally many new tokens.

    Attributes:
        tokens: where their tokens are among those of all sequences.
        pages: [B], the page of each sequence.
        seen: [B], how many tokens each sequence had before this step.
    """

    tokens: slice
    pages: Tensor
    seen: Tensor

    def select(self, x: Tensor) -> Tensor:
        """These sequences' tokens [B,T,...] of x [1,N,...]."""
        return x[0, self.tokens].unflatten(0, (len(self.pages), -1))


def page_layout(layers: Iterable[FastWeightsAttention], dtype: torch.dtype) -> dict[str, StateTensor]:
    """The tensors of a page by name. vLLM wants pages of one size, so the widest window sets the size for all layers.

    Args:
        layers: the converted layers of a model.
        dtype: the model's, in which keys and values are cached; states are float32.
    """
    layers, layout = list(layers), {}
    first, shape = layers[0], layers[0].shape
    if first.rule is not None:
        layout["state"] = StateTensor(first.rule.state_shape, torch.float32)
    if first.window is not None:
        tokens = max(1, *map(_cached_tokens, layers))  # a window of one token caches none, and a page must not be empty
        layout["k"] = layout["v"] = StateTensor((tokens, shape.kv_heads, shape.head_dim), dtype)
    return layout


def _cached_tokens(layer: FastWeightsAttention) -> int:
    return 0 if layer.window is None else cached_tokens(layer.window.window, layer.window.sinks)


class PagedStateAttention(FastWeightsAttention, MambaBase):
    """A converted layer whose state is in vLLM's cache. `adopt` makes one from a layer of the model."""

    name: str
    layout: dict[str, StateTensor]
    kv_cache: tuple[Tensor, ...]

    @classmethod
    def adopt(cls, layer: Any, name: str, layout: dict[str, StateTensor], vllm_config: VllmConfig) -> None:
        """Turn a converted layer into this class in place, so that its weights keep their names, and tell vLLM of it.

        Args:
            layer: the layer of the model.
            name: its name in vLLM.
            layout: the tensors of a page.
            vllm_config: the configuration whose list of layers it joins.
        """
        layer.__class__ = cls
        layer.name, layer.layout, layer.kv_cache = name, layout, ()
        vllm_config.compilation_config.static_forward_context[name] = layer

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The backend that says which tokens and pages are whose: Mamba's, which assumes nothing about the state."""
        return MambaAttentionBackendEnum.MAMBA1

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a page's tensors."""
        return tuple(tensor.shape for tensor in self.layout.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """The dtypes of a page's tensors."""
        return tuple(tensor.dtype for tensor in self.layout.values())

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Compute the layer's output and update the states of all sequences of this step.

        Args:
            hidden_states: [1,N,D], the tokens of all sequences.
            position_embeddings: cos and sin of RoPE, for models that have it.
            **_: other arguments that families pass to attention; they have no effect.

        Returns:
            The output [1,N,D], zero after the last sequence, and None in the place of attention weights.
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures memory before there is a cache
            return super().forward(hidden_states, position_embeddings=position_embeddings)
        output = torch.zeros_like(hidden_states)
        for group in _sequences(metadata[self.name]):
            held, rotary = self._read(group), position_embeddings
            y, _none = super().forward(
                group.select(hidden_states),
                past_key_values=SimpleNamespace(layers={self.layer_idx: held}),
                position_embeddings=None if rotary is None else (group.select(rotary[0]), group.select(rotary[1])),
            )
            output[0, group.tokens] = y.flatten(0, 1)
            self._write(group, held)
        return output, None

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """This layer's part of all pages, by name: of keys and values only as many as its own window has."""
        for name, tensor in zip(self.layout, self.kv_cache, strict=True):
            yield name, tensor if name == "state" else tensor[:, : _cached_tokens(self)]

    def _read(self, group: Sequences) -> StateLayer:
        """Copy the tensors of some sequences from their pages."""
        held, new = StateLayer(), group.seen == 0
        for name, part in self._parts():
            # A page still has what its last owner wrote there.
            held.tensors[name] = part[group.pages].masked_fill_(new[:, None, None, None], 0)
        if self.window is not None:
            # A window's cache is filled from the end, so the number of tokens says which entries are real.
            count = _cached_tokens(self)
            entries = torch.arange(count, device=new.device)
            held.tensors["mask"] = entries >= count - group.seen[:, None]
        return held

    def _write(self, group: Sequences, held: StateLayer) -> None:
        """Copy the tensors of some sequences to their pages."""
        for name, part in self._parts():
            part[group.pages] = held.tensors[name]


def _sequences(metadata: Any) -> Iterator[Sequences]:
    """The sequences of a step in groups: all that decode at once, and each one that reads a prompt."""
    decodes, prefills = metadata.num_decodes, metadata.num_prefills
    if decodes:
        yield Sequences(
            slice(0, decodes), metadata.state_indices_tensor_d[:decodes, 0].long(), metadata.seq_lens[:decodes] - 1
        )
    if not prefills:
        return
    bounds = (metadata.query_start_loc_p + metadata.num_decode_tokens).tolist()
    lengths = metadata.seq_lens[decodes : decodes + prefills]
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        pages = metadata.state_indices_tensor_p[i : i + 1].long()
        yield Sequences(slice(start, end), pages, lengths[i : i + 1] - (end - start))


def paged_attention(attention: Any, shape: AttentionShape, name: str, vllm_config: VllmConfig) -> nn.Module:
    """Give an attention layer of a hybrid vLLM's paged keys and values. The layer's weights stay where they are.

    Args:
        attention: the attention module of transformers, whose config names `ATTENTION` as its implementation.
        shape: its sizes.
        name: its name in vLLM.
        vllm_config: the configuration whose list of layers it joins.

    Returns:
        vLLM's attention, which `attention` calls but does not own.
    """
    paged = Attention(
        shape.heads,
        shape.head_dim,
        shape.scaling,
        num_kv_heads=shape.kv_heads,
        cache_config=vllm_config.cache_config,
        logits_soft_cap=shape.softcap,
        per_layer_sliding_window=shape.sliding_window,
        prefix=name,
    )
    object.__setattr__(attention, "paged", paged)  # not as a submodule: its buffers are in no checkpoint
    return paged


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface, [1,H,N,d] -> [1,N,H,d], with vLLM's attention."""
    flat = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
    return module.paged(*flat).unflatten(-1, (query.shape[1], -1))[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
