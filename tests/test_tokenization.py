"""Which models expect bos before every sequence, and what their prompts are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import save_model, tokenizer
from helpers.tiny import pretrained
from tokenizers.processors import TemplateProcessing
from transformers import GemmaTokenizer, LlamaTokenizer

from fastweights.loading import load_tokenizer, save
from fastweights.quickstart import PACKAGED
from fastweights.tokenization import adds_eos, bos_token, prompt_tokens, set_special_tokens

PIECES = {piece: i for i, piece in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<s>", "</s>", "▁", "a", "b"])}


def llama_3() -> Any:
    """As in its tokenizer.json: the post-processor adds bos, and no setting says so."""
    made = tokenizer(bos=False)
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


FAMILIES: dict[str, tuple[Callable[[], Any], int | None]] = {
    "llama 2": (lambda: LlamaTokenizer(vocab=PIECES, merges=[], add_bos_token=True), 4),
    "llama 3": (llama_3, 1),
    "mistral": (lambda: LlamaTokenizer(vocab=PIECES, merges=[], add_bos_token=True, add_prefix_space=False), 4),
    "gemma": (lambda: GemmaTokenizer(vocab=PIECES, merges=[], add_bos_token=True), 2),
    "without": (lambda: LlamaTokenizer(vocab=PIECES, merges=[], add_bos_token=False), None),
    "gpt2": (lambda: tokenizer(bos=False), None),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_bos_is_recognized_before_and_after_saving(name: str, tmp_path: Path) -> None:
    make, expected = FAMILIES[name]
    save(pretrained("llama"), tmp_path / "model", make())
    for made in (make(), load_tokenizer(tmp_path / "model")):
        assert bos_token(made) == expected
        assert (made.encode("ab")[0] == made.bos_token_id) == (expected is not None)
        assert not adds_eos(made)


def test_models_without_bos() -> None:
    assert bos_token(load_tokenizer(PACKAGED)) is None
    assert bos_token(None) is None


@pytest.mark.parametrize("eos", (True, False))
@pytest.mark.parametrize("bos", (True, False))
def test_prompts_have_bos_once_and_never_eos(bos: bool, eos: bool, tmp_path: Path) -> None:
    made = load_tokenizer(save_model(tmp_path))
    made.eos_token = "!"
    set_special_tokens(made, bos, eos)
    assert (bos_token(made), adds_eos(made)) == (1 if bos else None, eos)
    text = made.encode("Hello", add_special_tokens=False)
    assert prompt_tokens(made, "Hello") == ([1, *text] if bos else text)
    assert prompt_tokens(made, "<s>Hello") == [1, *text]
    assert prompt_tokens(made, "Hello", continues=True) == text
    assert prompt_tokens(made, "!")[-1] == made.eos_token_id  # what is written stays
