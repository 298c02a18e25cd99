"""GPT-2: one Conv1D, stored as [in, out], computes q, k and v."""

from typing import Any

from fastweights.modeling.families.base import AttentionWeights, Family, ModulePaths
from fastweights.modeling.layer import AttentionShape


def shape(attention: Any, config: Any) -> AttentionShape:
    """Sizes of an attention module."""
    return AttentionShape(
        width=config.hidden_size,
        heads=attention.num_heads,
        kv_heads=attention.num_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        qkv_bias=True,
        out_bias=True,
        dropout=config.resid_pdrop,
    )


def weights(attention: Any, shape: AttentionShape) -> AttentionWeights:
    """Weights of an attention module."""
    packed, bias = attention.c_attn.weight.detach().T, attention.c_attn.bias.detach()
    q, k, v = packed.view(3, shape.heads, shape.head_dim, shape.width)
    q_bias, k_bias, v_bias = bias.view(3, shape.heads, shape.head_dim)
    out = attention.c_proj
    return AttentionWeights(q, k, v, out.weight.detach().T, q_bias, k_bias, v_bias, out.bias.detach())


MODULE_PATHS = ModulePaths(
    norm="ln_1",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    embedding="transformer.wte",
    final_norm="transformer.ln_f",
    positions="transformer.wpe",
    activation="activation_function",
    supports=lambda config: not config.add_cross_attention,
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.h",
    "attn",
    shape,
    weights,
    MODULE_PATHS,
    learned_positions="max_position_embeddings",
)
