"""Tokens to text, for tokens that arrive one at a time, and text that ends before a stop text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Decoders write this for bytes that are not a whole character.
REPLACEMENT = "\ufffd"
# A character has at most four bytes. So at most three can wait for their last one.
MAX_WAITING = 3


class TextDecoder:
    """Decode tokens one at a time. All pieces together are the text of all tokens, without special tokens.

    A character can be spread over several tokens; its piece comes with the last of them. Only tokens that wait for
    others are stored, so a sequence can be arbitrarily long.

    Args:
        tokenizer: A tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Some decoders remove the space before the first token. So all later tokens are decoded after another one.
        # It cannot be the one that was there: some decode a run of bytes together, and one broken byte changes all.
        self._before: list[int] = []
        self._before_length = 0  # of its text
        self._waiting: list[int] = []
        self._shown = 0  # characters of the text of `_waiting` that were returned

    def add(self, token: int) -> str:
        """Return the text that this token completes; empty if it completes none."""
        self._waiting.append(token)
        text = self._text()
        complete = text.rstrip(REPLACEMENT)
        if len(text) - len(complete) > MAX_WAITING:  # not the beginning of a character
            complete = text
        piece = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if complete == text and (text or self._before):
            if not self._before:
                self._before = self.tokenizer("a", add_special_tokens=False).input_ids[-1:]
                self._before_length = len(self._decode(self._before))
            self._waiting, self._shown = [], 0
        return piece

    def end(self) -> str:
        """Return the rest of the text: an incomplete character as replacement characters."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        return self._decode(self._before + self._waiting)[self._before_length :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopTexts:
    """Cut a text that arrives in pieces before the first of some stop texts.

    What may be the beginning of a stop text is held back until that is decided. `found` is whether the text ended.

    Args:
        stops: The stop texts. The empty text is none.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.held, self.found = "", False

    def add(self, piece: str) -> str:
        """Return what can be shown after a new piece."""
        text = self.held + piece
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        self.found = bool(places)
        end = min(places) if places else len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = "" if places else text[end:]
        return text[:end]

    def end(self) -> str:
        """Return what was held back: the text has ended, so it is not the beginning of a stop text."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, other: str) -> int:
    """The number of characters at the end of a text that another one begins with."""
    return next((n for n in range(min(len(text), len(other)), 0, -1) if text.endswith(other[:n])), 0)
