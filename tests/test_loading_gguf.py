"""A GGUF file is converted, saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny import tokens
from transformers import AutoModelForCausalLM

import fastweights as fw
from fastweights.loading import load, load_tokenizer, save
from fastweights.tokenization import adds_eos, bos_token
from fastweights.utils.gguf import read_metadata

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


@pytest.mark.parametrize(
    ("fields", "adds"),
    (
        (dict(model="llama", add_bos_token=True, add_eos_token=False), (True, False)),
        (dict(model="llama", add_bos_token=False), (False, False)),
        (dict(model="llama"), (True, False)),  # llama.cpp's default for sentencepiece
        (dict(model="gpt2", pre="llama-bpe"), (True, False)),  # and for Llama 3
        (dict(model="gpt2", pre="smollm"), (False, False)),
        (dict(model="gpt2", pre="default", add_bos_token=True, add_eos_token=True), (True, True)),
    ),
    ids=str,
)
def test_bos_and_eos_settings_of_gguf_survive_saving(fields: dict[str, Any], adds: Any, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf", fields)
    made = load_tokenizer(tmp_path / "tiny.gguf")
    save(load(tmp_path / "tiny.gguf"), tmp_path / "saved", made)
    for found in (made, load_tokenizer(tmp_path / "saved")):
        assert (found.bos_token_id, found.eos_token_id) == (1, 2)
        assert (bos_token(found), adds_eos(found)) == (1 if adds[0] else None, adds[1])


def test_metadata_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf", dict(model="gpt2", pre="smollm", add_bos_token=False))
    found = read_metadata(tmp_path / "tiny.gguf")
    fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
    scalars = {name: field.contents() for name, field in fields.items() if gguf.GGUFValueType.ARRAY not in field.types}
    assert found == {name: value for name, value in scalars.items() if not name.startswith("GGUF.")}
    assert found["tokenizer.ggml.add_bos_token"] is False and found["tokenizer.ggml.pre"] == "smollm"
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(content[:100])
    (tmp_path / "other.gguf").write_bytes(b"abcd" + content)
    for name, reason in (("short", "is cut short"), ("other", "does not start with GGUF")):
        with pytest.raises(ValueError, match=reason):
            read_metadata(tmp_path / f"{name}.gguf")


def test_gguf_file_can_be_converted_saved_and_loaded(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf")
    model = fw.convert(load(tmp_path / "tiny.gguf"), fw.FastWeightsConfig(m=8))
    save(model, tmp_path / "converted")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
