"""Saved tiny models with a tokenizer, and the command line run in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging
from typer.testing import CliRunner, Result

from fastweights import FastWeightsConfig
from fastweights.cli.app import app
from fastweights.conversion import convert
from helpers.tiny import VOCAB, pretrained

# Models this small are many times slower on two threads than on one.
torch.set_num_threads(1)
# As the program does it (cli.main).
logging.disable_progress_bar()

# A chat as the characters below can write it.
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + '. ' + m['content'] + '!\n' }}{% endfor %}"
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?'\n"


def tokenizer(bos: bool = True) -> Any:
    """One token for each character, in a vocabulary as large as the tiny models'; <s> is the first token of a text, or
    with bos=False there is none (as in GPT-2's, <s> is the bos token nevertheless)."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", *CHARACTERS])}
    assert len(vocabulary) == VOCAB
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = Fuse()
    if bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>")


def save_model(folder: Path, family: str = "gpt2", with_tokenizer: bool = True, **settings: Any) -> Path:
    """A saved model: converted where settings are given, else as it was pretrained."""
    model = pretrained(family)
    if settings:
        convert(model, FastWeightsConfig(**settings))
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer().save_pretrained(folder)
    return folder


def run(*arguments: Any, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def succeed(*arguments: Any, stdin: str | None = None) -> Result:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def error_of(*arguments: Any) -> str:
    """The one line that a command fails with."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert result.stdout == ""
    return lines[0].removeprefix("error: ")
