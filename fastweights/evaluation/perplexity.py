"""How good a model is: perplexity of a text, loss by position, a recall probe; lm-eval's tasks through harness.py.

A text is one row of tokens behind a first token that is not scored (as in lm-eval: bos, else eos). Windows of at most
`length` input tokens move along the row so that every token of the text is scored exactly once.
Shapes: B windows or samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.evaluation.lm_eval import EvaluationError, check_tasks, run_tasks
from fastweights.loading import require_tokenizer
from fastweights.modeling.classes import FastWeightsMixin
from fastweights.modeling.description import describe
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import position_limit
from fastweights.utils.progress import track

__all__ = ["EvaluationError", "Perplexity", "evaluate", "perplexity", "perplexity_by_position", "recall_probe"]

# Longer windows are read in pieces of this many tokens, through the cache, so that logits [B,T,V] stay small.
PIECE = 1024
FIRST_BUCKET = 64
DISTANCES = (16, 32, 64, 128, 256, 512)
COPIED = 16


@dataclass(frozen=True)
class Perplexity:
    """`nll` is the negative log-likelihood of all scored tokens, in nats."""

    nll: float
    tokens: int
    words: int
    bytes: int
    length: int
    context: int

    @property
    def token(self) -> float:
        return _exp(self.nll / self.tokens)

    @property
    def word(self) -> float:
        return _exp(self.nll / self.words)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.bytes

    def to_dict(self) -> dict[str, Any]:
        numbers = {"token": self.token, "word": self.word, "bits_per_byte": self.bits_per_byte}
        return {"length": self.length, "context": self.context, "tokens": self.tokens} | numbers


def perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    length: int = 1024,
    context: int = 0,
    batch_size: int = 8,
    progress: bool = True,
) -> Perplexity:
    """Perplexity of a text in windows of `length` tokens; the first `context` tokens of each window but the first are
    seen and not scored again. With context 0 the windows are those of lm-eval's loglikelihood_rolling."""
    _check_windows(model, length, context)
    row = _token_row(model, tokenizer, text)
    windows = _windows(len(row) - 1, length, context)
    nll = 0.0
    with evaluating(model):
        for first in _batches(len(windows), batch_size, "perplexity", progress):
            batch = windows[first : first + batch_size]
            inputs = torch.stack([row[window.start : window.end + 1] for window in batch])
            losses = _losses(model, inputs, keep=max(window.scored for window in batch))
            nll += sum(_sum(loss[-window.scored :], window) for window, loss in zip(batch, losses, strict=True))
    return Perplexity(nll, len(row) - 1, len(text.split()), len(text.encode()), length, context)


def perplexity_by_position(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    length: int,
    buckets: Sequence[int] | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Loss by position in consecutive windows of `length` tokens (the text's last tokens, fewer than that, are left
    out). `buckets` are the first positions of the groups to average over, by default 0, 64, 128, 256, 512, ..."""
    _check_windows(model, length)
    row = _token_row(model, tokenizer, text)
    windows = [Window(end - length, end, length) for end in range(length, len(row), length)]
    if not windows:
        raise EvaluationError(f"by position in windows of {length} tokens: the text has only {len(row) - 1} (--data)")
    totals = torch.zeros(length, dtype=torch.float64)
    with evaluating(model):
        for first in _batches(len(windows), batch_size, "by position", progress):
            batch = windows[first : first + batch_size]
            losses = _losses(model, torch.stack([row[window.start : window.end + 1] for window in batch]), keep=length)
            for window, loss in zip(batch, losses, strict=True):
                _sum(loss, window)
            totals += losses.double().sum(0)
    starts = _doubling(length) if buckets is None else sorted({start for start in buckets if 0 <= start < length})
    return [_bucket(totals, *ends, len(windows)) for ends in zip(starts, [*starts[1:], length], strict=True)]


def recall_probe(
    model: Any,
    *,
    distances: Sequence[int] | None = None,
    pairs: int = 8,
    samples: int = 64,
    vocabulary: Sequence[int] | None = None,
    seed: int = 0,
    batch_size: int = 8,
    progress: bool = True,
) -> dict[str, list[dict[str, Any]]]:
    """Does the model remember what it read `distance` tokens ago? Asked in random tokens, which say nothing else.

    pairs: keys, each followed by its value, filler, one of the keys again: is its value the likeliest of those shown?
    copy: a segment, filler, the segment again: is each token of the repetition's second half the likeliest of all?
    Filler is random tokens too, which a state must take in as it takes in any text; a newline over and over would be
    one single key. `vocabulary` are the tokens drawn from, by default the middle half of all ids: tokenizers number
    their tokens by frequency, and these are neither bytes and stop words nor the rarest."""
    ids = torch.tensor(_ordinary_tokens(model) if vocabulary is None else vocabulary)
    needed = max(2 * pairs, COPIED)
    longest = position_limit(model) or math.inf
    if distances is None:
        distances = [distance for distance in DISTANCES if needed <= distance <= longest - needed]
    if not distances or min(distances) < needed or len(ids) <= needed:
        raise EvaluationError(
            f"--recall with {pairs} pairs needs distances of at least {needed} tokens and more than {needed} different "
            f"tokens, found distances {list(distances)} and {len(ids)} tokens"
        )
    _check_length(model, max(distances) + needed, "--recall: texts of")
    found: dict[str, list[dict[str, Any]]] = {"pairs": [], "copy": []}
    read = functools.partial(_read, model, batch_size)
    with evaluating(model):
        for distance in track(distances, "recall", enabled=progress):
            draw = functools.partial(_draw, ids, samples, torch.Generator().manual_seed(seed))
            found["pairs"].append(
                _recall_pairs(draw, read, distance, pairs) | {"chance": 1 / pairs, "samples": samples}
            )
            found["copy"].append(_recall_copy(draw, read, distance) | {"chance": 1 / len(ids), "samples": samples})
    return found


def window_for(models: Sequence[Any], wanted: int = 1024) -> int:
    """The window wanted, or as much of it as every model has positions for."""
    limits = [position_limit(model) for model in models]
    return min([wanted, *(limit for limit in limits if limit is not None)])


def evaluate(
    models: Mapping[str, tuple[Any, Any]],
    *,
    data: Mapping[str, str] | None = None,
    length: int = 1024,
    contexts: Sequence[int] = (0,),
    tasks: Sequence[str] = (),
    recall: bool = False,
    recall_samples: int = 64,
    by_position: bool = False,
    position_length: int | None = None,
    limit: int | None = None,
    task_folder: str | os.PathLike | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> dict[str, Any]:
    """Evaluate (model, tokenizer) pairs by name on texts by name: the body of a result, without its provenance."""
    data = data or {}
    if not (data or tasks or recall) or (by_position and not data):
        raise EvaluationError("nothing to evaluate on: give --data (which --by-position needs), --tasks or --recall")
    position_length = length if position_length is None else position_length
    batches: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    measures: dict[str, Callable[[Any, Any], Any]] = {}
    if data:
        measures["perplexity"] = lambda model, tokenizer: [
            {"data": name} | perplexity(model, tokenizer, text, length=length, context=context, **batches).to_dict()
            for name, text in data.items()
            for context in contexts
        ]
    if by_position:
        measures["by_position"] = lambda model, tokenizer: [
            {"data": name} | bucket
            for name, text in data.items()
            for bucket in perplexity_by_position(model, tokenizer, text, length=position_length, **batches)
        ]
    if recall:
        measures["recall"] = lambda model, tokenizer: recall_probe(
            model, samples=recall_samples, vocabulary=_ordinary_tokens(model, tokenizer), **batches
        )
    if tasks:
        check_tasks(tasks, task_folder)
        measures["tasks"] = lambda model, tokenizer: run_tasks(
            model, tokenizer, tasks, folder=task_folder, limit=limit, **batches
        )
    for name, (model, _) in models.items():  # before the first model is measured, not after
        with _naming(name):
            for context in contexts if data else ():
                _check_windows(model, length, context)
            if by_position:
                _check_length(model, position_length, "--by-position: windows of")
    rows = [_measure(name, *models[name], measures) for name in models]
    settings = {"length": length, "contexts": list(contexts), "batch_size": batch_size}
    settings |= {"position_length": position_length} if by_position else {}
    settings |= {"tasks": list(tasks), "limit": limit, "local_files": task_folder is not None} if tasks else {}
    scored = sum(part["tokens"] for row in rows for part in [*row.get("perplexity", ()), *row.get("by_position", ())])
    return {"kind": "evaluation", "seed": 0, "tokens": scored, "settings": settings, "models": rows}


def _measure(
    name: str, model: Any, tokenizer: Any, measures: Mapping[str, Callable[[Any, Any], Any]]
) -> dict[str, Any]:
    started = time.perf_counter()
    with _naming(name):
        found = {measure: run(model, tokenizer) for measure, run in measures.items()}
    return {"name": name} | _facts(model) | found | {"seconds": round(time.perf_counter() - started, 2)}


@contextlib.contextmanager
def _naming(model: str) -> Iterator[None]:
    try:
        yield
    except EvaluationError as error:
        raise EvaluationError(f"{model}: {error}") from error


def _facts(model: Any) -> dict[str, Any]:
    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters()), "converted": False}
    facts["dtype"] = str(model.dtype).removeprefix("torch.")
    if not isinstance(model, FastWeightsMixin):
        return facts | {"rule": "attention", "state_bytes": 0}
    settings = model.config.fastweights
    state = describe(model).state_bytes
    return facts | {"converted": True, "rule": settings["rule"], "state_bytes": state, "settings": settings}


class Window(NamedTuple):
    """Reads row[start:end] and scores the last `scored` of the tokens row[start + 1 : end + 1]."""

    start: int
    end: int
    scored: int


def _windows(targets: int, length: int, context: int) -> list[Window]:
    """All as long as the first. The last one may score fewer tokens; it then sees more of those before them."""
    done = min(length, targets)
    windows = [Window(0, done, done)]
    while done < targets:
        scored = min(targets - done, length - context)
        done += scored
        windows.append(Window(done - length, done, scored))
    return windows


def _token_row(model: Any, tokenizer: Any, text: str) -> Tensor:
    """A text's tokens behind the one that is not scored. A tokenizer with neither bos nor eos has none to put there:
    the text's own first token takes its place."""
    require_tokenizer(tokenizer)
    if not text.strip():
        raise EvaluationError("the text is empty (--data): give one with words in it")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise EvaluationError(f"the text has {len(ids)} token (--data): give one with at least 2")
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", math.inf)
    if max(ids) >= vocabulary:
        raise EvaluationError(
            f"the tokenizer gives token {max(ids)}, and the model has {vocabulary}: it is another model's tokenizer"
        )
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return torch.tensor(ids if first is None else [first, *ids])


def _check_windows(model: Any, length: int, context: int = 0) -> None:
    if length < 1:
        raise EvaluationError(f"--length {length}: a window has at least 1 token")
    if not 0 <= context < length:
        raise EvaluationError(
            f"--context {context} with --length {length}: a window must have tokens left to score, "
            f"so context is from 0 to {length - 1}"
        )
    _check_length(model, length, "--length")


def _check_length(model: Any, length: int, what: str) -> None:
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise EvaluationError(
            f"{what} {length}: {type(model).__name__} has learned positions for {limit} tokens and no more; "
            "a model converted with --positions clamp goes on past them"
        )


def _losses(model: Any, rows: Tensor, keep: int) -> Tensor:
    """The losses [B,keep] of the last `keep` tokens of rows [B,T+1]. Long rows are read in pieces."""
    length, cache, losses = rows.shape[1] - 1, None, []
    for start in range(0, length, PIECE):
        end = min(start + PIECE, length)
        piece = rows[:, start : end + 1].to(_device(model))
        scored = min(end - start, max(1, keep - (length - end)))
        outputs = _call(model, piece[:, :-1], scored, past_key_values=cache, use_cache=length > PIECE)
        losses.append(_cross_entropy(outputs.logits[:, -scored:], piece[:, -scored:]))
        cache = outputs.past_key_values
    return torch.cat(losses, 1)[:, -keep:]


def _call(model: Any, tokens: Tensor, keep: int, **arguments: Any) -> Any:
    """Where the model can, only the last `keep` logits are computed."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = keep
    return model(input_ids=tokens, **arguments)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """[B,T] on the CPU, in at least float32, with copies of one row's logits [T,V] at a time."""
    losses = []
    for row, target in zip(logits, targets, strict=True):
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        losses.append(row.logsumexp(-1) - row.gather(-1, target[:, None])[:, 0])
    return torch.stack(losses).cpu()


def _sum(losses: Tensor, window: Window) -> float:
    total = float(losses.double().sum())
    if not math.isfinite(total):
        raise EvaluationError(
            f"the loss is {total} in the window of tokens {window.start} to {window.end}: the model's numbers overflow "
            "there; try float32, or an earlier checkpoint"
        )
    return total


def _doubling(length: int) -> list[int]:
    powers = (FIRST_BUCKET << power for power in itertools.count())
    return [0, *itertools.takewhile(lambda start: start < length, powers)]


def _bucket(totals: Tensor, start: int, end: int, windows: int) -> dict[str, Any]:
    tokens = (end - start) * windows
    loss = float(totals[start:end].sum()) / tokens
    return {"from": start, "to": end, "loss": loss, "perplexity": _exp(loss), "tokens": tokens}


def _recall_pairs(draw: Callable, read: Callable, distance: int, pairs: int) -> dict[str, Any]:
    """All texts are equally long: the key asked for stands at the same place, and its block of pairs around it."""
    shown, filler = draw(2 * pairs, distance - 2)
    values, asked = shown[:, 1::2], torch.arange(len(shown)) % pairs
    texts = []
    for block, between, pair in zip(shown, filler, asked.tolist(), strict=True):
        before = 2 * (pairs - 1 - pair)
        texts.append(torch.cat([between[:before], block, between[before:], block[2 * pair : 2 * pair + 1]]))
    logits = torch.cat([batch[:, -1] for batch in read(torch.stack(texts), 1)])
    right = logits.gather(1, values).argmax(1) == asked
    right_of_all = logits.argmax(1) == values.gather(1, asked[:, None])[:, 0]
    return {"distance": distance, "accuracy": _mean(right), "accuracy_vocabulary": _mean(right_of_all)}


def _recall_copy(draw: Callable, read: Callable, distance: int) -> dict[str, Any]:
    segment, filler = draw(COPIED, distance - COPIED)
    texts, second_half = torch.cat([segment, filler, segment[:, :-1]], 1), segment[:, COPIED // 2 :]
    likeliest = torch.cat([logits.argmax(-1) for logits in read(texts, second_half.shape[1])])
    return {"distance": distance, "accuracy": _mean(likeliest == second_half)}


def _draw(ids: Tensor, samples: int, generator: torch.Generator, different: int, others: int) -> tuple[Tensor, Tensor]:
    """For each sample `different` tokens, no two alike, and `others` that are none of these."""
    order = torch.rand(samples, len(ids), generator=generator).argsort(1)
    filler = torch.randint(different, len(ids), (samples, others), generator=generator)
    return ids[order[:, :different]], ids[order.gather(1, filler)]


def _read(model: Any, batch_size: int, texts: Tensor, keep: int) -> Iterator[Tensor]:
    """The last logits [B,keep,V] after token rows behind the model's own first token, where it has one."""
    first = next(iter(_special_tokens(model, "bos", "eos")), None)
    texts = texts if first is None else nn.functional.pad(texts, (1, 0), value=first)
    for batch in texts.split(batch_size):
        logits = _call(model, batch.to(_device(model)), keep, use_cache=False).logits[:, -keep:].float().cpu()
        if logits.isnan().any():
            raise EvaluationError(f"--recall: the model's output is not a number after {texts.shape[1]} tokens")
        yield logits


def _ordinary_tokens(model: Any, tokenizer: Any = None) -> list[int]:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None:
        raise EvaluationError(f"{type(model).__name__} does not tell its vocabulary's size: pass vocabulary=")
    special = {*_special_tokens(model, "bos", "eos", "pad"), *getattr(tokenizer, "all_special_ids", ())}
    return [token for token in range(size // 4, size * 3 // 4) if token not in special]


def _special_tokens(model: Any, *names: str) -> list[int]:
    """Those that the model's config names; one name may have several."""
    found = [getattr(getattr(model, "config", None), f"{name}_token_id", None) for name in names]
    return [token for ids in found for token in (ids if isinstance(ids, list) else [ids]) if token is not None]


def _mean(right: Tensor) -> float:
    return float(right.double().mean())


def _device(model: Any) -> Any:
    return getattr(model, "device", "cpu")


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _batches(count: int, batch_size: int, what: str, progress: bool) -> Iterable[int]:
    """The number of the first window of each batch."""
    if batch_size < 1:
        raise EvaluationError(f"--batch-size {batch_size}: choose at least 1")
    return track(range(0, count, batch_size), what, enabled=progress)
