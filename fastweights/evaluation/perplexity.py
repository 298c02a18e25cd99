"""Perplexity of a text in windows, and loss by position in a window.

A text is one row of tokens behind a first token that is not scored (as in lm-eval: bos, else eos). Windows of at most
`length` input tokens move along the row so that every token of the text is scored exactly once. Where the model expects
a bos token before every sequence, it takes the place of the first token that each window reads.
Shapes: B windows, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from fastweights.evaluation.checks import WINDOW, EvaluationError, check_window
from fastweights.evaluation.forward import call_model, output_layer
from fastweights.loading import require_tokenizer
from fastweights.modeling.adaptive_input import AdaptiveSoftmax
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import check_length, position_limit
from fastweights.results import PerplexityRow, PositionBucket
from fastweights.tokenization import bos_token, ends_lines, unknown_words
from fastweights.training.chunked_loss import without_head
from fastweights.utils.errors import Argument
from fastweights.utils.progress import track

__all__ = ["EvaluationError", "Perplexity", "perplexity", "perplexity_by_position", "window_for"]

logger = logging.get_logger(__name__)

# Longer windows are read in chunks of this many tokens, through the cache, so that logits [B,T,V] stay small.
CHUNK = 1024
FIRST_BUCKET = 64


@dataclass(frozen=True)
class Perplexity:
    """The loss of a text. `nll` is the negative log-likelihood of all scored tokens, in nats."""

    nll: float
    tokens: int
    words: int
    bytes: int
    length: int
    context: int

    def __repr__(self) -> str:
        rates = ", ".join(f"{name}={getattr(self, name):.6g}" for name in ("token", "word", "bits_per_byte"))
        return (
            f"Perplexity({rates}, nll={self.nll!r}, tokens={self.tokens}, length={self.length}, context={self.context})"
        )

    @property
    def token(self) -> float:
        """Perplexity by token."""
        return _exp(self.nll / self.tokens)

    @property
    def word(self) -> float:
        """Perplexity by word, which can be compared between tokenizers."""
        return _exp(self.nll / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8."""
        return self.nll / math.log(2) / self.bytes

    def row(self, data: str) -> PerplexityRow:
        """The row of a result; `data` names the text."""
        return PerplexityRow(
            data=data,
            length=self.length,
            context=self.context,
            tokens=self.tokens,
            token=self.token,
            word=self.word,
            bits_per_byte=self.bits_per_byte,
        )


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
    """Measure the perplexity of a text. With context 0 the windows are those of lm-eval's loglikelihood_rolling, all of
    them with bos in front where the model expects it. With a tokenizer of fairseq's word-level text they are those of
    fairseq's eval_lm, with any context.

    Args:
        model: Any causal model.
        tokenizer: Its tokenizer.
        text: At least two tokens.
        length: Tokens of a window.
        context: The first tokens of each window but the first that are seen and not scored again.
        batch_size: Windows in a forward pass.
        progress: Whether to show a progress bar.

    Raises:
        EvaluationError: If the text is empty, a window has no token to score, or a loss is not finite.
        PositionError: If a window is longer than the model's position table.
    """
    check_windows(model, length, context)
    row = _token_row(model, tokenizer, text)
    windows = _windows(len(row) - 1, length, context, fill_last=not ends_lines(tokenizer))
    nll = 0.0
    with evaluating(model):
        for first in _batches(len(windows), batch_size, "perplexity", progress):
            batch = windows[first : first + batch_size]
            for _, group in itertools.groupby(batch, lambda window: window.end - window.start):
                nll += _nll(model, row, list(group), bos_token(tokenizer))
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
) -> list[PositionBucket]:
    """Measure the loss by position in consecutive windows. The last tokens of the text, fewer than one window, are
    left out.

    Args:
        model: Any causal model.
        tokenizer: Its tokenizer.
        text: At least `length` tokens.
        length: Tokens of a window.
        buckets: First positions of the groups to average over; by default 0, 64, 128, 256, 512, ...
        batch_size: Windows in a forward pass.
        progress: Whether to show a progress bar.

    Raises:
        EvaluationError: If the text is shorter than a window, or a loss is not finite.
        PositionError: If a window is longer than the model's position table.
    """
    check_windows(model, length)
    row = _token_row(model, tokenizer, text)
    windows = [Window(end - length, end, length) for end in range(length, len(row), length)]
    if not windows:
        raise EvaluationError(f"the text has only {len(row) - 1} tokens, fewer than one window of {length}")
    totals = torch.zeros(length, dtype=torch.float64)
    with evaluating(model):
        for first in _batches(len(windows), batch_size, "by position", progress):
            batch = windows[first : first + batch_size]
            losses = _losses(model, _read_windows(row, batch, bos_token(tokenizer)), keep=length)
            for window, loss in zip(batch, losses, strict=True):
                _sum(loss, window)
            totals += losses.double().sum(0)
    starts = _doubling(length) if buckets is None else sorted({start for start in buckets if 0 <= start < length})
    return [_bucket(totals, *ends, len(windows)) for ends in zip(starts, [*starts[1:], length], strict=True)]


def window_for(models: Sequence[Any], preferred: int = WINDOW) -> int:
    """The preferred window, or as much of it as every model has positions for."""
    limits = [position_limit(model) for model in models]
    return min([preferred, *(limit for limit in limits if limit is not None)])


def check_windows(model: Any, length: int, context: int = 0) -> None:
    """Refuse windows that are empty, have no token to score, or do not fit the model."""
    check_window(length, context)
    check_length(model, length, Argument("length"))


class Window(NamedTuple):
    """Reads row[start:end] and scores the last `scored` of the tokens row[start + 1 : end + 1]."""

    start: int
    end: int
    scored: int


def _windows(targets: int, length: int, context: int, fill_last: bool) -> list[Window]:
    """Windows of equal length. The last one may score fewer tokens: it then has more tokens of context (`fill_last`, as
    in lm-eval), or is shorter (as in fairseq)."""
    done = min(length, targets)
    windows = [Window(0, done, done)]
    while done < targets:
        scored = min(targets - done, length - context)
        done += scored
        windows.append(Window(done - (length if fill_last else context + scored), done, scored))
    return windows


def _token_row(model: Any, tokenizer: Any, text: str) -> Tensor:
    """The tokens of a text after a first token that is not scored: bos, else eos, else the text's own first token."""
    require_tokenizer(tokenizer)
    if not text.strip():
        raise EvaluationError("the text is empty: give one with words in it")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if ends_lines(tokenizer) and not text.endswith("\n"):
        ids.append(tokenizer.eos_token_id)
    note = unknown_words(tokenizer, ids)
    if note is not None:
        logger.warning_once(note)
    if len(ids) < 2:
        raise EvaluationError(f"the text has {len(ids)} token: give one with at least 2")
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", math.inf)
    if max(ids) >= vocabulary:
        raise EvaluationError(
            f"the tokenizer gives token {max(ids)}, and the model has {vocabulary}: it is another model's tokenizer"
        )
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return torch.tensor(ids if first is None else [first, *ids])


def _read_windows(row: Tensor, windows: Sequence[Window], bos: int | None) -> Tensor:
    """The tokens that windows read, and the one after them, [B,T+1]. They start with bos where it is not None."""
    rows = torch.stack([row[window.start : window.end + 1] for window in windows])
    if bos is not None:
        rows[:, 0] = bos
    return rows


def _nll(model: Any, row: Tensor, windows: Sequence[Window], bos: int | None) -> float:
    """The negative log-likelihood of the tokens that windows of one length score."""
    losses = _losses(model, _read_windows(row, windows, bos), keep=max(window.scored for window in windows))
    return sum(_sum(loss[-window.scored :], window) for window, loss in zip(windows, losses, strict=True))


def _losses(model: Any, rows: Tensor, keep: int) -> Tensor:
    """The losses [B,keep] of the last `keep` tokens of rows [B,T+1]. Long rows are read in chunks."""
    length, cache, losses = rows.shape[1] - 1, None, []
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        chunk = rows[:, start : end + 1]
        scored = min(end - start, max(1, keep - (length - end)))
        arguments: dict[str, Any] = {"past_key_values": cache, "use_cache": length > CHUNK}
        output = output_layer(model)
        if isinstance(output, AdaptiveSoftmax):  # its losses need no logits of all words
            with without_head(model) as seen:
                outputs = call_model(model, chunk[:, :-1], scored, **arguments)
            rows_and_targets = zip(seen[0][:, -scored:], chunk[:, -scored:].to(seen[0].device), strict=True)
            losses.append(torch.stack([output.losses(*pair) for pair in rows_and_targets]).cpu())
        else:
            outputs = call_model(model, chunk[:, :-1], scored, **arguments)
            logits = outputs.logits[:, -scored:]
            losses.append(_cross_entropy(logits, chunk[:, -scored:].to(logits.device)))
        cache = outputs.past_key_values
    return torch.cat(losses, 1)[:, -keep:]


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
            f"the loss is {total} in the window of tokens {window.start} to {window.end}: values of the model overflow "
            "there; try float32, or an earlier checkpoint"
        )
    return total


def _doubling(length: int) -> list[int]:
    powers = (FIRST_BUCKET << power for power in itertools.count())
    return [0, *itertools.takewhile(lambda start: start < length, powers)]


def _bucket(totals: Tensor, start: int, end: int, windows: int) -> PositionBucket:
    tokens = (end - start) * windows
    loss = float(totals[start:end].sum()) / tokens
    return PositionBucket(start=start, end=end, loss=loss, perplexity=_exp(loss), tokens=tokens)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _batches(count: int, batch_size: int, what: str, progress: bool) -> Iterable[int]:
    """The index of the first window of each batch."""
    if batch_size < 1:
        raise EvaluationError(Argument("batch_size"), f" {batch_size}: choose at least 1")
    return track(range(0, count, batch_size), what, enabled=progress)
