"""The table of model families. To add one, write a file with `shape` and `weights`, and enter it here."""

from __future__ import annotations

from typing import Any

from transformers import AutoModel, AutoModelForSequenceClassification

from fastweights.modeling.families.adaptive_input import ADAPTIVE_INPUT_FAMILY
from fastweights.modeling.families.base import AttentionWeights, Family
from fastweights.modeling.families.gpt2 import GPT2
from fastweights.modeling.families.gpt_neox import GPT_NEOX
from fastweights.modeling.families.llama import GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from fastweights.modeling.families.opt import OPT
from fastweights.utils.errors import FastWeightsError

__all__ = ["FAMILIES", "AttentionWeights", "Family", "UnknownFamilyError", "family_of"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, GPT_NEOX, OPT, ADAPTIVE_INPUT_FAMILY)
}


class UnknownFamilyError(FastWeightsError):
    """A model of a family that is not in the table."""


def family_of(model: Any) -> Family:
    """The family of a causal language model, converted or pretrained.

    Raises:
        UnknownFamilyError: if no family has this model's class.
    """
    if isinstance(getattr(model, "family", None), Family):
        return model.family
    for family in FAMILIES.values():
        if type(model).__name__ == family.model_class:
            return family
    for family in FAMILIES.values():
        if type(model).__name__ in _other_classes(family):
            raise UnknownFamilyError(
                f"cannot convert a {type(model).__name__}, which has no language-model head: load the model with "
                "AutoModelForCausalLM.from_pretrained, convert and save it, and load the converted folder with "
                "AutoModel or AutoModelForSequenceClassification"
            )
    known = ", ".join(f"{family.name} ({family.model_class})" for family in FAMILIES.values())
    raise UnknownFamilyError(
        f"cannot convert a {type(model).__name__}: supported families are {known}. To add one, see docs/add_a_family.md"
    )


def _other_classes(family: Family) -> list[str]:
    """Names of the other classes for a family's config: the backbone and models with other heads."""
    config = family.pretrained_class.config_class
    mappings = (AutoModel._model_mapping, AutoModelForSequenceClassification._model_mapping)
    return [mapping[config].__name__ for mapping in mappings]
