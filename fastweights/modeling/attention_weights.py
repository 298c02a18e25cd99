"""The weights of a pretrained model's attention, computed again from the inputs of its layers, and what they say about
the layers.

Shapes: x [B,T,D]   q [B,T,H,d]   k [B,T,Hkv,d]   place [T]: a token's place in its document, from 0
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.config import ConfigError
from fastweights.modeling.families import family_of
from fastweights.modeling.initialization import attention_projections
from fastweights.modeling.layer import AttentionShape
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import position_limit
from fastweights.utils.errors import Argument

# The repeated random tokens of `lookup_attention`: rows, and tokens before they are repeated, where positions allow it.
ROWS, REPEATED = 4, 128
# Tokens of a repetition that are left out: there is no earlier text yet to recognize it by.
FIRST_REPEATED = 8
# The shortest row of repeated tokens with something to measure.
SHORTEST = 2 * (FIRST_REPEATED + 2) + 1
# One layer in so many gets the wide window.
LAYERS_PER_WIDE_LAYER = 4


def queries_and_keys(
    model: Any, layer: int, x: Tensor, position_embeddings: Any
) -> tuple[Tensor, Tensor, AttentionShape]:
    """The queries and keys of a pretrained layer, with the scale of its logits, and the layer's sizes.

    Args:
        model: The pretrained model.
        layer: Index of the layer.
        x: The layer's input [B,T,D].
        position_embeddings: cos and sin of RoPE. None: the model has none.
    """
    family = family_of(model)
    attention: Any = family.attention_of(family.blocks(model)[layer])
    shape = family.shape(attention, model.config)
    projections = attention_projections(family.weights(attention, shape), shape).to(x.device)
    with torch.autocast(x.device.type, enabled=False):
        q, k, _ = projections(x.float(), position_embeddings)
    return q, k, shape


def attention_weights(q: Tensor, k: Tensor, shape: AttentionShape, rows: Tensor, place: Tensor) -> Tensor:
    """The attention [H,n,S] of some tokens of one sequence to all tokens up to the last of them.

    Args:
        q: Queries [T,H,d]; the scale of the logits is in q and k.
        k: Keys [T,Hkv,d].
        shape: The attention's options.
        rows: Indices [n] of the tokens, in order.
        place: Each token's place [T] in its document.
    """
    seen = torch.arange(int(rows[-1]) + 1, device=q.device)
    distance = rows[:, None] - seen
    visible = (distance >= 0) & (distance <= place[rows, None])
    if shape.sliding_window is not None:
        visible &= distance < shape.sliding_window
    block = q[rows].unflatten(1, (shape.kv_heads, -1))
    with torch.autocast(q.device.type, enabled=False):
        logits = torch.einsum("ihgd,jhd->hgij", block, k[seen]).flatten(0, 1)
    if shape.softcap is not None:
        logits = shape.softcap * torch.tanh(logits / shape.softcap)
    return logits.masked_fill(~visible, float("-inf")).softmax(-1)


def lookup_attention(model: Any, layers: Iterable[int]) -> dict[int, float]:
    """How much layers attend to an earlier occurrence of the current token, and to the token that followed it.

    Heads that do so let a Transformer repeat and look up earlier text: duplicate-token heads (Wang et al., 2022) find
    the earlier occurrence, and induction heads (Olsson et al., 2022) what followed it. They show with repeated random
    tokens, so this takes no text.

    Args:
        model: A pretrained model, in memory, with positions for at least SHORTEST tokens.
        layers: Indices of the layers to measure.

    Returns:
        For each of the layers the sum over its heads of the mean attention to these two tokens.
    """
    family, ids = family_of(model), _repeated_tokens(model)
    blocks, length = family.blocks(model), ids.shape[1] // 2
    # The first token of a row is not repeated: token t of the repeated ones is at 1 + t, and again at 1 + length + t.
    repeated = torch.arange(FIRST_REPEATED, length - 1)
    queries, earlier, place = 1 + length + repeated, 1 + repeated, torch.arange(ids.shape[1])
    scores: dict[int, float] = {}

    def measure(layer: int) -> Any:
        def hook(_module: nn.Module, arguments: Any, keywords: Any) -> None:
            x = arguments[0] if arguments else keywords["hidden_states"]
            q, k, shape = queries_and_keys(model, layer, x, keywords.get("position_embeddings"))
            rows, places = queries.to(x.device), place.to(x.device)
            weights = torch.stack([attention_weights(*row, shape, rows, places) for row in zip(q, k, strict=True)])
            found = weights[:, :, range(len(rows)), earlier] + weights[:, :, range(len(rows)), earlier + 1]
            scores[layer] = float(found.mean((0, 2)).sum())

        return hook

    hooks = [
        family.attention_of(blocks[layer]).register_forward_pre_hook(measure(layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        with evaluating(model):
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return scores


def _repeated_tokens(model: Any) -> Tensor:
    """Rows [ROWS,1+2n] of one random token, then n others twice."""
    limit = position_limit(model) or 2 * REPEATED + 1
    length = min(REPEATED, (limit - 1) // 2)
    size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    # From the middle half of the vocabulary: tokenizers number bytes and special tokens first, or last.
    drawn = torch.randint(size // 4, max(size // 4 + 1, size * 3 // 4), (ROWS, length + 1), generator=generator)
    return torch.cat([drawn, drawn[:, 1:]], dim=1).to(model.device)


def wide_layers(model: Any, candidates: Collection[int]) -> tuple[int, ...]:
    """The layers that should get a wide window: of the candidates one in LAYERS_PER_WIDE_LAYER, at least one, those
    that look up most. None of them where the model has too few positions for any use of it.

    Raises:
        ConfigError: Values of the model overflow, so that nothing can be measured.
    """
    if (position_limit(model) or SHORTEST) < SHORTEST:
        return ()
    scores = lookup_attention(model, candidates)
    if not all(map(math.isfinite, scores.values())):
        reason = f" cannot be chosen: values of the model overflow in {str(model.dtype).removeprefix('torch.')}"
        raise ConfigError(Argument("wide_layers"), f"{reason}; load it in float32 or bfloat16, or name the layers")
    count = max(1, round(len(scores) / LAYERS_PER_WIDE_LAYER))
    return tuple(sorted(sorted(scores, key=lambda layer: -scores[layer])[:count]))
