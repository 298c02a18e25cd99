"""A plugin for vLLM: converted models run there with their state in its cache for recurrent layers.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). The other modules of this
package need vLLM.
"""

from __future__ import annotations

from fastweights.modeling.families import FAMILIES

MODEL = "fastweights.vllm.model:FastWeightsForCausalLM"


def register() -> None:
    """Register the causal language models of all families with vLLM. It may be called several times."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from fastweights.vllm.config import ConvertedModelConfig

    for family in FAMILIES.values():
        architecture = f"FastWeights{family.model_class}"
        ModelRegistry.register_model(architecture, MODEL)
        MODELS_CONFIG_MAP[architecture] = ConvertedModelConfig
