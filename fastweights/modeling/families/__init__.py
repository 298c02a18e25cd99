"""The table of model families. To add one: a file with `shape` and `weights`, and a line here (CONTRIBUTING.md)."""

from __future__ import annotations

from typing import Any

from fastweights.modeling.families.base import AttentionWeights, Family
from fastweights.modeling.families.gpt2 import GPT2
from fastweights.modeling.families.gpt_neox import GPT_NEOX
from fastweights.modeling.families.llama import GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from fastweights.modeling.families.opt import OPT
from fastweights.utils.errors import FastWeightsError

__all__ = ["FAMILIES", "AttentionWeights", "Family", "UnknownFamilyError", "family_of"]

FAMILIES: dict[str, Family] = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, GPT_NEOX, OPT)
}


class UnknownFamilyError(FastWeightsError):
    """A model of a family that is not in the table."""


def family_of(model: Any) -> Family:
    """The family of a causal language model: a converted one says it, a pretrained one's class tells."""
    if isinstance(getattr(model, "family", None), Family):
        return model.family
    for family in FAMILIES.values():
        if type(model).__name__ == family.model_class:
            return family
    known = ", ".join(f"{family.name} ({family.model_class})" for family in FAMILIES.values())
    raise UnknownFamilyError(
        f"cannot convert a {type(model).__name__}: the families known are {known}. "
        "To add one, write a file in fastweights/families and enter it in its table: see CONTRIBUTING.md"
    )
