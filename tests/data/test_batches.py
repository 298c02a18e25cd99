"""Tokens to batches: every batch is what a plain loop packs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis.strategies import booleans, integers, lists

from fastweights.data.batches import PackedBatches, validation_rows
from fastweights.data.readers import DataError
from fastweights.data.token_files import TokenFile
from fastweights.modeling.packing import packed_starts

BOS = 9_999


def token_file(lengths: list[int], bos: bool = False) -> TokenFile:
    """Documents of these lengths; every token has a number of its own, but for the first of a document with `bos`."""
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    if bos:
        tokens[starts] = BOS
    return TokenFile(Path("made"), tokens, starts, {"source": "made"}, BOS if bos else None)


def naive_rows(lengths: list[int], length: int) -> list[dict[str, list[int]]]:
    """Every row, one token after another."""
    firsts = {sum(lengths[:i]) for i in range(len(lengths))}
    rows = []
    for begin in range(0, sum(lengths) - length + 1, length):
        row: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "labels": []}
        for token in range(begin, begin + length):
            starts = token == begin or token in firsts
            row["position_ids"].append(0 if starts else row["position_ids"][-1] + 1)
            row["labels"].append(-100 if starts else token)
            row["input_ids"].append(token)
        rows.append(row)
    return rows


def naive_rows_with_bos(lengths: list[int], length: int) -> list[dict[str, list[int]]]:
    """Rows of `length - 1` new tokens each. A row that starts with a document has bos, else it gets one."""
    tokens, firsts = token_file(lengths, bos=True).tokens.tolist(), {sum(lengths[:i]) for i in range(len(lengths))}
    rows = []
    for begin in range(0, len(tokens) - length + 1, length - 1):
        own = range(begin, begin + length) if begin in firsts else range(begin, begin + length - 1)
        row: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "labels": []}
        if begin not in firsts:
            row = {"input_ids": [BOS], "position_ids": [0], "labels": [-100]}
        for token in own:
            is_new = token < begin + length - 1
            row["position_ids"].append(0 if token in firsts else row["position_ids"][-1] + 1)
            row["labels"].append(tokens[token] if is_new and token not in firsts else -100)
            row["input_ids"].append(tokens[token])
        rows.append(row)
    return rows


def as_lists(batch: dict[str, torch.Tensor]) -> list[dict[str, list[int]]]:
    assert all(part.dtype == torch.int64 for part in batch.values())
    return [{name: part[i].tolist() for name, part in batch.items()} for i in range(len(batch["input_ids"]))]


def test_positions_and_labels_restart_at_document_boundaries() -> None:
    """Boundaries inside a row and at both its edges, and documents of one token; models start again at each."""
    tokens = token_file([3, 1, 1, 3, 4, 3, 1, 2])
    rows = validation_rows(tokens, 4)
    assert rows["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 0]]
    assert rows["labels"].eq(-100).equal(rows["position_ids"].eq(0))
    assert rows["labels"][rows["labels"] != -100].tolist() == [1, 2, 6, 7, 9, 10, 11, 13, 14]
    reset = packed_starts({"position_ids": rows["position_ids"]}, 4)
    assert reset is not None and rows["input_ids"][reset].tolist() == [s for s in tokens.starts if s % 4]


def test_every_row_starts_with_bos_once_and_every_token_is_scored_once() -> None:
    """Rows cut inside a document, at a document's start, and documents that start inside a row."""
    tokens = token_file([7, 5, 9, 1, 8], bos=True)
    rows = validation_rows(tokens, 4)
    assert rows["input_ids"].tolist()[:5] == [
        [BOS, 1, 2, 3],  # a document's own bos
        [BOS, 3, 4, 5],
        [BOS, 6, BOS, 8],
        [BOS, 9, 10, 11],
        [BOS, 13, 14, 15],  # its own again
    ]
    assert rows["position_ids"].tolist()[2] == [0, 1, 0, 1]
    scored = rows["labels"][rows["labels"] != -100].tolist()
    assert scored == [token for token in range(27) if token not in tokens.starts]
    assert BOS not in scored


@settings(deadline=None, max_examples=100, derandomize=True, database=None)
@given(
    lists(integers(1, 9), min_size=1), integers(2, 12), integers(1, 4), integers(0, 20), integers(0, 2**32), booleans()
)
def test_batches_equal_those_of_a_naive_loop(
    lengths: list[int], length: int, rows: int, step: int, seed: int, bos: bool
) -> None:
    expected, tokens = (naive_rows_with_bos if bos else naive_rows)(lengths, length), token_file(lengths, bos)
    assume(len(expected) >= rows)
    assert as_lists(validation_rows(tokens, length)) == expected
    limit = 1 + rows * (length - 1) if bos else rows * length
    assert as_lists(validation_rows(tokens, length, limit_tokens=limit)) == expected[:rows]
    batches = PackedBatches(tokens, length, rows, seed)
    batch = batches.batch(step)
    epochs = range((step + 1) * rows // len(expected) + 1)
    order = [i for epoch in epochs for i in np.random.default_rng([seed, epoch]).permutation(len(expected))]
    assert as_lists(batch) == [expected[i] for i in order[step * rows : (step + 1) * rows]]
    assert batches.targets(step) == int((batch["labels"][:, 1:] != -100).sum())
    for world in (w for w in (1, 2, 4) if rows % w == 0):
        shares = [batches.batch(step, rank, world) for rank in range(world)]
        assert all(torch.cat([share[name] for share in shares]).equal(batch[name]) for name in batch)


def first_tokens(batches: PackedBatches, steps: int) -> list[int]:
    return [token for step in range(steps) for token in batches.batch(step)["input_ids"][:, 0].tolist()]


def test_every_epoch_has_each_row_once_in_an_order_of_seed_and_step_alone() -> None:
    tokens = token_file([7] * 61)
    batches = PackedBatches(tokens, 4, rows=8, seed=3)
    assert batches.rows_in_epoch == 106  # 427 tokens; the last 3 are left out
    samples = first_tokens(batches, 53)
    epochs = [samples[i : i + 106] for i in range(0, 424, 106)]
    assert all(sorted(epoch) == list(range(0, 424, 4)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(0, 424, 4)]}) == 5
    for step in (52, 0, 13, 14, 13, 40, 26):
        for found in (batches, PackedBatches(tokens, 4, rows=8, seed=3)):
            assert found.batch(step)["input_ids"][:, 0].tolist() == samples[step * 8 : (step + 1) * 8]
    assert first_tokens(PackedBatches(tokens, 4, rows=8, seed=4), 53) != samples


def test_text_shorter_than_a_batch_is_refused() -> None:
    tokens = token_file([5, 1495])
    for shape, message in (
        ((2048, 1), "made: 1,500 tokens are fewer than one row of 2,048: give more text, or lower length"),
        (
            (500, 4),
            "made: 1,500 tokens are no batch of 4 rows of 500 tokens (2,000): give more text, or change bat",
        ),
        ((500, 0), "made: 1,500 tokens are no batch of 0 rows of 500 tokens (0)"),
        ((1, 1), "length must be at least 2 tokens, the second predicted from the first; found 1"),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            PackedBatches(tokens, *shape)
    with pytest.raises(DataError, match="made: 499 tokens are fewer than one row of 500"):
        validation_rows(tokens, 500, limit_tokens=499)
    with pytest.raises(DataError, match="3 rows cannot be shared evenly by 2 processes: make batch_tokens a multi"):
        PackedBatches(tokens, 500, rows=3).batch(0, rank=0, world=2)
