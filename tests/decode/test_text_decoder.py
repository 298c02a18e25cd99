"""Tokens that are decoded one at a time give the text of all of them, without pieces of characters."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from fastweights.decode.text_decoder import StopTexts, TextDecoder

TEXT = "né 4 € 👩‍🚀 ok"


def byte_tokenizer() -> Any:
    """One token for each byte, so that most characters need several."""
    vocabulary = {token: i for i, token in enumerate(["<end>", *sorted(ByteLevel.alphabet())])}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def word_tokenizer() -> Any:
    """As SentencePiece: ▁ is a space, removed at the beginning; unknown characters are written as bytes."""
    tokens = ["<end>", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="c"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    decoder = TextDecoder(tokenizer)
    return [*(decoder.add(token) for token in ids), decoder.end()]


def test_character_of_several_tokens_comes_whole_with_its_last_token() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(TEXT).input_ids
    assert len(ids) == len(TEXT.encode())
    expected = [character for c in TEXT for character in [""] * (len(c.encode()) - 1) + [c]]
    assert pieces(tokenizer, ids) == [*expected, ""]


def test_joined_pieces_are_the_text_of_all_tokens() -> None:
    tokenizer = word_tokenizer()
    euro = [4 + byte for byte in "€".encode()]
    for ids in ([1, 2, 3, 1], [*euro, 2, 0, 1, *euro, *euro, 3], [1, 0, 2], [0, 1, 1]):
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("tokenizer", "broken"), [(byte_tokenizer(), "â"), (word_tokenizer(), "<0xE2>")])
def test_broken_bytes_are_shown_and_do_not_hold_back_what_follows(tokenizer: Any, broken: str) -> None:
    first_byte = tokenizer.convert_tokens_to_ids(broken)
    decoder = TextDecoder(tokenizer)
    assert "".join(decoder.add(first_byte) for _ in range(50)).count("\ufffd") > 40
    assert decoder.add(tokenizer.convert_tokens_to_ids("c")).endswith("c")


def test_an_unfinished_character_at_the_end_is_a_replacement_character() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("a€").input_ids[:-1]
    assert pieces(tokenizer, ids) == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("stops", [["stop"], ["xx", "stop", "top it"], ["stop", "st"], [""], []])
def test_text_ends_before_the_first_stop_text_however_it_is_split(stops: list[str]) -> None:
    text = "a ststsop it, xstop it"
    places = [text.find(stop) for stop in stops if stop and stop in text]
    wanted = text[: min(places)] if places else text
    for size in (1, 2, 3, 5, len(text)):
        cut = StopTexts(stops)
        shown = ""
        for start in range(0, len(text), size):
            shown += cut.add(text[start : start + size])
            assert wanted.startswith(shown)
            if cut.found:
                break
        assert shown + cut.end() == wanted
        assert cut.found == bool(places)
