"""Errors that a user can act on.

A message names Python arguments as `Argument`s. The library shows them as they are; the command line shows the flags
they were given by. So one message serves both, and nobody has to rewrite it:

    raise ConfigError(Argument("m"), f" must be at least 1, found {m}")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Argument(str):
    """The name of an argument inside an error message."""


class Call(Argument):
    """A call of the library inside a message. The command line shows `command`, which does the same."""

    command: str

    def __new__(cls, call: str, command: str) -> Call:
        self = super().__new__(cls, call)
        self.command = command
        return self


class _Message(Exception):
    """A message in parts: text and `Argument`s."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts
        super().__init__("".join(parts))

    def message(self, name_of: Callable[[str], str] = str) -> str:
        """The message, with every argument shown as `name_of(argument)`."""
        return "".join(name_of(part) if isinstance(part, Argument) else part for part in self.parts)

    def __str__(self) -> str:
        return self.message()


class FastWeightsError(_Message, ValueError):
    """Base of all errors about what a caller passed."""


class CheckpointError(FastWeightsError):
    """A checkpoint that cannot be read, or whose tensors do not fit the model that its config describes."""


class Stopped(_Message):
    """A run that ended early and left a checkpoint to resume from. `exit_code` is that of the program."""

    exit_code = 1

    def __init__(self, *parts: str, exit_code: int | None = None) -> None:
        self.exit_code = exit_code or self.exit_code
        super().__init__(*parts)


@contextmanager
def error_context(*prefix: str, plain: bool = False) -> Iterator[None]:
    """Put `prefix` in front of the message of any FastWeightsError raised inside.

    Args:
        prefix: parts of a message, such as a file's name.
        plain: the arguments were read from a file or from NAME=VALUE, so they keep their names and are not flags.
    """
    try:
        yield
    except FastWeightsError as error:
        parts = (error.message(),) if plain else error.parts
        raise type(error)(*prefix, *parts) from error
