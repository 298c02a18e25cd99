"""Which special tokens a model expects around a text. Everything that feeds text to a model asks here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Share of unknown tokens from which on a text is taken to be of another kind than the model's.
MANY_UNKNOWN = 0.05


def bos_token(tokenizer: Any) -> int | None:
    """The bos token that the model expects before every sequence; None where it expects none.

    What the tokenizer puts before a text decides: transformers saves its `add_bos_token` as part of the post-processor
    and forgets the setting itself. A tokenizer may also have a bos token that it never adds, such as GPT-2's.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and tokenizer.encode("a")[0] == bos else None


def adds_eos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its eos token after every text."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return eos is not None and tokenizer.encode("a")[-1] == eos


def ends_lines(tokenizer: Any) -> bool:
    """Whether the tokenizer's eos token is the end of a line, as in fairseq's word-level text. Then the last line of a
    text has one, too, also where a reader has taken the last line break away."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return eos is not None and tokenizer.encode("\n", add_special_tokens=False) == [eos]


def unknown_words(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """A line about a text many of whose words the tokenizer does not know; None where it knows them.

    A perplexity of such a text says little, since an unknown word is easy to predict.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):  # as GPT-2's
        return None
    share = sum(int(token) == unknown for token in ids) / max(1, len(ids))
    if share <= MANY_UNKNOWN:
        return None
    token = tokenizer.unk_token
    return f"{share:.0%} of the tokens are {token}: the text is not split into words as that of the model's dictionary"


def prompt_tokens(tokenizer: Any, text: str, continues: bool = False) -> list[int]:
    """The tokens of a text for a model to continue: with bos where the model expects it, and never with eos.

    Args:
        tokenizer: The model's tokenizer.
        text: The prompt. It may already start with the bos token, which is then not added again.
        continues: Whether the text continues what the model has already read: then it gets no bos.
    """
    if continues:
        return tokenizer.encode(text, add_special_tokens=False)
    ids, bos = tokenizer.encode(text), bos_token(tokenizer)
    if adds_eos(tokenizer):
        ids = ids[:-1]
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def set_special_tokens(tokenizer: Any, bos: bool, eos: bool) -> None:
    """Make the tokenizer put its bos token before every text, its eos token after it, or not. It is saved with it."""
    tokenizer.add_bos_token = bos and tokenizer.bos_token_id is not None
    tokenizer.add_eos_token = eos and tokenizer.eos_token_id is not None
