"""Tiny random models of every family, large enough to have grouped heads, partial rotary and sliding layers."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers

from fastweights.modeling.adaptive_input import AdaptiveInputConfig
from fastweights.modeling.classes import keep_softcap
from fastweights.modeling.families import FAMILIES

VOCAB = 61
# Families differ in what they call these sizes.
SIZES = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=VOCAB)
SPECIAL = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
LLAMA_LIKE = SIZES | SPECIAL | dict(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=512)

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2",
        dict(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=96)
        | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        | SPECIAL,
    ),
    "llama": ("Llama", LLAMA_LIKE),
    "mistral": ("Mistral", LLAMA_LIKE | dict(sliding_window=7)),
    "qwen2": ("Qwen2", LLAMA_LIKE),
    "qwen3": ("Qwen3", LLAMA_LIKE | dict(head_dim=8)),
    "gemma2": ("Gemma2", LLAMA_LIKE | dict(head_dim=8, sliding_window=7, query_pre_attn_scalar=8)),
    "gemma3_text": ("Gemma3", LLAMA_LIKE | dict(head_dim=8, sliding_window=7, query_pre_attn_scalar=8)),
    "gpt_neox": ("GPTNeoX", SIZES | SPECIAL | dict(intermediate_size=48, max_position_embeddings=512)),
    "opt": ("OPT", SIZES | SPECIAL | dict(ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=96, dropout=0.0)),
    "adaptive_input": (
        "AdaptiveInput",
        SIZES
        | SPECIAL
        | dict(intermediate_size=48, cutoffs=[20, 40], factor=2, activation_dropout=0.0, softmax_dropout=0.0)
        | dict(dropout=0.0, attention_dropout=0.0),
    ),
}
CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig"}


def config_of(family: str, **changes: Any) -> Any:
    name, values = CONFIGS[family]
    if family == "adaptive_input":
        return AdaptiveInputConfig(**values | changes)
    return getattr(transformers, CONFIG_NAMES.get(name, f"{name}Config"))(**values | changes)


@functools.cache
def _pretrained(family: str, **changes: Any) -> Any:
    """Weights far larger than a fresh start's, so that tokens differ clearly and every bias counts."""
    torch.manual_seed(7)
    model = FAMILIES[family].pretrained_class(config_of(family, **changes)).eval()
    keep_softcap(model.config)  # as fw.load has it
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            norm = "norm" in parameter_name or "ln_" in parameter_name
            parameter.copy_(
                torch.randn_like(parameter) * (0.1 if norm else 0.25) + float(norm and "gemma" not in family)
            )
    return model


def pretrained(family: str, **changes: Any) -> Any:
    return copy.deepcopy(_pretrained(family, **changes))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def depend_on_input(model: Any) -> None:
    """Gates and the window's share start independent of the token; make them depend on it."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if (".gates." in name and name.endswith("weight")) or ".mix.from_token." in name:
            # as much for gates of low rank, whose input is narrower
            scale = 0.3 * (model.config.hidden_size / parameter.shape[1]) ** 0.5
            parameter.data = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter)
