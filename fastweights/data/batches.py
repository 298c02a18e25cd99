"""Token files to batches of packed rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastweights.data.readers import DataError
from fastweights.data.recall_rows import IGNORED, can_need_recall, insert_recall
from fastweights.data.token_files import TokenFile
from fastweights.utils.errors import Argument

# Third number of the seed of a row's recall, besides the run's seed and the row.
RECALL = 1
KEYS = ("input_ids", "position_ids", "labels")


class PackedBatches:
    """Batches of packed rows, in an order that depends on seed and step alone, so that a run can resume at any step.

    Every epoch has each row once, in an order of its own. The last tokens, too few for a row, are left out.

    Where the model expects a bos token (`tokens.bos`), every row starts with one: with that of a document, or with one
    that is put before the middle of a document. Each row then has `length - 1` tokens of its own, and the first of them
    is predicted from bos. In a row that starts with a document, the document's bos is one of these, and the place that
    is left at the end has the next row's first token, without a label.

    A document inside a row starts at position 0, and its first token is not predicted. Of conversations only the
    assistant's answers are.

    Args:
        tokens: The text.
        length: Tokens of a row.
        rows: Rows of a batch, over all processes.
        seed: Seed of the order.
        recall: Share of the rows that are made to need recall; 0 leaves all as they are.

    Raises:
        DataError: The text has fewer rows than a batch.
    """

    def __init__(self, tokens: TokenFile, length: int, rows: int, seed: int = 0, recall: float = 0.0) -> None:
        self.rows_in_epoch = _count_rows(tokens, length)
        if not 1 <= rows <= self.rows_in_epoch:
            found = f"{_name(tokens)}: {len(tokens):,} tokens are no batch of {rows:,} rows of {length:,} tokens"
            raise DataError(f"{found} ({rows * length:,}): give more text, or change ", Argument("batch_tokens"))
        self.tokens, self.length, self.rows, self.seed, self.recall = tokens, length, rows, seed, recall
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, step: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        """This process's rows of the step's batch: input_ids, position_ids and labels, each [rows,length] int64."""
        if self.rows % world:
            raise DataError(
                f"a batch of {self.rows} rows cannot be shared evenly by {world} processes: make ",
                *(Argument("batch_tokens"), f" a multiple of {world} x ", Argument("length")),
                f", {world * self.length:,}",
            )
        share = self.rows // world
        packed = _pack(self.tokens, self._rows_of(step)[rank * share : (rank + 1) * share], self.length)
        if self.recall:
            self._insert_recall(packed, step * self.rows + rank * share)
        return packed

    def targets(self, step: int) -> int:
        """How many tokens of the whole batch, all processes together, are predicted."""
        # recall changes tokens, not which of them have labels
        return count_targets(_pack(self.tokens, self._rows_of(step), self.length))

    def _insert_recall(self, packed: dict[str, Tensor], first: int) -> None:
        """Make a share of the rows need recall. Each row draws with its own number in the run, from `first` on."""
        ids, positions, labels = (packed[name].numpy() for name in KEYS)
        for row in range(len(ids)):
            rng = np.random.default_rng([self.seed, first + row, RECALL])
            if rng.random() < self.recall:
                insert_recall(ids[row], positions[row], labels[row], rng)

    def can_need_recall(self) -> bool:
        """Whether `recall` could change a row of the first step: where all documents are short, it changes nothing."""
        packed = _pack(self.tokens, self._rows_of(0), self.length)
        positions, labels = packed["position_ids"].numpy(), packed["labels"].numpy()
        return any(can_need_recall(*row) for row in zip(positions, labels, strict=True))

    def _rows_of(self, step: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(step * self.rows, (step + 1) * self.rows), self.rows_in_epoch)
        return np.concatenate([self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows_in_epoch)
            # a batch may span two epochs
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return order


def count_targets(batch: dict[str, Tensor]) -> int:
    """How many tokens of a batch in the host's memory are predicted."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def validation_rows(tokens: TokenFile, length: int, limit_tokens: int | None = None) -> dict[str, Tensor]:
    """The text in its own order, as rows of `length` tokens; the same rows and keys as in PackedBatches.

    Raises:
        DataError: There are too few tokens for a row, or the rows of a conversation have no answer in them.
    """
    rows = _pack(tokens, np.arange(_count_rows(tokens, length, limit_tokens)), length)
    if tokens.scored is not None and not bool((rows["labels"][:, 1:] != IGNORED).any()):
        raise DataError(f"{_name(tokens)}: no answer of the assistant is in the tokens that are read: give more")
    return rows


def _count_rows(tokens: TokenFile, length: int, limit_tokens: int | None = None) -> int:
    if length < 2:
        reason = f" must be at least 2 tokens, the second predicted from the first; found {length}"
        raise DataError(Argument("length"), reason)
    count = len(tokens) if limit_tokens is None else min(len(tokens), limit_tokens)
    if count < length:
        found = f"{_name(tokens)}: {count:,} tokens are fewer than one row of {length:,}"
        raise DataError(f"{found}: give more text, or lower ", Argument("length"))
    return 1 + (count - length) // _stride(tokens, length)


def _stride(tokens: TokenFile, length: int) -> int:
    """Tokens from the start of a row to that of the next."""
    return length if tokens.bos is None else length - 1


def _name(tokens: TokenFile) -> str:
    return str(tokens.meta.get("source", tokens.folder))


def _pack(tokens: TokenFile, rows: np.ndarray, length: int) -> dict[str, Tensor]:
    """Where a document starts, positions count from 0 again and the token is not to be predicted."""
    columns, firsts = np.arange(length), rows * _stride(tokens, length)
    nearest = np.minimum(np.searchsorted(tokens.starts, firsts), len(tokens.starts) - 1)
    needs_bos = (tokens.starts[nearest] != firsts) & (tokens.bos is not None)
    firsts = firsts - needs_bos  # bos replaces what is in the first column
    ids = np.asarray(tokens.tokens[firsts[:, None] + columns], dtype=np.int64)
    is_start = np.zeros(ids.shape, dtype=bool)
    is_start[:, 0] = True
    for row, first in enumerate(firsts):
        low, high = np.searchsorted(tokens.starts, (first, first + length))
        is_start[row, tokens.starts[low:high] - first] = True
    positions = columns - np.maximum.accumulate(np.where(is_start, columns, 0), axis=1)
    labels = np.where(is_start, IGNORED, ids)
    if tokens.scored is not None:
        labels[~tokens.scored[firsts[:, None] + columns]] = IGNORED
    if tokens.bos is not None:
        ids[needs_bos, 0] = tokens.bos
        labels[~needs_bos, -1] = IGNORED  # the next row's first token
    return {name: torch.from_numpy(array) for name, array in zip(KEYS, (ids, positions, labels), strict=True)}
