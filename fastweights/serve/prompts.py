"""Requests to tokens: the chat template, the places where messages end, and prompts as text or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fastweights.config import ConfigError
from fastweights.decode.conversation import ChatFormat
from fastweights.serve.errors import ApiError
from fastweights.serve.schemas import CompletionRequest, Message
from fastweights.tokenization import prompt_tokens

# Two stored places this near to each other are as good as one.
NEAR = 8
# What the chat template calls OpenAI's newer name of a role.
ROLES = {"developer": "system"}


class Prompt(NamedTuple):
    """The tokens of a prompt, and how many of them there are where a message ends."""

    tokens: list[int]
    borders: tuple[int, ...] = ()


class Prompts:
    """Make prompts of requests.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: The number of tokens that the model has.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.format = ChatFormat(tokenizer)

    def chat(self, messages: Sequence[Message], param: str = "messages") -> Prompt:
        """The prompt of a conversation from its beginning.

        Borders are where the next request of this conversation, or of another one with the same system prompt, may
        begin to differ: after the system prompt, before the last message, and before the answer.

        Raises:
            ApiError: The chat template refuses the messages.
        """
        plain = [_plain(message) for message in messages]
        text = self._try(param, self.format.first_text, plain)
        tokens = prompt_tokens(self.tokenizer, text)
        borders = [self._system_end(plain, tokens), self._last_start(plain, text, tokens), len(tokens)]
        return Prompt(self._known(tokens, param), _apart([border for border in borders if border is not None]))

    def next_turn(self, messages: Sequence[Message], param: str = "input") -> list[int]:
        """The tokens of new messages after an answer."""
        return self._known(self._try(param, self.format.next_turn, [_plain(message) for message in messages]), param)

    def completion(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts of a completion."""
        several = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
        given: Any = request.prompt if several else [request.prompt]
        return [self._one(prompt, f"prompt[{i}]" if several else "prompt") for i, prompt in enumerate(given)]

    def _one(self, prompt: str | list[int], param: str) -> Prompt:
        tokens = prompt_tokens(self.tokenizer, prompt) if isinstance(prompt, str) else prompt
        return Prompt(self._known(tokens, param), (len(tokens),))

    def _known(self, tokens: list[int], param: str) -> list[int]:
        if not tokens:
            raise ApiError(f"{param} is empty: give at least one token to continue from", 400, param, "empty")
        if max(tokens) >= self.vocabulary:
            found = f"found {max(tokens)}, and the model has tokens from 0 to {self.vocabulary - 1}"
            raise ApiError(f"{param} has a token that the model does not have: {found}", 400, param, "invalid_value")
        return tokens

    def _try(self, param: str, render: Any, messages: list[dict[str, str]], **options: Any) -> Any:
        try:
            return render(messages, **options)
        except ConfigError as error:
            raise ApiError(str(error), 400, param, "invalid_value") from error

    def _system_end(self, messages: list[dict[str, str]], tokens: list[int]) -> int | None:
        count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        if not 0 < count < len(messages):
            return None
        try:
            start = self.format.first_turn(messages[:count], generate=False)
        except ConfigError:  # some templates want a message of the user
            return None
        return len(start) if tokens[: len(start)] == start else None

    def _last_start(self, messages: list[dict[str, str]], text: str, tokens: list[int]) -> int | None:
        if len(messages) < 2:
            return None
        try:
            before = self.format.first_text(messages[:-1], generate=False)
        except ConfigError:
            return None
        if not text.startswith(before):  # the template writes earlier turns differently
            return None
        last = prompt_tokens(self.tokenizer, text[len(before) :], continues=True)
        return len(tokens) - len(last) if last and tokens[-len(last) :] == last else None


def _plain(message: Message) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    return {"role": ROLES.get(message.role, message.role), "content": text}


def _apart(borders: Sequence[int]) -> tuple[int, ...]:
    """Borders in order, without those that lie just before another one."""
    found: list[int] = []
    for border in sorted(borders, reverse=True):
        if border > 0 and (not found or found[-1] - border >= NEAR):
            found.append(border)
    return tuple(reversed(found))
