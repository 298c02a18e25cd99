"""`fastweights chat`: a conversation in the terminal, whose state can be saved, loaded and forked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fastweights.cli.generate import load_with_tokenizer, memory_text, require_converted
from fastweights.cli.options import (
    Device,
    LoadState,
    MaxNewTokens,
    RepetitionPenalty,
    SavedModel,
    Seed,
    Temperature,
    TopK,
    TopP,
    UsageError,
    Weights,
    WeightsDtype,
    error_text,
    model_source,
    reports_errors,
    usable_device,
)
from fastweights.decode.sampling import Sampling
from fastweights.modeling.state_file import check_state_file
from fastweights.utils.errors import Argument, FastWeightsError, error_context

if TYPE_CHECKING:
    from fastweights.decode.conversation import Conversation
    from fastweights.decode.engine import Engine

# Tokens of a conversation with a hybrid, whose attention layers reserve memory for all of them.
HYBRID_LENGTH = 4096
FIRST_NAME = "main"
# Each command with its argument, and what it does. The methods of _Session have the same names.
COMMANDS = {
    "save": ("FILE", "save the state of this conversation"),
    "load": ("FILE", "continue from a saved state"),
    "fork": ("[NAME]", "continue in a copy; this conversation stays as it is"),
    "switch": ("NAME", "go to another conversation"),
    "list": ("", "show the names of all conversations"),
    "reset": ("", "begin this conversation anew"),
    "help": ("", "show this list"),
    "quit": ("", "end; so does Ctrl-D"),
}


@reports_errors
def chat(
    folder: SavedModel,
    system: Annotated[str | None, typer.Option(help="System prompt of a new conversation.")] = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    load_state: LoadState = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the whole conversation. Only for models that have attention layers left, whose memory "
            f"grows with every token; by default {HYBRID_LENGTH:,} for them.",
        ),
    ] = None,
    device: Device = None,
    dtype: WeightsDtype = "auto",
    weights: Weights = None,
) -> None:
    """Talk to a converted model. Each line is a message; /help shows the commands. Ctrl-C stops an answer."""
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    if system is not None and load_state is not None:
        raise UsageError("--system is for a new conversation, and --load-state continues one: give one of them")
    if load_state is not None:
        with error_context(Argument("load_state"), ": "):
            check_state_file(load_state)
    source = model_source(folder)
    with Console(stderr=True).status(f"loading {escape(source)}"):
        from fastweights.decode.conversation import Conversation

        model, tokenizer = load_with_tokenizer(source, dtype, usable_device(device))
        require_converted(model, source, "chat")
        conversation = Conversation(_engine(model, tokenizer, max_length, weights), system)
    if load_state is not None:
        with error_context(Argument("load_state"), ": "):
            conversation.load(load_state)
    session = _Session(conversation, max_new_tokens, sampling)
    is_terminal = _is_terminal()
    if is_terminal:
        session.greet()
    for line in _lines(is_terminal):
        try:
            if session.handle(line):
                break
        except FastWeightsError as error:
            if not is_terminal:  # a script must not go on as if nothing had happened
                raise
            _note(f"error: {error_text(error, chat)}")
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            _note("stopped")


def _engine(model: Any, tokenizer: Any, max_length: int | None, weights: str | None) -> Engine:
    from fastweights.decode.engine import Engine
    from fastweights.modeling.cache import FastWeightsCache

    attention_layers = FastWeightsCache(model.config).attention_layers
    if attention_layers:
        max_length = max_length or HYBRID_LENGTH
        _note(
            f"layers {', '.join(map(str, attention_layers))} are still attention: the conversation can have "
            f"{max_length:,} tokens (--max-length)"
        )
    return Engine(model, tokenizer=tokenizer, max_length=max_length, weights=weights)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _lines(is_terminal: bool) -> Iterator[str]:
    """The lines that are typed or piped in, without empty ones. Ctrl-C while typing discards the line."""
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history)
    prompt = "> " if is_terminal and sys.stdout.isatty() else ""
    while True:
        try:
            line = input(prompt) if is_terminal else next(sys.stdin).removesuffix("\n")
            line.encode()
        except (EOFError, StopIteration):
            return
        except UnicodeError as error:
            raise UsageError("the input is not UTF-8: convert it first, for example with iconv") from error
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            _note("\n/quit or Ctrl-D ends")
            continue
        if line.strip():
            yield line


def _note(text: str) -> None:
    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


class _Session:
    """The conversations of one run, by name, and what the lines do to them."""

    def __init__(self, conversation: Conversation, max_new_tokens: int, sampling: Sampling) -> None:
        self.conversations, self.name = {FIRST_NAME: conversation}, FIRST_NAME
        self.max_new_tokens, self.sampling = max_new_tokens, sampling

    @property
    def conversation(self) -> Conversation:
        return self.conversations[self.name]

    def greet(self) -> None:
        if self.conversation.format.plain:
            _note('the tokenizer has no chat template: turns are lines "User: ..." and "Assistant: ..."')
        _note("/help shows the commands, Ctrl-C stops an answer, Ctrl-D ends")

    def handle(self, line: str) -> bool:
        """Answer a message or run a command. Returns whether the session ends."""
        if not line.startswith("/"):
            self.answer(line)
            return False
        command, _, argument = line[1:].partition(" ")
        expected, _ = COMMANDS.get(command, ("", ""))
        given = argument.strip()
        if command not in COMMANDS:
            raise UsageError(
                f"no command /{command}: /help shows all; begin a message with a space to send it as it is"
            )
        if bool(given) != bool(expected) and not (expected.startswith("[") and not given):
            raise UsageError(f"type /{command} {expected}".rstrip() + f", found {line!r}")
        if command == "quit":
            return True
        getattr(self, command)(*[given] if given else [])
        return False

    def answer(self, message: str) -> None:
        conversation, started = self.conversation, time.perf_counter()
        pieces = conversation.send(message, self.max_new_tokens, self.sampling)
        shown = False
        try:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
                shown = True
        except BaseException:
            pieces.close()  # the answer ends here
            if shown:
                typer.echo()
            raise
        typer.echo()
        seconds, count = time.perf_counter() - started, len(conversation.answer_tokens)
        state, max_length = conversation.state, conversation.engine.max_length
        room = "" if max_length is None else f", {int(state.seen):,} of {max_length:,} tokens"
        _note(f"{count} tokens, {count / seconds:.1f} tokens/s, {memory_text(state)}{room}")

    def save(self, file: str) -> None:
        self.conversation.save(Path(file).expanduser())
        _note(f"saved {file}")

    def load(self, file: str) -> None:
        self.conversation.load(Path(file).expanduser())
        _note(f"loaded {file}")

    def fork(self, name: str | None = None) -> None:
        name = name or next(
            n for i in range(1, len(self.conversations) + 1) if (n := f"fork-{i}") not in self.conversations
        )
        if name in self.conversations:
            raise UsageError(f"there is a conversation {name} already: choose another name")
        self.conversations[name] = self.conversation.fork()
        _note(f"{name} is a copy of {self.name}; /switch {self.name} goes back")
        self.name = name

    def switch(self, name: str) -> None:
        if name not in self.conversations:
            raise UsageError(f"no conversation {name}: there are {', '.join(self.conversations)}")
        self.name = name
        _note(f"now in {name}")

    def list(self) -> None:
        for name, conversation in self.conversations.items():
            _note(f"{'*' if name == self.name else ' '} {name}: {int(conversation.state.seen):,} tokens")

    def reset(self) -> None:
        self.conversation.reset()
        _note(f"{self.name} begins anew")

    def help(self) -> None:
        for command, (argument, effect) in COMMANDS.items():
            _note(f"  {f'/{command} {argument}':14} {effect}")
