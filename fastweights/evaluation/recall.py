"""The recall probe: does a model remember what it read `distance` tokens ago? All sequences are random tokens.

Shapes: S samples, T tokens, V vocabulary.   shown, filler, sequences [S,T]   logits [S,T,V]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.evaluation.checks import EvaluationError
from fastweights.evaluation.forward import call_model
from fastweights.modeling.modes import evaluating
from fastweights.modeling.positions import check_length, position_limit
from fastweights.results import Recall, RecallRow
from fastweights.utils.progress import track

DISTANCES = (16, 32, 64, 128, 256, 512)
COPIED = 16


def recall_probe(
    model: Any,
    *,
    distances: Sequence[int] | None = None,
    pairs: int = 8,
    samples: int = 64,
    vocabulary: Sequence[int] | None = None,
    bos: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    progress: bool = True,
) -> Recall:
    """Measure how often a model recalls what it read some tokens before.

    There are two probes:

    - `pairs`: a sequence has keys, each followed by its value, then filler, then one of the keys again. The model is
      right if the value of this key is the likeliest of all values in the sequence.
    - `copy`: a sequence has a segment, filler, and the segment again. Each token in the second half of the repetition
      is right if it is the likeliest of the vocabulary.

    The filler consists of random tokens, which a state must store like any text. One repeated token would be a single
    key.

    Args:
        model: Any causal model.
        distances: Tokens between an item and its repetition; by default 16 to 512, as far as there are positions.
        pairs: Keys with values in a sequence.
        samples: Sequences for each distance.
        vocabulary: Token ids to draw from; by default the middle half of all ids. Tokenizers number tokens by
            frequency, so these are neither bytes and stop words nor the rarest tokens.
        bos: The token before every sequence; by default the bos token in the model's config, else the eos token there.
        seed: Of the random tokens.
        batch_size: Sequences in a forward pass.
        progress: Whether to show a progress bar.

    Returns:
        The accuracies of both probes by distance, with that of guessing.

    Raises:
        EvaluationError: If there are too few tokens, or the model's output is not a number.
        PositionError: If the model has too few positions.
    """
    ids = torch.tensor(ordinary_tokens(model) if vocabulary is None else vocabulary)
    needed = max(2 * pairs, COPIED)
    longest = position_limit(model) or math.inf
    if distances is None:
        distances = [distance for distance in DISTANCES if needed <= distance <= longest - needed]
    if not distances or min(distances) < needed or len(ids) <= needed:
        raise EvaluationError(
            f"{pairs} pairs need distances of at least {needed} tokens and a vocabulary of more than {needed}, "
            f"found distances {list(distances)} and {len(ids)} tokens"
        )
    check_length(model, max(distances) + needed, "sequences of")
    found = Recall(pairs=[], copy=[])
    first = next(iter([*([] if bos is None else [bos]), *_special_tokens(model, "bos", "eos")]), None)
    read = functools.partial(_read, model, batch_size, first)
    with evaluating(model):
        for distance in track(distances, "recall", enabled=progress):
            draw = functools.partial(_draw, ids, samples, torch.Generator().manual_seed(seed))
            found.pairs.append(_recall_pairs(draw, read, distance, pairs))
            found.copy.append(_recall_copy(draw, read, distance, chance=1 / len(ids)))
    return found


def ordinary_tokens(model: Any, tokenizer: Any = None) -> list[int]:
    """The middle half of the vocabulary without special tokens."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is None:
        raise EvaluationError(f"{type(model).__name__} has no vocab_size in its config: pass vocabulary=")
    special = {*_special_tokens(model, "bos", "eos", "pad"), *getattr(tokenizer, "all_special_ids", ())}
    return [token for token in range(size // 4, size * 3 // 4) if token not in special]


def _special_tokens(model: Any, *names: str) -> list[int]:
    """The special tokens in the model's config. One name may have several tokens."""
    found = [getattr(getattr(model, "config", None), f"{name}_token_id", None) for name in names]
    return [token for ids in found for token in (ids if isinstance(ids, list) else [ids]) if token is not None]


def _recall_pairs(draw: Callable, read: Callable, distance: int, pairs: int) -> RecallRow:
    """The `pairs` probe. All sequences have the same length, with the queried key at the same position."""
    shown, filler = draw(2 * pairs, distance - 2)
    values, queried = shown[:, 1::2], torch.arange(len(shown)) % pairs
    sequences = []
    for block, between, pair in zip(shown, filler, queried.tolist(), strict=True):
        before = 2 * (pairs - 1 - pair)
        sequences.append(torch.cat([between[:before], block, between[before:], block[2 * pair : 2 * pair + 1]]))
    logits = torch.cat([batch[:, -1] for batch in read(torch.stack(sequences), 1)])
    correct = logits.gather(1, values).argmax(1) == queried
    correct_of_all = logits.argmax(1) == values.gather(1, queried[:, None])[:, 0]
    return RecallRow(
        distance=distance,
        accuracy=_mean(correct),
        accuracy_vocabulary=_mean(correct_of_all),
        chance=1 / pairs,
        samples=len(shown),
    )


def _recall_copy(draw: Callable, read: Callable, distance: int, chance: float) -> RecallRow:
    """The `copy` probe."""
    segment, filler = draw(COPIED, distance - COPIED)
    sequences, second_half = torch.cat([segment, filler, segment[:, :-1]], 1), segment[:, COPIED // 2 :]
    likeliest = torch.cat([logits.argmax(-1) for logits in read(sequences, second_half.shape[1])])
    accuracy = _mean(likeliest == second_half)
    return RecallRow(distance=distance, accuracy=accuracy, chance=chance, samples=len(segment))


def _draw(ids: Tensor, samples: int, generator: torch.Generator, different: int, others: int) -> tuple[Tensor, Tensor]:
    """For each sample `different` tokens, no two alike, and `others` that are none of these."""
    order = torch.rand(samples, len(ids), generator=generator).argsort(1)
    filler = torch.randint(different, len(ids), (samples, others), generator=generator)
    return ids[order[:, :different]], ids[order.gather(1, filler)]


def _read(model: Any, batch_size: int, first: int | None, sequences: Tensor, keep: int) -> Iterator[Tensor]:
    """The last logits [B,keep,V] after sequences with the token `first` in front, if there is one."""
    sequences = sequences if first is None else nn.functional.pad(sequences, (1, 0), value=first)
    for batch in sequences.split(batch_size):
        logits = call_model(model, batch, keep, use_cache=False).logits[:, -keep:].float().cpu()
        if logits.isnan().any():
            raise EvaluationError(f"the model's output is not a number after {sequences.shape[1]} tokens")
        yield logits


def _mean(correct: Tensor) -> float:
    return float(correct.double().mean())
