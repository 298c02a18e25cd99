"""GPT-NeoX and Pythia: one Linear computes q, k and v, interleaved by head; RoPE rotates only part of a head."""

from typing import Any

from fastweights.modeling.families.base import AttentionWeights, Family, ModulePaths, split_heads
from fastweights.modeling.layer import AttentionShape


def shape(attention: Any, config: Any) -> AttentionShape:
    """Sizes of an attention module."""
    return AttentionShape(
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=attention.head_size,
        scaling=attention.scaling,
        rotary_dim=attention.rotary_ndims + attention.rotary_ndims % 2,
        qkv_bias=attention.query_key_value.bias is not None,
        out_bias=attention.dense.bias is not None,
    )


def weights(attention: Any, shape: AttentionShape) -> AttentionWeights:
    """Weights of an attention module."""
    packed, packed_bias = split_heads(attention.query_key_value, shape.heads)
    q, k, v = packed.chunk(3, dim=1)
    q_bias, k_bias, v_bias = (None,) * 3 if packed_bias is None else packed_bias.chunk(3, dim=1)
    out = attention.dense
    o_bias = None if out.bias is None else out.bias.detach()
    return AttentionWeights(q, k, v, out.weight.detach(), q_bias, k_bias, v_bias, o_bias)


MODULE_PATHS = ModulePaths(
    norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    rotary="gpt_neox.rotary_emb",
)
GPT_NEOX = Family("gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.layers", "attention", shape, weights, MODULE_PATHS)
