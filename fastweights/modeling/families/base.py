"""What a model family defines: where its attention is, its sizes, and how its weights are stored.

Shapes: q_weight [H,d,D], k_weight and v_weight [Hkv,d,D], their biases without D, o_weight [D,H*d], norm weights [d]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastweights.modeling.layer import AttentionShape


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of a pretrained attention layer, in one layout for all families. None: the layer has no such tensor."""

    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class ModulePaths:
    """Where a model's other modules are, for decoding that does not call the model's own forward.

    Attributes:
        norm, mlp_norm: norms before attention and before the MLP, as paths from a block (so are all up to `down`).
        up: the MLP's first projection, or a gate and the projection that it multiplies.
        down: the MLP's second projection.
        embedding: the module that embeds tokens, a table or not; from the model.
        final_norm: the norm before the output layer, from the model. None: there is none.
        attention_out_norm, mlp_out_norm: norms after attention and after the MLP, if the family has them; from a block.
        positions: position embeddings, a learned table or a module that computes them; from the model.
        rotary: the module that computes RoPE's cos and sin, from the model.
        activation: config field with the name of the activation.
        scales_embedding: whether embeddings are multiplied by the square root of the width.
        supports: False for a configuration in which the blocks are built differently.
    """

    norm: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    embedding: str
    final_norm: str | None
    attention_out_norm: str | None = None
    mlp_out_norm: str | None = None
    positions: str | None = None
    rotary: str | None = None
    activation: str = "hidden_act"
    scales_embedding: bool = False
    supports: Callable[[Any], bool] = lambda config: True


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        name: `model_type` of the pretrained model.
        model_class: the name of its class.
        layers: path of the list of blocks in the model.
        attention: name of attention in a block.
        shape: (attention module, model config) -> AttentionShape.
        weights: (attention module, its shape) -> AttentionWeights.
        module_paths: for the decode engine. None: it uses the model's own forward.
        learned_positions: config field with the length of a learned position table. None: there is no table.
        masks_documents: whether the family's own attention separates packed documents by position_ids.
        decoder_class: the class that runs the layers. None: it is the backbone (`AutoModel`) itself.
        module: where `model_class` is.
    """

    name: str
    model_class: str
    layers: str
    attention: str
    shape: Callable[[Any, Any], AttentionShape]
    weights: Callable[[Any, AttentionShape], AttentionWeights]
    module_paths: ModulePaths | None = None
    learned_positions: str | None = None
    masks_documents: bool = True
    decoder_class: str | None = None
    module: str = "transformers"

    @property
    def pretrained_class(self) -> Any:
        """The class of the pretrained causal language model."""
        return getattr(importlib.import_module(self.module), self.model_class)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a whole model, or of the backbone or decoder inside one."""
        path = self.layers.split(".")
        while not hasattr(model, path[0]):
            path = path[1:]
        return list(model.get_submodule(".".join(path)).children())

    def attention_of(self, block: nn.Module) -> nn.Module:
        """The attention module of a block."""
        return getattr(block, self.attention)


def split_heads(linear: Any, heads: int) -> tuple[Tensor, Tensor | None]:
    """A Linear's weight [heads*d,D] and bias as [heads,d,D] and [heads,d]."""
    weight, bias = linear.weight.detach(), linear.bias
    return weight.unflatten(0, (heads, -1)), None if bias is None else bias.detach().unflatten(0, (heads, -1))


def adds_one_to_weight(norm: Any) -> bool:
    """Whether a norm multiplies by 1 + weight, as Gemma's do."""
    return type(norm).__name__.startswith("Gemma")
