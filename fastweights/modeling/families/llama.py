"""Llama and families built like it: q_proj, k_proj, v_proj, o_proj, RoPE, grouped key-value heads.

Qwen 3 and Gemma 3 norm queries and keys. Gemma's norms multiply by 1 + weight. Gemma 2 caps the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fastweights.modeling.families.base import AttentionWeights, Family, ModulePaths, adds_one_to_weight, split_heads
from fastweights.modeling.layer import AttentionShape


def shape(attention: Any, config: Any) -> AttentionShape:
    """Sizes of an attention module."""
    q_norm = getattr(attention, "q_norm", None)
    eps = None if q_norm is None else getattr(q_norm, "variance_epsilon", None) or q_norm.eps
    return AttentionShape(
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        rotary_dim=attention.head_dim,
        qkv_bias=attention.q_proj.bias is not None,
        out_bias=attention.o_proj.bias is not None,
        qk_norm_eps=eps,
        softcap=getattr(attention, "attn_logit_softcapping", None),
        sliding_window=_sliding_window(attention, config),
    )


def _sliding_window(attention: Any, config: Any) -> int | None:
    """The layer's sliding window: Mistral's config has one for all layers, Qwen's and Gemma's attention its own."""
    whole_model = config.sliding_window if config.model_type.endswith("mistral") else None
    return getattr(attention, "sliding_window", whole_model)


def weights(attention: Any, shape: AttentionShape) -> AttentionWeights:
    """Weights of an attention module."""
    q, q_bias = split_heads(attention.q_proj, shape.heads)
    k, k_bias = split_heads(attention.k_proj, shape.kv_heads)
    v, v_bias = split_heads(attention.v_proj, shape.kv_heads)
    out = attention.o_proj
    return AttentionWeights(
        q,
        k,
        v,
        out.weight.detach(),
        q_bias,
        k_bias,
        v_bias,
        None if out.bias is None else out.bias.detach(),
        _norm_weight(getattr(attention, "q_norm", None)),
        _norm_weight(getattr(attention, "k_norm", None)),
    )


def _norm_weight(norm: Any) -> Tensor | None:
    if norm is None:
        return None
    return norm.weight.detach() + 1 if adds_one_to_weight(norm) else norm.weight.detach()


MODULE_PATHS = ModulePaths(
    norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    rotary="model.rotary_emb",
)
GEMMA_MODULE_PATHS = replace(
    MODULE_PATHS,
    mlp_norm="pre_feedforward_layernorm",
    attention_out_norm="post_attention_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
    activation="hidden_activation",
    scales_embedding=True,
)


def _like_llama(name: str, model_class: str, module_paths: ModulePaths = MODULE_PATHS) -> Family:
    return Family(name, model_class, "model.layers", "self_attn", shape, weights, module_paths)


LLAMA = _like_llama("llama", "LlamaForCausalLM")
MISTRAL = _like_llama("mistral", "MistralForCausalLM")
QWEN2 = _like_llama("qwen2", "Qwen2ForCausalLM")
QWEN3 = _like_llama("qwen3", "Qwen3ForCausalLM")
GEMMA2 = _like_llama("gemma2", "Gemma2ForCausalLM", GEMMA_MODULE_PATHS)
GEMMA3 = _like_llama("gemma3_text", "Gemma3ForCausalLM", GEMMA_MODULE_PATHS)
