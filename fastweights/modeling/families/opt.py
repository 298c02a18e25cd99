"""OPT: q_proj, k_proj, v_proj, out_proj and learned positions."""

from typing import Any

from fastweights.modeling.families.base import AttentionWeights, Family, ModulePaths, split_heads
from fastweights.modeling.layer import AttentionShape


def shape(attention: Any, config: Any) -> AttentionShape:
    """Sizes of an attention module."""
    return AttentionShape(
        width=config.hidden_size,
        heads=attention.num_heads,
        kv_heads=attention.num_heads,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        qkv_bias=attention.q_proj.bias is not None,
        out_bias=attention.out_proj.bias is not None,
    )


def weights(attention: Any, shape: AttentionShape) -> AttentionWeights:
    """Weights of an attention module."""
    (q, q_bias), (k, k_bias), (v, v_bias) = (
        split_heads(linear, shape.heads) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    out = attention.out_proj
    o_bias = None if out.bias is None else out.bias.detach()
    return AttentionWeights(q, k, v, out.weight.detach(), q_bias, k_bias, v_bias, o_bias)


def _norms_first(config: Any) -> bool:
    """False for OPT-350M, which norms after attention and has narrower embeddings."""
    same_width = config.word_embed_proj_dim == config.hidden_size
    return config.do_layer_norm_before and not config._remove_final_layer_norm and same_width


MODULE_PATHS = ModulePaths(
    norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    embedding="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    positions="model.decoder.embed_positions",
    activation="activation_function",
    supports=_norms_first,
)
OPT = Family(
    "opt",
    "OPTForCausalLM",
    "model.decoder.layers",
    "self_attn",
    shape,
    weights,
    MODULE_PATHS,
    learned_positions="max_position_embeddings",
    masks_documents=False,
    decoder_class="OPTDecoder",
)
