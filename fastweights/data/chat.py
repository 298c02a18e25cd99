"""Conversations to tokens. The tokenizer's chat template renders them, and the assistant's answers are scored."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from fastweights.data.readers import Chat, DataError
from fastweights.tokenization import bos_token

ASSISTANT = "assistant"
# A template that marks the answers itself, for transformers.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Renders and tokenizes conversations.

    Scored are the contents of the assistant's messages, and the special token that ends each of them, such as
    `<|im_end|>`: after training, the model has to write it. A template that marks the answers with {% generation %}
    is taken at its word. Otherwise the template renders the conversation a second time, with placeholders as answers,
    and what is around them shows where the answers are.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.bos = tokenizer, bos_token(tokenizer)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        ends = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        self._end = re.compile(rf"\s*(?:{'|'.join(map(re.escape, ends))})" if ends else "")

    def encode(self, conversation: Chat) -> tuple[str, np.ndarray, np.ndarray]:
        """The rendered text, its tokens [T], and which of them are scored [T].

        The template may write bos. If it does not and the model expects bos, it is put in front.

        Raises:
            DataError: There is no chat template, it refuses the conversation, or the answers cannot be found in what
                it renders.
        """
        template, where = self._template(conversation.where), conversation.where
        text = self._render(conversation.messages, where)
        if _MARKED.search(template):
            options = {"return_dict": True, "return_assistant_tokens_mask": True}
            found = self.tokenizer.apply_chat_template(conversation.messages, tokenize=True, **options)
            ids, scored = np.array(found["input_ids"]), np.array(found["assistant_masks"], dtype=bool)
        else:
            ids, scored = self._score(text, self._answers(conversation, text))
        if self.bos is not None and ids[:1].tolist() != [self.bos]:
            ids, scored = np.append(self.bos, ids), np.append(False, scored)
        return text, ids.astype(np.int64), scored

    def _template(self, where: str) -> str:
        try:
            return self.tokenizer.get_chat_template()
        except ValueError as error:
            hint = "use the tokenizer of an Instruct model, or give text"
            raise DataError(f"{where} is a conversation, and the tokenizer has no chat template: {hint}") from error

    def _render(self, messages: list[dict[str, Any]], where: str) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(f"{where}: the chat template cannot render the conversation: {error}") from error

    def _answers(self, conversation: Chat, text: str) -> list[tuple[int, int]]:
        """Where the assistant's answers start and end in the rendered text."""
        messages, where = conversation
        marks = {i: f"\ue000{i}\ue001" for i, message in enumerate(messages) if message["role"] == ASSISTANT}
        if not marks:
            return []
        marked = self._render([m | {"content": marks.get(i, m["content"])} for i, m in enumerate(messages)], where)
        pattern = "|".join(map(re.escape, marks.values()))
        before, *after = re.split(pattern, marked)
        spans, at = [], len(before)
        if text.startswith(before) and re.findall(pattern, marked) == list(marks.values()):
            for i, following in zip(marks, after, strict=True):
                content = messages[i]["content"]
                choices = (content, content.strip(), content.lstrip(), content.rstrip())  # templates may strip it
                length = next((len(choice) for choice in choices if text.startswith(choice + following, at)), None)
                if length is None:
                    break
                end = self._end.match(following)
                spans.append((at, at + length + (0 if end is None else end.end())))
                at += length + len(following)
        if len(spans) < len(marks) or at != len(text):
            raise DataError(
                f"{where}: the assistant's answers cannot be found in what the chat template renders: mark them in the "
                "template with {% generation %}"
            )
        return spans

    def _score(self, text: str, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        if not self.tokenizer.is_fast:
            raise DataError("conversations need a tokenizer that knows the offsets of its tokens, a fast one")
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        encoded = self.tokenizer(text, **options)
        starts, ends = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        scored = np.zeros(len(starts), dtype=bool)
        for first, last in spans:
            scored |= (starts < last) & (ends > first)
        return np.array(encoded["input_ids"], dtype=np.int64), scored
