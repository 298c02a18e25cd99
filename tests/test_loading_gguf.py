"""A GGUF file is converted, saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import tokens
from helpers.tiny_gguf import write_tiny_llama
from transformers import AutoModelForCausalLM

import fastweights as fw
from fastweights.loading import load, load_tokenizer, save
from fastweights.modeling.description import describe_source
from fastweights.modeling.source_files import check_source
from fastweights.tokenization import adds_eos, bos_token
from fastweights.utils.errors import CheckpointError
from fastweights.utils.gguf import read_metadata

gguf = pytest.importorskip("gguf")


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


@pytest.mark.parametrize("field", ["block_count", "embedding_length", "feed_forward_length"])
def test_header_that_asks_for_more_than_the_file_holds_is_refused(field: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_llama(path)
    content = bytearray(path.read_bytes())
    name = f"llama.{field}".encode()
    value = content.index(name) + len(name) + 4  # after the type
    content[value : value + 4] = (2**30).to_bytes(4, "little")
    path.write_bytes(content)
    for read in (load, describe_source, check_source):
        with pytest.raises(CheckpointError, match=r"tiny\.gguf.*(too large|must be at most)"):
            read(path)


def test_gguf_file_can_be_converted_saved_and_loaded(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf")
    model = fw.convert(load(tmp_path / "tiny.gguf"), fw.FastWeightsConfig(m=8))
    save(model, tmp_path / "converted")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
