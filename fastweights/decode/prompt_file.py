"""A file of prompts: reading it, and the answers in its order. Importing this file does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from fastweights.utils.errors import FastWeightsError

if TYPE_CHECKING:
    from fastweights.decode.engine import StreamedToken

FIELD = "prompt"


class PromptFileError(FastWeightsError):
    """A file of prompts that cannot be read. The message names the line."""


class FilePrompt(NamedTuple):
    """A prompt and the number of its line, from 1."""

    line: int
    text: str


@dataclass
class Answer:
    """The new tokens of a prompt and their text."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


def read_prompts(lines: Iterable[bytes], name: str, json_lines: bool) -> list[FilePrompt]:
    """Read one prompt from each line that is not empty.

    Args:
        lines: The lines of the file.
        name: Its name, for errors.
        json_lines: Whether a line is a JSON object with the prompt in its field "prompt", or the prompt itself.

    Raises:
        PromptFileError: A line is not UTF-8 or not such an object, or there is no prompt at all.
    """
    prompts = []
    for number, line in enumerate(lines, 1):
        where = f"{name}, line {number}"
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise PromptFileError(f"{where} is not UTF-8: convert it first, for example with iconv") from error
        if text.strip():
            prompts.append(FilePrompt(number, _field(text, where) if json_lines else text))
    if not prompts:
        raise PromptFileError(f"{name} has no prompts: write one in each line")
    return prompts


def _field(text: str, where: str) -> str:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where} is not JSON ({error}): write an object in each line") from error
    prompt = row.get(FIELD) if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise PromptFileError(f'{where} has no text in a field "{FIELD}": write {{"{FIELD}": "..."}}')
    return prompt


def in_order(stream: Iterable[StreamedToken], count: int) -> Iterator[Answer]:
    """Collect the tokens of a stream, and yield the answer of each of `count` prompts as soon as it and all before it
    are complete."""
    answers = [Answer() for _ in range(count)]
    complete = 0
    for item in stream:
        answer = answers[item.prompt]
        answer.tokens.append(item.token)
        answer.text += item.text
        answer.finish_reason = item.finish_reason
        while complete < count and answers[complete].finish_reason is not None:
            yield answers[complete]
            complete += 1
