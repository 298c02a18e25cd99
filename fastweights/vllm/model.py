"""A converted model as vLLM runs it: the model's own modules, with layers whose memory is vLLM's.

Shapes: tokens, positions [N], of all sequences of a step   hidden [N,D]   logits [n,V], of the tokens that are sampled
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

from fastweights.modeling.classes import check_tensors
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.modeling.positions import check_length
from fastweights.modeling.source_files import empty_model
from fastweights.vllm.config import transformers_config
from fastweights.vllm.layer import ATTENTION, PagedStateAttention, StateTensor, page_layout, paged_attention

# For the attention layers of a hybrid: vLLM knows which tokens belong together, so transformers builds no mask.
NO_MASK = {"attention": None}


class FastWeightsForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The converted causal language models of all families.

    vLLM calls a model with recurrent layers hybrid, also if it has no attention layers.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.source = model_config.model
        self.model = build(model_config.hf_config, model_config.dtype, vllm_config.device_config.device)
        check_length(self.model, model_config.max_model_len, "max_model_len is", fix=("Use a smaller max_model_len.",))
        # vLLM has limited the length, and the check of each step would wait for the GPU.
        self.model.config.fastweights["positions"] = "clamp"
        self.layout = layout_of(self.model, model_config.dtype)
        self.attention = nn.ModuleDict()
        family = self.model.family
        for index, block in enumerate(family.blocks(self.model)):
            layer, name = family.attention_of(block), f"{prefix}{'.' if prefix else ''}layers.{index}.attention"
            if isinstance(layer, FastWeightsAttention):
                PagedStateAttention.adopt(layer, name, self.layout, vllm_config)
            else:
                shape = family.shape(layer, self.model.config)
                self.attention[str(index)] = paged_attention(layer, shape, name, vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """The shapes of a page's tensors."""
        return tuple(tensor.shape for tensor in _layout_of_config(vllm_config).values())

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """The dtypes of a page's tensors."""
        return tuple(tensor.dtype for tensor in _layout_of_config(vllm_config).values())

    def get_mamba_state_copy_funcs(self, mamba_types: Iterable[Any]) -> dict[Any, tuple]:
        """How vLLM copies each tensor of a page, for cached prefixes: as a whole."""
        return {each: (get_temporal_copy_spec,) * len(self.layout) for each in mamba_types}

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """The embeddings [N,D] of tokens [N]."""
        return self.model.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The hidden states [N,D] of the tokens of all sequences. The layers find out which token is whose."""
        outputs = self.model.base_model(
            input_ids=None if input_ids is None or inputs_embeds is not None else input_ids[None],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            position_ids=positions[None],
            attention_mask=NO_MASK,
            use_cache=False,
        )
        return outputs.last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """The logits [n,V] of hidden states [n,D]."""
        logits = self.model.get_output_embeddings()(hidden_states)
        softcap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the model from a saved folder's tensors.

        Returns:
            The names of all parameters.

        Raises:
            CheckpointError: names tensors that are missing, or that the model does not have.
        """
        tensors = dict(weights)
        found = self.model.load_state_dict(tensors, strict=False)
        known = self.model.state_dict(keep_vars=True)
        loaded = {id(known[name]) for name in tensors if name in known}
        missing = [name for name in found.missing_keys if id(known[name]) not in loaded]  # a tied one is in no file
        check_tensors(self.source, {"missing_keys": missing, "unexpected_keys": found.unexpected_keys}, True)
        return {name for name, _ in self.named_parameters()}


def build(config: Any, dtype: torch.dtype, device: Any) -> Any:
    """The model that a config describes, with parameters that are not yet filled."""
    config = transformers_config(config)
    config._attn_implementation = ATTENTION
    # Buffers are made, not loaded, where they are in no file: rotary frequencies, for one.
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    model.tie_weights()
    return model.eval().requires_grad_(False)


def layout_of(model: Any, dtype: torch.dtype) -> dict[str, StateTensor]:
    """The tensors of a page of this model."""
    attention = (family_of(model).attention_of(block) for block in family_of(model).blocks(model))
    return page_layout((layer for layer in attention if isinstance(layer, FastWeightsAttention)), dtype)


def _layout_of_config(vllm_config: VllmConfig) -> dict[str, StateTensor]:
    model_config = vllm_config.model_config
    return layout_of(empty_model(transformers_config(model_config.hf_config)), model_config.dtype)
