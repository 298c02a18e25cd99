"""Training rows that need recall, made from the text itself.

Two kinds, equally often:

- a passage of a document is repeated later in it;
- pairs of a key and a value are listed, and asked for again in another order: each key stands once more at a random
  later place, with its value after it.

Both replace tokens of the row. Only one document of a row changes, and of it only tokens that have a label: bos, the
first token of a document and what a chat template puts around answers stay. So do the tokens that end an answer or a
document, because they come last in a run of tokens with labels. The same places have labels as before.

The pairs are not those of the recall probe (fastweights.evaluation.recall): keys and values are tokens of the text,
values have up to three of them, the text goes on in between, and all pairs are asked for.

Shapes: input_ids, position_ids, labels [T]   places [n], indices of a document's tokens that may change
"""

from __future__ import annotations

import numpy as np

IGNORED = -100  # the label that Hugging Face's losses leave out
SHORTEST_PASSAGE, LONGEST_PASSAGE = 16, 128
MOST_PAIRS, LONGEST_VALUE = 16, 3
# Fewest places of a document: a passage, as many tokens in between, and the passage again.
FEWEST_PLACES = 3 * SHORTEST_PASSAGE


def insert_recall(
    input_ids: np.ndarray, position_ids: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> None:
    """Make a row need recall, in place. A row stays as it is where no document has enough tokens with labels.

    Args:
        input_ids: The tokens of the row.
        position_ids: Their positions, 0 at the start of every document.
        labels: The tokens, or IGNORED where one is not predicted.
        rng: Draws the kind, the places and the lengths.
    """
    places = _longest_document(position_ids, labels)
    if len(places) < FEWEST_PLACES:
        return
    document = input_ids[places]
    make = _repeat_passage if rng.random() < 0.5 else _ask_for_pairs
    input_ids[places] = labels[places] = make(document, rng)


def can_need_recall(position_ids: np.ndarray, labels: np.ndarray) -> bool:
    """Whether a document of the row has enough tokens with labels for `insert_recall` to change something."""
    return len(_longest_document(position_ids, labels)) >= FEWEST_PLACES


def _longest_document(position_ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The places that may change in the document that has most of them."""
    may_change = labels != IGNORED
    may_change[:-1] &= may_change[1:]
    may_change[-1] = False
    places, document = np.flatnonzero(may_change), np.cumsum(position_ids == 0)
    return places[document[places] == np.bincount(document[places], minlength=1).argmax()]


def _repeat_passage(document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Copy a passage to a later place that it does not overlap."""
    count = len(document)
    length = rng.integers(SHORTEST_PASSAGE, min(LONGEST_PASSAGE, count // 3), endpoint=True)
    first = rng.integers(0, count - 2 * length, endpoint=True)
    second = rng.integers(first + length, count - length, endpoint=True)
    made = document.copy()
    made[second : second + length] = document[first : first + length]
    return made


def _ask_for_pairs(document: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """List pairs at a random place, and put every pair once more somewhere behind the list, in another order.

    They take half of the document at most. Keys are the document's rarest tokens, so that few of them have other tokens
    after them elsewhere.
    """
    value_length = int(rng.integers(1, LONGEST_VALUE, endpoint=True))
    width = 1 + value_length
    tokens, counts = np.unique(document, return_counts=True)
    rarest = tokens[np.lexsort((rng.random(len(tokens)), counts))]
    pairs = min(int(rng.integers(2, MOST_PAIRS, endpoint=True)), len(document) // (4 * width), len(tokens))
    values = rng.integers(0, len(document) - value_length, size=pairs, endpoint=True)[:, None]
    shown = np.concatenate([rarest[:pairs, None], document[values + np.arange(value_length)]], axis=1)
    first = int(rng.integers(0, len(document) - 2 * shown.size, endpoint=True))
    behind = first + shown.size
    # places of the questions as if each took one token; those before it take the rest
    gaps = np.sort(rng.choice(len(document) - behind - pairs * value_length, size=pairs, replace=False))
    asked = behind + gaps + value_length * np.arange(pairs)
    made = document.copy()
    made[first:behind] = shown.ravel()
    made[asked[:, None] + np.arange(width)] = rng.permutation(shown)
    return made
