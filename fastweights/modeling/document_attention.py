"""Pretrained attention over packed documents, with the window's kernels instead of masks of T x T.

For transformers this is an implementation of attention, like sdpa. A model that uses it gets the documents of its rows
in place of a mask: where each token's document starts and ends, [2,1,B,T] int32, or [0,1,B,T] where every row is one
document. transformers passes masks of four dimensions on as they are, and reads nothing from the device to make one.
Any other mask goes to sdpa.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fastweights import ops
from fastweights.modeling.families import family_of
from fastweights.modeling.layer import FastWeightsAttention
from fastweights.modeling.window import autocast_dtype
from fastweights.ops.window import Documents, documents_of, window_attention

NAME = "fastweights"


def use_document_kernels(model: Any) -> bool:
    """Let the attention layers of a model on its device use the kernels, if they can run. Returns whether they do.

    Models with dropout in their attention cannot train this way: the kernels have none.
    """
    family = family_of(model)
    layers = [family.attention_of(block) for block in family.blocks(model)]
    shapes = [family.shape(x, model.config) for x in layers if not isinstance(x, FastWeightsAttention)]
    empty = [torch.empty(1, 1, 1, shape.head_dim, device=model.device) for shape in shapes]
    if not shapes or not all(ops.runs_window_kernels(x, x, x) for x in empty):
        return False
    model.config._attn_implementation = NAME
    return True


def uses_document_kernels(model: Any) -> bool:
    """Whether `use_document_kernels` was successful."""
    return model.config._attn_implementation == NAME


def documents_mask(tokens: Tensor, reset: Tensor | None) -> Tensor:
    """The documents of tokens [B,T,...], in place of a mask.

    Args:
        tokens: ids or embeddings; only their shape and device count.
        reset: [B,T], True at document starts. None: every row is one document.
    """
    if reset is None:
        return torch.empty(0, 1, *tokens.shape[:2], dtype=torch.int32, device=tokens.device)
    return torch.stack(documents_of(reset))[:, None]


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B,H,T,d], key and value [B,Hkv,T,d] -> [B,T,H,d], as transformers calls an implementation."""
    length = query.shape[2]
    if attention_mask is None or attention_mask.dtype != torch.int32:
        options |= {"sliding_window": sliding_window, "softcap": softcap}
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    packed = len(attention_mask) > 0
    window = length if sliding_window is None else min(sliding_window, length)
    if not packed and window == length and softcap is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **options)
    q, k, v = (x.transpose(1, 2).to(autocast_dtype(x)) for x in (query, key, value))
    documents = Documents(*attention_mask[:, 0]) if packed else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return window_attention(q, k, v, window, 0, documents, softcap, scale), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
