"""A conversation with a converted model: only new turns are processed, the state carries all earlier ones."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Sequence
from typing import Any

import jinja2
import torch

from fastweights.config import ConfigError
from fastweights.decode.engine import Engine, StreamedToken, end_of_text
from fastweights.decode.prefill import prefill
from fastweights.decode.sampling import Sampling
from fastweights.decode.text_decoder import StopTexts
from fastweights.modeling.cache import FastWeightsCache, StateError
from fastweights.modeling.positions import check_length, position_limit
from fastweights.tokenization import prompt_tokens
from fastweights.utils.errors import Argument

# The format of a model without a chat template: the system prompt, then lines "User: ..." and "Assistant: ...".
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}"
    "{% else %}{{ 'Assistant: ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Such a model has no token for the end of a turn, and often goes on with the user's next message.
PLAIN_END = "\nUser:"
# A message: its "role" and its "content".
Message = dict[str, str]
# Stands for an answer in a template, to find what the template writes after one.
_ANSWER = "[[answer]]"


class ChatFormat:
    """What is written around the messages of a conversation, as tokens.

    The template is rendered for the new message only, after a placeholder for the earlier ones. A template that writes
    a turn differently depending on earlier or later turns is therefore not followed in this.

    Args:
        tokenizer: A tokenizer of transformers. Without a chat template, PLAIN_TEMPLATE is used.
        system: The system prompt.

    Raises:
        ConfigError: The template does not accept a system prompt, or cannot be used for a conversation.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.plain = not getattr(tokenizer, "chat_template", None)
        self._system = [] if system is None else [_message("system", system)]
        self._history = [_message("user", "Hello"), _message("assistant", _ANSWER)]
        end = self._after(generate=False)
        self._after_answer = end if self._after("Hello").startswith(end) else ""
        self.first_turn("Hello")  # raises if the template refuses the system prompt

    @property
    def end_text(self) -> str | None:
        """The text that ends an answer, in addition to the end tokens."""
        return PLAIN_END if self.plain else None

    @property
    def after_answer(self) -> list[int]:
        """Tokens between an answer and the next turn, such as an end-of-turn token."""
        return self._tokens_after(_ANSWER, self._after_answer)

    @property
    def end_tokens(self) -> set[int]:
        """Tokens that end an answer: the tokenizer's end-of-text token, and the template's end of a turn."""
        ends = [token for token in self.after_answer if token in self.tokenizer.added_tokens_decoder][:1]
        return {token for token in (*ends, self.tokenizer.eos_token_id) if token is not None}

    def first_turn(self, messages: str | Sequence[Message], generate: bool = True) -> list[int]:
        """Tokens from the beginning of a conversation to the beginning of an answer.

        Args:
            messages: All messages, or the text of the first one.
            generate: Whether the beginning of an answer follows them.
        """
        return prompt_tokens(self.tokenizer, self.first_text(messages, generate))

    def first_text(self, messages: str | Sequence[Message], generate: bool = True) -> str:
        """The text of `first_turn`."""
        return self._render([*self._system, *_messages(messages)], generate)

    def next_turn(self, messages: str | Sequence[Message]) -> list[int]:
        """Tokens from the end of a turn to the beginning of the next answer.

        Args:
            messages: The new messages, or the text of the only one.
        """
        end = self._after_answer
        return self._tokens_after(_ANSWER + end, self._after(messages).removeprefix(end))

    def answer(self, text: str) -> list[int]:
        """Tokens of an answer that was shortened."""
        return self._tokens_after("Assistant:", text)

    def _after(self, messages: str | Sequence[Message] = (), generate: bool = True) -> str:
        """What the template writes after an answer, with next messages or without one."""
        _, found, after = self._render([*self._history, *_messages(messages)], generate).partition(_ANSWER)
        if not found:
            raise ConfigError("the tokenizer's chat template leaves answers out, so it cannot be used to converse")
        return after

    def _render(self, messages: list[Message], generate: bool) -> str:
        template = PLAIN_TEMPLATE if self.plain else None
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=generate
            )
        except jinja2.TemplateError as error:
            about = (Argument("system"), ": ") if messages[:1] == self._system else ()
            raise ConfigError(*about, f"the tokenizer's chat template refuses the messages: {error}") from error

    def _tokens_after(self, before: str, text: str) -> list[int]:
        """Tokens of a text that follows another one: some tokenizers put a space in front of a text."""
        start = prompt_tokens(self.tokenizer, before, continues=True)
        whole = prompt_tokens(self.tokenizer, before + text, continues=True)
        if whole[: len(start)] == start:
            return whole[len(start) :]
        return prompt_tokens(self.tokenizer, text, continues=True)


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    return [_message("user", messages)] if isinstance(messages, str) else messages


class _Answer:
    """An answer as it is generated.

    Args:
        end_text: A text that ends the answer and is not part of it. What may be its beginning is held back.
    """

    def __init__(self, end_text: str | None) -> None:
        self._stops = StopTexts([] if end_text is None else [end_text])
        self.tokens: list[int] = []
        self.started = False
        self.text = ""

    def add(self, item: StreamedToken) -> str:
        """Return what can be shown after a new token, without white space before the first word."""
        self.started = True
        piece = ""
        if item.finish_reason != "stop":
            self.tokens.append(item.token)
            piece = self._stops.add(item.text)
        if item.finish_reason is not None:
            piece += self._stops.end()
        begins = not self.text.strip()
        self.text += piece
        return piece.lstrip() if begins else piece

    @property
    def cut(self) -> bool:
        """Whether the end text was found."""
        return self._stops.found

    @property
    def shortened(self) -> str | None:
        """The text of an answer that ends before its last token; None if all tokens belong to it."""
        return self.text if self.cut or self._stops.held else None


class Conversation:
    """A conversation whose memory does not grow: each turn is processed once and stays in the model's state.

    The messages are written as in the tokenizer's chat template. Without one, they are lines "User: ..." and
    "Assistant: ...", and the system prompt is a paragraph before them.

    Several conversations can use one engine, one at a time.

    Args:
        engine: An engine with a tokenizer. For a hybrid, its `max_length` limits the whole conversation.
        system: The system prompt of a new conversation.

    Raises:
        ConfigError: The engine has no tokenizer, or its chat template refuses the system prompt or a conversation.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        if engine.tokenizer is None:
            raise ConfigError("a conversation needs an engine with a tokenizer: make it with ", Argument("tokenizer"))
        self.engine = engine
        self.format = ChatFormat(engine.tokenizer, system)
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation, with the same system prompt."""
        # `_unread` are tokens that belong to the conversation after `_state`: the last answer and the end of its turn.
        # They are processed together with the next message, or when the state is asked for.
        self._state, self._unread = FastWeightsCache(self.engine.model.config), list[int]()
        self.answer_tokens: list[int] = []

    def send(self, text: str, max_new_tokens: int = 1024, sampling: Sampling | None = None) -> Generator[str]:
        """Send a message and return the pieces of the answer as they are generated.

        The turn takes place while the iterator is read. If it is closed early, the answer ends there. If it is stopped
        before the first token of the answer, the message is not part of the conversation. Afterwards, `answer_tokens`
        are the tokens of the answer.

        Args:
            text: The message.
            max_new_tokens: Number of tokens of the answer at most; fewer where the conversation reaches the engine's
                `max_length` or the end of the model's position table.
            sampling: How tokens are chosen; greedily by default.

        Raises:
            ConfigError: An argument is wrong, or the conversation has no room for the message.
            GenerationError: Logits are NaN.
            ValueError: The message reaches the end of the model's position table.
            EngineBusy: The engine is generating already.
        """
        self.answer_tokens = []
        begins = not self._unread and not int(self._state.seen)
        prompt = self._unread + (self.format.first_turn(text) if begins else self.format.next_turn(text))
        # A copy, because an error or Ctrl-C inside a step would leave a state of which some layers are further.
        state = self._state.fork()
        limit = self._limit(max_new_tokens, int(state.seen) + len(prompt))
        stops = {*end_of_text(self.engine.model), *self.format.end_tokens}
        stream = self.engine.stream([prompt], limit, sampling, list(stops), [state])
        answer = _Answer(self.format.end_text)
        try:
            for item in stream:
                piece = answer.add(item)
                if piece:
                    yield piece
                if answer.cut:
                    break
        finally:
            stream.close()
            if answer.started:
                shortened = answer.shortened
                self.answer_tokens = answer.tokens if shortened is None else self.format.answer(shortened)
                self._state, self._unread = state, self.answer_tokens + self.format.after_answer

    def _limit(self, max_new_tokens: int, length: int) -> int:
        """The number of new tokens for which there is room after `length` tokens."""
        model, max_length = self.engine.model, self.engine.max_length
        check_length(model, length)
        if max_length is not None and length > max_length:
            raise ConfigError(
                f"the conversation would have {length} tokens with this message, and ",
                Argument("max_length"),
                f" is {max_length}: begin a new one, or make it larger",
            )
        limits = [limit for limit in (max_length, position_limit(model)) if limit is not None]
        return min([max_new_tokens, *(limit - length + 1 for limit in limits)])

    @property
    def state(self) -> FastWeightsCache:
        """The state after everything that was said, including the end of the last turn."""
        if self._unread:
            state = self._state.fork()
            prefill(self.engine.model, torch.tensor(self._unread), state, self.engine.prefill_chunk)
            self._state, self._unread = state, []
        return self._state

    def fork(self) -> Conversation:
        """Return a copy that continues independently."""
        twin = copy.copy(self)
        twin._state, twin._unread = self._state.fork(), list(self._unread)
        return twin

    def save(self, path: str | os.PathLike) -> None:
        """Save the state, as `FastWeightsCache.save` does."""
        self.state.save(path, self.engine.model)

    def load(self, path: str | os.PathLike) -> None:
        """Continue from a saved state: of a conversation, or of a text that `fastweights generate` has read.

        Raises:
            StateError: The file cannot be read, belongs to another model, or has several sequences.
        """
        state = FastWeightsCache.load(path, self.engine.model)
        if state.batch_size > 1:
            raise StateError(f"the state in {path} has {state.batch_size} sequences: save the one to continue")
        self._state, self._unread = state, []
