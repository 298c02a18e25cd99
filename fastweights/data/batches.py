"""Token files to batches of packed rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastweights.data.readers import DataError
from fastweights.data.token_files import TokenFile

IGNORED = -100  # the label that Hugging Face's losses leave out


class PackedBatches:
    """Rows of `length` tokens, in an order that depends on seed and step alone: a run goes on from its step's number.

    Every epoch has each row once, in an order of its own; the last tokens, too few for a row, are left out.
    `rows` is the global batch, over all processes.
    """

    def __init__(self, tokens: TokenFile, length: int, rows: int, seed: int = 0) -> None:
        self.rows_in_epoch = _count_rows(tokens, length)
        if not 1 <= rows <= self.rows_in_epoch:
            raise DataError(
                f"{_name(tokens)}: {len(tokens):,} tokens are no batch of {rows:,} rows of {length:,} tokens "
                f"({rows * length:,}): give more text with --data, or change --batch-tokens"
            )
        self.tokens, self.length, self.rows, self.seed = tokens, length, rows, seed
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, step: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        """This process's rows of the step's batch: input_ids, position_ids and labels, each [rows,length] int64."""
        if self.rows % world:
            change = f"make --batch-tokens a multiple of {world} x --length, {world * self.length:,}"
            raise DataError(f"a batch of {self.rows} rows cannot be shared evenly by {world} processes: {change}")
        share = self.rows // world
        return _pack(self.tokens, self._rows_of(step)[rank * share : (rank + 1) * share], self.length)

    def targets(self, step: int) -> int:
        """How many tokens of the whole batch, all processes together, are predicted."""
        first, starts = self._rows_of(step) * self.length, self.tokens.starts
        begun = np.searchsorted(starts, first + self.length) - np.searchsorted(starts, first + 1)
        return self.rows * (self.length - 1) - int(begun.sum())

    def _rows_of(self, step: int) -> np.ndarray:
        epochs, places = np.divmod(np.arange(step * self.rows, (step + 1) * self.rows), self.rows_in_epoch)
        return np.concatenate([self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.rows_in_epoch)
            # A batch may lie across two epochs.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return order


def validation_rows(tokens: TokenFile, length: int, limit_tokens: int | None = None) -> dict[str, Tensor]:
    """The text in its own order, as rows of `length` tokens; the same keys as PackedBatches.batch."""
    return _pack(tokens, np.arange(_count_rows(tokens, length, limit_tokens)), length)


def _count_rows(tokens: TokenFile, length: int, limit_tokens: int | None = None) -> int:
    if length < 2:
        raise DataError(f"--length must be at least 2 tokens, the second predicted from the first; found {length}")
    count = len(tokens) if limit_tokens is None else min(len(tokens), limit_tokens)
    if count < length:
        what = f"{_name(tokens)}: {count:,} tokens are fewer than one row of {length:,}"
        raise DataError(f"{what}: give more text, or lower --length")
    return count // length


def _name(tokens: TokenFile) -> str:
    return str(tokens.meta.get("source", tokens.folder))


def _pack(tokens: TokenFile, rows: np.ndarray, length: int) -> dict[str, Tensor]:
    """Where a document starts, positions count from 0 again and the token is not to be predicted."""
    columns = np.arange(length)
    ids = np.asarray(tokens.tokens[rows[:, None] * length + columns], dtype=np.int64)
    is_start = np.zeros(ids.shape, dtype=bool)
    is_start[:, 0] = True
    for row, first in enumerate(rows * length):
        low, high = np.searchsorted(tokens.starts, (first, first + length))
        is_start[row, tokens.starts[low:high] - first] = True
    positions = columns - np.maximum.accumulate(np.where(is_start, columns, 0), axis=1)
    packed = {"input_ids": ids, "position_ids": positions, "labels": np.where(is_start, IGNORED, ids)}
    return {name: torch.from_numpy(array) for name, array in packed.items()}
