"""OPT: q_proj, k_proj, v_proj, out_proj and learned positions."""

from typing import Any

from fastweights.families.base import AttentionWeights, Family, by_head
from fastweights.layer import AttentionShape


def shape(attention: Any, config: Any) -> AttentionShape:
    return AttentionShape(
        width=config.hidden_size,
        heads=attention.num_heads,
        kv_heads=attention.num_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        qkv_bias=config.enable_bias,
        out_bias=config.enable_bias,
    )


def weights(attention: Any, shape: AttentionShape) -> AttentionWeights:
    (q, q_bias), (k, k_bias), (v, v_bias) = (
        by_head(linear, shape.heads) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    out = attention.out_proj
    o_bias = None if out.bias is None else out.bias.detach()
    return AttentionWeights(q, k, v, out.weight.detach(), q_bias, k_bias, v_bias, o_bias)


OPT = Family(
    "opt",
    "OPTForCausalLM",
    "model.decoder.layers",
    "self_attn",
    shape,
    weights,
    learned_positions="max_position_embeddings",
    masks_documents=False,
)
