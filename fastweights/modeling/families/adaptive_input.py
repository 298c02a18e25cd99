"""fairseq's language model with adaptive input: attention as in OPT. transformers does not have it; its classes are in
modeling/adaptive_input.py.

It has no `ModulePaths`: its embedding is no table, and its output layer no Linear.
"""

from fastweights.config import ADAPTIVE_INPUT
from fastweights.modeling.families.base import Family
from fastweights.modeling.families.opt import shape, weights

ADAPTIVE_INPUT_FAMILY = Family(
    ADAPTIVE_INPUT,
    "AdaptiveInputForCausalLM",
    "model.layers",
    "self_attn",
    shape,
    weights,
    module="fastweights.modeling.adaptive_input",
)
