"""fairseq's language model with adaptive input: attention as in OPT. transformers does not have it; its classes are in
modeling/adaptive_input.py.
"""

from fastweights.config import ADAPTIVE_INPUT
from fastweights.modeling.families.base import Family, ModulePaths
from fastweights.modeling.families.opt import shape, weights

MODULE_PATHS = ModulePaths(
    norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    embedding="model.embed_tokens",
    final_norm=None,
    positions="model.embed_positions",
    scales_embedding=True,
)
ADAPTIVE_INPUT_FAMILY = Family(
    ADAPTIVE_INPUT,
    "AdaptiveInputForCausalLM",
    "model.layers",
    "self_attn",
    shape,
    weights,
    MODULE_PATHS,
    module="fastweights.modeling.adaptive_input",
)
