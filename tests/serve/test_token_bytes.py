"""The bytes of tokens, also of those that are a part of a character."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from fastweights.serve.service import token_bytes

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def tokenizer_of(tokens: list[str], decoder: Any) -> Any:
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizer_of(sorted(ByteLevel.alphabet()), decoders.ByteLevel()),
        tokenizer_of(BYTES, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
    ],
    ids=["byte-level", "byte fallback"],
)
def test_every_byte_has_a_token_with_these_bytes(tokenizer: Any) -> None:
    found = {token_bytes(tokenizer, token, tokenizer.decode([token])) for token in range(256)}
    assert found == {bytes([byte]) for byte in range(256)}
