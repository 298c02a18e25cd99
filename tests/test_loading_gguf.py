"""A GGUF file is converted, saved and loaded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny import tokens
from transformers import AutoModelForCausalLM

import fastweights as fw
from fastweights.loading import load, save

gguf = pytest.importorskip("gguf")

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, VOCAB = 2, 64, 4, 2, 96, 61


def write_tiny_llama(path: Path) -> None:
    writer, random = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
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


def test_gguf_file_can_be_converted_saved_and_loaded(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf")
    model = fw.convert(load(tmp_path / "tiny.gguf"), fw.FastWeightsConfig(m=8))
    save(model, tmp_path / "converted")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
