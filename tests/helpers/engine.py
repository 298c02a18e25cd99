"""Converted tiny models and prompts for the tests of the decode engine."""

from __future__ import annotations

from typing import Any

import torch

import fastweights as fw
from helpers.tiny import depend_on_input, pretrained, tokens

SETTINGS = [
    dict(rule="decay", m=6),
    dict(rule="decay", m=6, gate_init="log", window=5, sinks=2, state_heads="kv", mix="token"),
    dict(rule="delta", m=6, rotary="drop"),
    dict(rule="gated_delta", m=6, window=3),
    dict(rule="add", m=6, feature_map="elu", normalize="attention", output_norm=True),
    dict(rule="gated", m=12, state_heads="kv", window=1),
    dict(rule="gated_delta", m=8, window=4, sinks=2, mix="token", projections="shared", gate_rank=3),
    dict(rule="decay", m=8, gate_init="log", window=3, projections="shared", state_heads="kv", gate_rank=5),
    dict(rule="add", m=8, window=3, projections="shared"),
    dict(rule="gated_delta", m=8, window=3, sinks=2, wide_window=9, mix="token", projections="shared", gate_rank=3),
    dict(rule="local", window=4),
    dict(rule="abc", m=5, window=3, projections="shared", state_heads="kv", gate_rank=3),
    dict(rule="linformer", m=6, train_length=8),
]
LENGTHS = (1, 9, 4)
WIDE = fw.Sampling(temperature=1.5)


def name(settings: dict[str, Any]) -> str:
    return "-".join(map(str, settings.values()))


def converted(family: str = "llama", **settings: Any) -> Any:
    model = fw.convert(pretrained(family), fw.FastWeightsConfig(**settings or SETTINGS[0])).eval()
    depend_on_input(model)
    return model


def prompts_of(*lengths: int) -> list[torch.Tensor]:
    """A prompt [T] of random tokens for each length T."""
    return [tokens(length, seed=length) for length in lengths]


def greedy(model: Any, prompt: torch.Tensor, count: int, **options: Any) -> list[int]:
    """The new tokens of transformers' greedy generate for one prompt [T]."""
    ids = torch.as_tensor(prompt)[None].to(model.device)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0) | options
    return model.generate(ids, max_new_tokens=count, **options)[0, ids.shape[1] :].tolist()
