"""`fastweights generate --prompts`: the answers to a file of prompts as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fastweights.decode.prompt_file import FilePrompt, in_order, read_prompts
from fastweights.utils.files import atomic_lines, partial_file
from fastweights.utils.progress import progress_bar

if TYPE_CHECKING:
    from fastweights.decode.engine import Engine
    from fastweights.decode.sampling import Sampling


def read_prompt_file(path: Path) -> tuple[str, list[FilePrompt]]:
    """The name of a file of prompts for messages, and its prompts; - is standard input."""
    if str(path) == "-":
        return "standard input", read_prompts(sys.stdin.buffer, "standard input", json_lines=False)
    with path.open("rb") as file:
        return str(path), read_prompts(file, str(path), json_lines=path.suffix in (".jsonl", ".json"))


def write_answers(
    engine: Engine,
    prompts: list[FilePrompt],
    tokens: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    output: Path | None,
) -> int:
    """Generate the answer of each prompt and write it as soon as all before it are written. Returns the number of new
    tokens."""
    count = 0
    shown = output is not None or not sys.stdout.isatty()
    with _writer(output) as write, progress_bar(enabled=shown) as bar:
        task = bar.add_task("prompts", total=len(prompts))
        answers = in_order(engine.stream(tokens, max_new_tokens, sampling), len(prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            row = {"line": prompt.line, "prompt": prompt.text, "text": answer.text}
            write(json.dumps(row | {"tokens": len(answer.tokens), "finish_reason": answer.finish_reason}))
            bar.advance(task)
            count += len(answer.tokens)
    return count


@contextmanager
def _writer(output: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes a line: to stdout, or to OUTPUT.partial, which becomes OUTPUT when the block succeeds."""
    if output is None:
        yield typer.echo
        return
    with atomic_lines(output) as write:
        try:
            yield write
        except BaseException:
            partial = partial_file(output)
            if partial.is_file() and partial.stat().st_size:
                typer.echo(f"the answers so far are in {partial}", err=True)
            raise
