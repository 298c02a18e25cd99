"""fairseq's checkpoints and dictionaries."""

from __future__ import annotations

import argparse
import gzip
import io
import lzma
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fairseq as written
from helpers.cli import run
from helpers.relative_error import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastweights as fw
from fastweights.loading import load_tokenizer
from fastweights.modeling import fairseq
from fastweights.modeling.description import describe_source
from fastweights.modeling.fairseq import dictionary_tokenizer, load_checkpoint
from fastweights.utils.errors import CheckpointError

IDS = [2, 5, 10, 11, 22, 23, 42, 3, 0, 30, 7]
FORMS: dict[str, dict[str, Any]] = {
    "tied": {},
    "tied words, own projections": {"tied_projections": False},
    "nothing tied": {"tied": False},
    "no buffers": {"buffers": False},
}


@pytest.mark.parametrize("form", FORMS)
def test_imported_model_matches_a_slow_forward_of_its_own(form: str, tmp_path: Path) -> None:
    tensors = written.state_dict(**FORMS[form])
    model = load_checkpoint(written.save(tmp_path / "model.pt", tensors))
    expected = written.log_probabilities(tensors, IDS)
    assert_close("log-probabilities", model(torch.tensor([IDS])).logits[0], expected, 1e-5)
    wide = load_checkpoint(tmp_path / "model.pt", torch.float64)
    assert_close("in float64", wide(torch.tensor([IDS])).logits[0], expected, 1e-6)
    config = model.config
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.3, 0.1, 0.1)
    assert config.softmax_dropout == 0.2 and config.eos_token_id == model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("form", FORMS)
def test_import_keeps_every_tensor_and_survives_saving(form: str, tmp_path: Path) -> None:
    """Every stored number is in the imported model, and in the folder that it is saved to."""
    tensors = written.state_dict(**FORMS[form])
    model = fw.load(written.save(tmp_path / "model.pt", tensors))
    own = sum(parameter.numel() for parameter in model.parameters())
    stored = {t.data_ptr(): t.numel() for n, t in tensors.items() if "version" not in n and "_float" not in n}
    stored.pop(tensors.get("decoder.embed_positions.weights", torch.zeros(1)).data_ptr(), None)
    assert own == sum(stored.values())
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(torch.tensor([IDS])).logits, model(torch.tensor([IDS])).logits)
    assert sum(parameter.numel() for parameter in again.parameters()) == own


def _omegaconf(values: dict[str, Any], patch: pytest.MonkeyPatch) -> Any:
    """Settings as omegaconf's objects, which hold values two levels down. The package itself is not needed."""
    module: Any = types.ModuleType("omegaconf")
    patch.setitem(sys.modules, module.__name__, module)
    for name in ("DictConfig", "AnyNode"):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))
    config, nodes = module.DictConfig(), {}
    for key, value in values.items():
        nodes[key] = module.AnyNode()
        nodes[key]._val = value
    config._content = nodes
    return config


def test_settings_of_every_version_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, ids = written.state_dict(), torch.tensor([IDS])
    expected = load_checkpoint(written.save(tmp_path / "model.pt", tensors))(ids).logits
    config = _omegaconf(written.ARGS, monkeypatch)
    for number, (options, names) in enumerate(
        (
            ({"args": None, "cfg": {"model": written.ARGS, "task": {"seed": 1}}}, tensors),
            ({"args": None, "cfg": {"model": argparse.Namespace(**written.ARGS)}}, tensors),
            ({"args": None, "cfg": {"model": config}}, tensors),
            ({"args": argparse.Namespace(**written.ARGS), "legacy": True}, written.with_old_names(tensors)),
        )
    ):
        path = written.save(tmp_path / f"{number}.pt", names, **options)
        assert torch.equal(load_checkpoint(path)(ids).logits, expected), options


def test_half_precision_is_kept_or_converted(tmp_path: Path) -> None:
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in written.state_dict().items()}
    path = written.save(tmp_path / "model.pt", tensors)
    assert fw.load(path).dtype == torch.float16 and fw.load(path, dtype="float32").dtype == torch.float32


def _without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in written.state_dict().items() if key != name}


def _changed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return written.state_dict() | {name: tensor}


FC2, WORDS = "decoder.layers.1.fc2.weight", "decoder.adaptive_softmax.tail.0.2.weight"
WRONG: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "partial": (_without(FC2), f"missing tensors: {FC2}"),
    "no embeddings": ({}, "it is not a whole model"),
    "final norm": (_changed("decoder.layer_norm.weight", torch.ones(16)), "does not have: decoder.layer_norm.weight"),
    "wrong shape": (_changed(FC2, torch.zeros(3, 4)), r"layers.1.fc2.weight is \[3, 4\], expected \[16, 24\]"),
    "untied though tied": (_changed(WORDS, torch.zeros(12, 8)), "are tied, and they differ"),
    "one number repeated": (_changed(FC2, torch.zeros(1).expand(16, 2**40)), f"{FC2} has .* elements"),
    "translation": (_changed("encoder.layers.0.fc1.weight", torch.ones(1)), "has an encoder"),
    "one table": (_changed("decoder.embed_tokens.weight", torch.ones(1)), "only language models with adaptive input"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_or_partial_checkpoint_is_refused_with_what_is_missing(case: str, tmp_path: Path) -> None:
    tensors, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(written.save(tmp_path / "model.pt", tensors))


def test_settings_that_the_architecture_does_not_have_are_refused(tmp_path: Path) -> None:
    tensors = written.state_dict()
    for changes, message in (
        ({"decoder_normalize_before": False}, "decoder_normalize_before=False: only True"),
        ({"activation_fn": "gelu"}, "activation_fn='gelu': only 'relu'"),
        ({"decoder_attention_heads": None}, "no decoder_attention_heads"),
        ({"decoder_attention_heads": 3}, "must be divisible by 3"),
    ):
        args = argparse.Namespace(**written.ARGS | changes)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(written.save(tmp_path / "model.pt", tensors, args=args))
    with pytest.raises(CheckpointError, match="neither settings in 'args' nor in 'cfg'"):
        load_checkpoint(written.save(tmp_path / "model.pt", tensors, args=None))


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for legacy in (False, True):
        path = written.save(tmp_path / "model.pt", written.state_dict(), legacy, args=_Runs())
        with pytest.raises(CheckpointError, match=r"mkdir|posix"):
            load_checkpoint(path)
    path.write_bytes(pickle.dumps(_Runs()))
    with pytest.raises(CheckpointError, match="cannot be read as a PyTorch checkpoint"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(CheckpointError, match="no fairseq checkpoint"):
        fw.load(path)
    path.write_text("<html>404</html>")
    with pytest.raises(CheckpointError, match="not a checkpoint of PyTorch"):
        fw.load(path)
    whole = io.BytesIO()
    torch.save({"model": {}}, whole)
    path.write_bytes(whole.getvalue()[:-40])
    with pytest.raises(CheckpointError, match="cannot be read as a PyTorch checkpoint"):
        fw.load(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(CheckpointError, match="no entry 'model' with tensors, found state_dict"):
        fw.load(path)
    with pytest.raises(CheckpointError, match=rf"for a fairseq checkpoint give {path}"):
        fw.load(tmp_path)
    (tmp_path / "model.tar.bz2").touch()
    with pytest.raises(CheckpointError, match="unpack it first"):
        fw.load(tmp_path / "model.tar.bz2")


# Dictionaries


def test_words_are_split_at_white_space_and_lines_end_with_eos(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("the 9\n, 5\n@-@ 3\n= 2\nÉtat 1\n")
    tokenizer = dictionary_tokenizer(path, 9)
    text = " \n = the = \n\nthe,  the\tÉtat , @-@ état <unk> </s>\r\nthe"
    assert tokenizer(text)["input_ids"] == [2, 7, 4, 7, 2, 2, 3, 4, 8, 5, 6, 3, 3, 2, 2, 4]
    assert tokenizer.decode([4, 5, 8]) == "the , État"
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (None, 1, 2)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(text)["input_ids"] == tokenizer(text)["input_ids"]
    (tmp_path / "dict.txt.xz").write_bytes(lzma.compress(path.read_bytes()))
    assert dictionary_tokenizer(tmp_path / "dict.txt.xz").get_vocab() == tokenizer.get_vocab()


def test_a_word_that_overwrites_another_has_the_later_number(tmp_path: Path) -> None:
    path = tmp_path / "dict.txt"
    path.write_text("a 3\nb 2\na 1 #fairseq:overwrite\n")
    assert dictionary_tokenizer(path, 7)("a b")["input_ids"] == [6, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1\nb\n", "line 2: a dictionary of fairseq .* found 'b'"),
        ('{"a": 0}', "line 1: a dictionary of fairseq"),
        ("a 1\na 1\n", "line 2: the word 'a' was there before"),
        ("a 1\n", "1 words and 4 special ones, 5 in all, and the model 6: it is another model's"),
    ],
)
def test_wrong_dictionary_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "dict.txt").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        dictionary_tokenizer(tmp_path / "dict.txt", 6)


def test_damaged_dictionary_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b"a 1\nb 1\n" * 100))
    content[12:20] = bytes(8)
    (tmp_path / "dict.txt.gz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the dictionary .*dict\.txt\.gz cannot be read"):
        dictionary_tokenizer(tmp_path / "dict.txt.gz", 6)


def test_compressed_dictionary_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairseq, "_LONGEST_DICTIONARY", 1000)
    with gzip.open(tmp_path / "dict.txt.gz", "wt") as file:
        file.write("a 1\n" * 300)
    with pytest.raises(CheckpointError, match=r"dict\.txt\.gz is too large: more than 1,000 characters"):
        dictionary_tokenizer(tmp_path / "dict.txt.gz", 6)


# The command


def test_convert_takes_a_checkpoint_with_its_dictionary(tmp_path: Path) -> None:
    checkpoint = written.save(tmp_path / "checkpoint_best.pt", written.state_dict())
    words = written.dictionary(tmp_path / "words.txt")
    converted = tmp_path / "converted"
    settings = ("--preset", "paper", "--rule", "decay", "--m", 4, "-o", converted)
    missing = run("convert", checkpoint, *settings)
    assert missing.exit_code == 2 and "has no dictionary beside it" in missing.stderr
    assert run("convert", checkpoint, "--dict", words, *settings).exit_code == 0
    model, tokenizer = fw.load(converted), load_tokenizer(converted)
    assert tokenizer("w3 \n")["input_ids"] == [7, 2]
    assert model.config.fastweights_base == str(checkpoint)
    with pytest.raises(CheckpointError, match="has no dictionary beside it"):
        load_tokenizer(checkpoint)
    words.rename(tmp_path / "dict.txt")
    assert run("convert", checkpoint, *settings, "--overwrite").exit_code == 0
    assert load_tokenizer(checkpoint)("w3")["input_ids"] == [7]
    assert describe_source(checkpoint).family == describe_source(converted).family == "adaptive_input"


def test_wrong_uses_of_dict_are_one_line(tmp_path: Path) -> None:
    checkpoint = written.save(tmp_path / "model.pt", written.state_dict())
    words = written.dictionary(tmp_path / "words.txt", 7)
    for arguments, message in (
        ((checkpoint, "--dict", tmp_path / "dict.txt"), "there is no such file"),
        ((checkpoint, "--dict", words), "it is another model's"),
        (("gpt2", "--dict", words), "--dict is for fairseq checkpoints"),
    ):
        result = run("convert", *arguments, "-o", tmp_path / "converted")
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr
