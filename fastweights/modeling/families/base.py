"""What a model family must tell: where its attention is, what it looks like, and how its weights are laid out.

Shapes: q_weight [H,d,D], k_weight and v_weight [Hkv,d,D], their biases without D, o_weight [D,H*d], norm weights [d]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastweights.modeling.layer import AttentionShape


@dataclass(frozen=True)
class AttentionWeights:
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
class Parts:
    """What a block does besides attention, and what stands before and after the blocks, for decoding that does not go
    through the model's modules. The first paths start at a block, those after `embedding` at the model.
    `up` names one projection, or a gate and the projection it multiplies. `holds` is False for a configuration that
    is built otherwise."""

    norm: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    embedding: str
    final_norm: str
    attention_out_norm: str | None = None
    mlp_out_norm: str | None = None
    positions: str | None = None
    rotary: str | None = None
    activation: str = "hidden_act"
    scales_embedding: bool = False
    holds: Callable[[Any], bool] = lambda config: True


@dataclass(frozen=True)
class Family:
    """`layers` is the path of the list of blocks in the model, `attention` the name of attention in a block.
    `learned_positions` names the config field with the length of a learned position table, if there is one.
    `masks_documents`: the family's own attention sees packed documents in position_ids.
    `parts` is for the decode engine; without it that goes through the model's own forward.
    `decoder_class` names the class that runs the layers, where that is not the backbone (`AutoModel`) itself."""

    name: str
    model_class: str
    layers: str
    attention: str
    shape: Callable[[Any, Any], AttentionShape]
    weights: Callable[[Any, AttentionShape], AttentionWeights]
    parts: Parts | None = None
    learned_positions: str | None = None
    masks_documents: bool = True
    decoder_class: str | None = None

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The blocks of a whole model, or of the backbone or decoder inside one."""
        path = self.layers.split(".")
        while not hasattr(model, path[0]):
            path = path[1:]
        return list(model.get_submodule(".".join(path)).children())

    def attention_of(self, block: nn.Module) -> nn.Module:
        return getattr(block, self.attention)


def by_head(linear: Any, heads: int) -> tuple[Tensor, Tensor | None]:
    """A Linear's weight [heads*d,D] and bias as [heads,d,D] and [heads,d]."""
    weight, bias = linear.weight.detach(), linear.bias
    return weight.unflatten(0, (heads, -1)), None if bias is None else bias.detach().unflatten(0, (heads, -1))


def stored_less_one(norm: Any) -> bool:
    """Gemma's norms multiply by 1 + weight."""
    return type(norm).__name__.startswith("Gemma")
