"""A tiny GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, VOCAB = 2, 64, 4, 2, 96, 61


def write_tiny_llama(path: Path, tokenizer: dict[str, Any] | None = None) -> None:
    """A model, with the fields `tokenizer.ggml.NAME` that are given and a vocabulary for them."""
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    if tokenizer is not None:
        _add_tokenizer(writer, **tokenizer)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCAB)
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_q": (WIDTH, WIDTH), f"blk.{i}.attn_k": (kv, WIDTH), f"blk.{i}.attn_v": (kv, WIDTH)}
        shapes |= {
            f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.attn_norm": (WIDTH,),
            f"blk.{i}.ffn_norm": (WIDTH,),
        }
        shapes |= {
            f"blk.{i}.ffn_gate": (INNER, WIDTH),
            f"blk.{i}.ffn_up": (INNER, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, INNER),
        }
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32) * 0.2
        quantize = len(shape) == 2 and shape[1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if quantize else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind) if quantize else values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, model: str, **fields: Any) -> None:
    pieces = ["<unk>", "<s>", "</s>", *("▁" if model == "llama" else "Ġ"), *"abcdefgh", "ab"]
    pieces += [f"<extra{i}>" for i in range(VOCAB - len(pieces))]
    writer.add_tokenizer_model(model)
    writer.add_token_list(pieces)
    writer.add_token_types([3, 3, 3, *[1] * (VOCAB - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if model == "llama":
        writer.add_token_scores([-float(i) for i in range(VOCAB)])
    else:
        writer.add_token_merges(["a b"])
    for name, value in fields.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_string)(f"tokenizer.ggml.{name}", value)
