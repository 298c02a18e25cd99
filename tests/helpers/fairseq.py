"""Checkpoints with fairseq's key names and layout, and its model as slow float64 loops, written from its formulas.

Shapes: x [T,D], one sequence
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS, CUTOFFS, WIDTH, FACTOR, HEADS, LAYERS, INNER = 43, (11, 23), 16, 2, 2, 2, 24
ARGS = dict(
    arch="transformer_lm_wiki103",
    decoder_layers=LAYERS,
    decoder_attention_heads=HEADS,
    decoder_embed_dim=WIDTH,
    decoder_normalize_before=True,
    dropout=0.3,
    attention_dropout=0.1,
    relu_dropout=0.1,
    adaptive_softmax_dropout=0.2,
)
BOUNDS = (0, *CUTOFFS, WORDS)
WIDTHS = [WIDTH // FACTOR**i for i in range(len(BOUNDS) - 1)]
SIZES = [BOUNDS[i + 1] - BOUNDS[i] for i in range(len(BOUNDS) - 1)]


def state_dict(tied: bool = True, tied_projections: bool = True, buffers: bool = True) -> dict[str, Tensor]:
    """Random tensors under the names that fairseq's `model.state_dict()` gives them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, around: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3 + around

    tensors: dict[str, Tensor] = {}
    if buffers:
        tensors |= {"version": torch.tensor([3.0]), "embed_positions._float_tensor": torch.zeros(1)}
        tensors |= {"embed_positions.weights": torch.zeros(9, WIDTH), "embed_tokens._float_tensor": torch.zeros(1)}
        tensors |= {
            "adaptive_softmax.version": torch.tensor([1]),
            "adaptive_softmax.head._float_tensor": torch.zeros(1),
        }
    for i, (size, width) in enumerate(zip(SIZES, WIDTHS, strict=True)):
        tensors[f"embed_tokens.embeddings.{i}.0.weight"] = draw(size, width)
        tensors[f"embed_tokens.embeddings.{i}.1.weight"] = draw(WIDTH, width)
    for i in range(LAYERS):
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            tensors[f"layers.{i}.self_attn.{name}.weight"] = draw(WIDTH, WIDTH)
            tensors[f"layers.{i}.self_attn.{name}.bias"] = draw(WIDTH)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            tensors[f"layers.{i}.{name}.weight"] = draw(WIDTH, around=1.0)
            tensors[f"layers.{i}.{name}.bias"] = draw(WIDTH)
        for name, shape in (("fc1", (INNER, WIDTH)), ("fc2", (WIDTH, INNER))):
            tensors[f"layers.{i}.{name}.weight"] = draw(*shape)
            tensors[f"layers.{i}.{name}.bias"] = draw(shape[0])
    tails = len(SIZES) - 1
    if tied:
        tensors["adaptive_softmax.head.word_proj.weight"] = tensors["embed_tokens.embeddings.0.0.weight"]
        tensors["adaptive_softmax.head.class_proj.weight"] = draw(tails, WIDTH)
    else:
        tensors["adaptive_softmax.head.weight"] = draw(SIZES[0] + tails, WIDTH)
    for i in range(tails):
        own = draw(WIDTHS[i + 1], WIDTH)
        shared = tensors[f"embed_tokens.embeddings.{i + 1}.1.weight"]
        tensors[f"adaptive_softmax.tail.{i}.0.weight"] = shared if tied and tied_projections else own
        words = tensors[f"embed_tokens.embeddings.{i + 1}.0.weight"] if tied else draw(SIZES[i + 1], WIDTHS[i + 1])
        tensors[f"adaptive_softmax.tail.{i}.2.weight"] = words
    return {f"decoder.{name}": tensor for name, tensor in tensors.items()}


def with_old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first versions of fairseq named them: q, k and v in one matrix, norms by number."""
    old = dict(tensors)
    for i in range(LAYERS):
        attention, layer = f"decoder.layers.{i}.self_attn.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            parts = [old.pop(f"{attention}{part}_proj.{kind}") for part in "qkv"]
            old[f"{attention}in_proj_{kind}"] = torch.cat(parts)
            for number, name in ((0, "self_attn_layer_norm"), (2, "final_layer_norm")):
                old[f"{layer}layer_norms.{number}.{kind}"] = old.pop(f"{layer}{name}.{kind}")
    return old


def save(path: Path, model: dict[str, Tensor], legacy: bool = False, **entries: Any) -> Path:
    """A checkpoint as fairseq's trainer saves it: `args` unless another entry is given, and an optimizer's state."""
    entries = entries or {"args": argparse.Namespace(**ARGS)}
    optimizer = {"optimizer_history": [{"criterion_name": "AdaptiveLoss", "num_updates": 3}]}
    extra = {"extra_state": {"epoch": 2, "val_loss": np.float64(3.5)}, "last_optimizer_state": {"state": {}}}
    torch.save(entries | {"model": model} | optimizer | extra, path, _use_new_zipfile_serialization=not legacy)
    return path


def dictionary(path: Path, words: int = WORDS - 4) -> Path:
    path.write_text("".join(f"w{number} {100 - number}\n" for number in range(words)))
    return path


def log_probabilities(tensors: dict[str, Tensor], ids: list[int]) -> Tensor:
    """[T,V], from the tensors alone, token by token and word by word in float64."""
    p = {name.removeprefix("decoder."): tensor.double() for name, tensor in tensors.items()}
    x = torch.stack([_embedded(p, word, t) for t, word in enumerate(ids)])
    for i in range(LAYERS):
        layer = {name.removeprefix(f"layers.{i}."): t for name, t in p.items() if name.startswith(f"layers.{i}.")}
        x = x + _attention(layer, _norm(layer, "self_attn_layer_norm", x))
        inner = (_norm(layer, "final_layer_norm", x) @ layer["fc1.weight"].T + layer["fc1.bias"]).clamp(min=0)
        x = x + inner @ layer["fc2.weight"].T + layer["fc2.bias"]
    return torch.stack([_row(p, hidden) for hidden in x])


def _embedded(p: dict[str, Tensor], word: int, t: int) -> Tensor:
    cluster = sum(word >= cutoff for cutoff in CUTOFFS)
    row = p[f"embed_tokens.embeddings.{cluster}.0.weight"][word - BOUNDS[cluster]]
    positions = []
    half = WIDTH // 2
    for function in (math.sin, math.cos):  # positions start after the padding token's number, 1
        positions += [function((t + 2) * math.exp(-j * math.log(10000) / (half - 1))) for j in range(half)]
    return (
        math.sqrt(WIDTH) * (p[f"embed_tokens.embeddings.{cluster}.1.weight"] @ row) + torch.tensor(positions).double()
    )


def _norm(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * layer[f"{name}.weight"] + layer[f"{name}.bias"]


def _attention(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    q, k, v = (x @ layer[f"self_attn.{n}_proj.weight"].T + layer[f"self_attn.{n}_proj.bias"] for n in "qkv")
    width = WIDTH // HEADS
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(HEADS):
            part = slice(h * width, (h + 1) * width)
            weights = ((q[t, part] * width**-0.5) @ k[: t + 1, part].T).softmax(-1)
            heads.append(weights @ v[: t + 1, part])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ layer["self_attn.out_proj.weight"].T + layer["self_attn.out_proj.bias"]


def _row(p: dict[str, Tensor], hidden: Tensor) -> Tensor:
    if "adaptive_softmax.head.weight" in p:
        head = p["adaptive_softmax.head.weight"] @ hidden
    else:
        names = ("word", "class")
        head = torch.cat([p[f"adaptive_softmax.head.{name}_proj.weight"] @ hidden for name in names])
    head = head - head.logsumexp(0)
    parts = [head[: CUTOFFS[0]]]
    for i in range(len(SIZES) - 1):
        projection = p[f"adaptive_softmax.tail.{i}.0.weight"]
        narrow = projection @ hidden if projection.shape[1] == WIDTH else projection.T @ hidden
        tail = p[f"adaptive_softmax.tail.{i}.2.weight"] @ narrow
        parts.append(head[CUTOFFS[0] + i] + tail - tail.logsumexp(0))
    return torch.cat(parts)
