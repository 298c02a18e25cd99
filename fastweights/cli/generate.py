"""`fastweights generate`: continue a prompt, and save or load the state after it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

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
    check_output,
    model_source,
    reports_errors,
    usable_device,
)
from fastweights.decode.sampling import Sampling
from fastweights.modeling.state_file import check_state_file
from fastweights.utils.errors import Argument, error_context

if TYPE_CHECKING:
    from fastweights.modeling.cache import FastWeightsCache


# Sequences that are decoded at a time, from a file of prompts.
BATCH_SIZE = 8


@reports_errors
def generate(
    folder: SavedModel,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; - reads it from standard input.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of texts to continue, one in each line, or in the field 'prompt' of JSON lines (.jsonl); - "
            "reads lines from standard input. The answers are printed as JSON lines, in the same order.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --prompts: write the answers to this file.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"With --prompts: sequences at a time; by default {BATCH_SIZE}.")
    ] = None,
    max_new_tokens: MaxNewTokens = 100,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    seed: Seed = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Number of beams.")] = 1,
    load_state: LoadState = None,
    save_state: Annotated[Path | None, typer.Option(help="Save the state after the last token to this file.")] = None,
    device: Device = None,
    dtype: WeightsDtype = "auto",
    weights: Weights = None,
) -> None:
    """Continue a prompt and print the new text as it is generated, or continue every prompt of a file.

    Greedy, unless a sampling option is given.
    """
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    _check_prompt_options(prompt, prompts, output, batch_size, num_beams, load_state, save_state)
    check_output(save_state, "--save-state")
    if load_state is not None:
        with error_context(Argument("load_state"), ": "):
            check_state_file(load_state)
    source = model_source(folder)
    if prompts is not None:
        _generate_file(
            source, prompts, output, batch_size or BATCH_SIZE, max_new_tokens, sampling, device, dtype, weights
        )
        return
    with Console(stderr=True).status(f"loading {escape(folder)}"):
        import torch
        from transformers import TextStreamer

        from fastweights.decode.generation import generate_sequence, state_after

        model, tokenizer = load_with_tokenizer(source, dtype, usable_device(device))
    state = _initial_state(model, source, load_state, save_state)
    vocabulary = model.config.get_text_config().vocab_size
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else str(prompt)
    tokens = _prompt_tokens(tokenizer, text, load_state is None, vocabulary, "--prompt")
    prompt_ids = torch.tensor([tokens], device=model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if num_beams == 1 else None
    started = time.perf_counter()
    ids, cache = generate_sequence(model, prompt_ids, state, sampling, max_new_tokens, num_beams, streamer, weights)
    seconds = time.perf_counter() - started
    new_ids = ids[0, prompt_ids.shape[1] :]
    if streamer is None:
        typer.echo(tokenizer.decode(new_ids, skip_special_tokens=True))
    if save_state is not None and state is not None and cache is not None:
        state_after(model, state, cache, ids).save(save_state, model)
    typer.echo(f"{len(new_ids)} tokens, {len(new_ids) / seconds:.1f} tokens/s, {memory_text(cache)}", err=True)


def load_with_tokenizer(source: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Load a model, on a device and in evaluation mode, and its tokenizer."""
    from transformers.utils import logging

    from fastweights.loading import load, load_tokenizer, require_tokenizer

    logging.disable_progress_bar()
    tokenizer = require_tokenizer(load_tokenizer(source), source)
    return load(source, dtype=dtype).to(device).eval(), tokenizer


def _initial_state(model: Any, source: str, load: Path | None, save: Path | None) -> FastWeightsCache | None:
    """The state before the prompt; None for a model that is not converted."""
    from fastweights.modeling.cache import FastWeightsCache
    from fastweights.modeling.classes import FastWeightsMixin

    if isinstance(model, FastWeightsMixin):
        with error_context(Argument("load_state"), ": "):
            return FastWeightsCache(model.config) if load is None else FastWeightsCache.load(load, model)
    if load is not None or save is not None:
        require_converted(model, source, "--save-state" if load is None else "--load-state")
    return None


def require_converted(model: Any, source: str, what: str) -> None:
    """Refuse an ordinary model for something that needs a converted one."""
    from fastweights.modeling.classes import FastWeightsMixin

    if not isinstance(model, FastWeightsMixin):
        raise UsageError(f"{what} needs a converted model, and {source} is an ordinary one: run fastweights convert")


def _prompt_tokens(tokenizer: Any, text: str, begins: bool, vocabulary: int, name: str) -> list[int]:
    """Tokens of a prompt. One that continues a saved state gets no beginning-of-text token."""
    from fastweights.tokenization import prompt_tokens

    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not UTF-8: convert it first, for example with iconv") from error
    ids = prompt_tokens(tokenizer, text, continues=not begins)
    if not ids:
        raise UsageError(f"{name} is empty: give at least one character to continue from")
    if max(ids) >= vocabulary:
        raise UsageError(
            f"the tokenizer makes the token {max(ids)} of {name}, and the model has {vocabulary}: the "
            "tokenizer in its folder is another model's, save its own there"
        )
    return ids


def _check_prompt_options(
    prompt: str | None,
    prompts: Path | None,
    output: Path | None,
    batch_size: int | None,
    num_beams: int,
    load_state: Path | None,
    save_state: Path | None,
) -> None:
    if (prompt is None) == (prompts is None):
        raise UsageError("give --prompt TEXT or --prompts FILE" + (", not both" if prompt is not None else ""))
    one = {"--num-beams": num_beams > 1, "--load-state": load_state, "--save-state": save_state}
    many = {"--output": output, "--batch-size": batch_size}
    refused, wanted = (many, "--prompts") if prompts is None else (one, "--prompt")
    for flag, given in refused.items():
        if given:
            raise UsageError(f"{flag} works with {wanted} only: leave it out")


def _generate_file(
    source: str,
    path: Path,
    output: Path | None,
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling,
    device: str | None,
    dtype: str,
    weights: str | None,
) -> None:
    from fastweights.cli.answers import read_prompt_file, write_answers

    check_output(output)
    name, prompts = read_prompt_file(path)
    with Console(stderr=True).status(f"loading {escape(source)}"):
        from fastweights.decode.engine import Engine
        from fastweights.modeling.positions import check_length

        model, tokenizer = load_with_tokenizer(source, dtype, usable_device(device))
        require_converted(model, source, "--prompts")
    tokens, vocabulary = [], model.config.get_text_config().vocab_size
    for prompt in prompts:
        where = f"{name}, line {prompt.line}"
        tokens.append(_prompt_tokens(tokenizer, prompt.text, True, vocabulary, where))
        with error_context(f"{where}: "):
            check_length(model, len(tokens[-1]) + max_new_tokens - 1)
    longest = max(map(len, tokens)) + max_new_tokens
    engine = Engine(model, min(batch_size, len(prompts)), max_length=longest, tokenizer=tokenizer, weights=weights)
    started = time.perf_counter()
    count = write_answers(engine, prompts, tokens, max_new_tokens, sampling, output)
    seconds = time.perf_counter() - started
    typer.echo(f"{len(prompts)} prompts, {count} tokens, {count / seconds:.1f} tokens/s", err=True)


def memory_text(cache: FastWeightsCache | None) -> str:
    """The size of a state, as it is shown after generating."""
    if cache is None:
        return "no state (not converted)"
    attention = f" and {cache.attention_nbytes:,} bytes of keys and values" if cache.attention_layers else ""
    return f"state {cache.nbytes:,} bytes{attention}"
