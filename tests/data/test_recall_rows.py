"""Rows that need recall: what is repeated, where, and what must stay as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis.strategies import booleans, floats, integers, lists

from fastweights.data.batches import IGNORED, PackedBatches
from fastweights.data.token_files import TokenFile
from fastweights.training.recipe import SHORTEST_WITH_RECALL

BOS, LENGTH = 65_000, 256


def token_file(lengths: list[int], bos: bool = False, scored: np.ndarray | None = None) -> TokenFile:
    """Documents of these lengths; every token has a number of its own, but for bos."""
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    if bos:
        tokens[starts] = BOS
    return TokenFile(Path("made"), tokens, starts, {"source": "made"}, BOS if bos else None, scored)


def both(tokens: TokenFile, length: int = LENGTH, rows: int = 4, seed: int = 0, share: float = 1.0) -> tuple:
    return PackedBatches(tokens, length, rows, seed), PackedBatches(tokens, length, rows, seed, share)


def made_rows(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of one document each, before and after."""
    plain, recall = both(token_file([40_000]))
    before, after = ([row for step in range(count // 4) for row in b.batch(step)["input_ids"]] for b in (plain, recall))
    return [(one.numpy(), other.numpy()) for one, other in zip(before, after, strict=True)]


def passage_of(before: np.ndarray, after: np.ndarray) -> tuple[int, int, int] | None:
    """Where a passage is, where it is repeated, and its length; None where the row has none."""
    changed = np.flatnonzero(before != after)
    start, length = changed[0], changed[-1] - changed[0] + 1
    source = int(after[start] - before[0])  # tokens are numbered
    is_copy = np.array_equal(after[start : start + length], before[source : source + length])
    return (source, int(start), int(length)) if is_copy else None


def pairs_of(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, int, list[int]] | None:
    """The pairs, where their list starts, and where each is asked for; None where the row has no such list."""
    changed = np.flatnonzero(before != after)
    first = int(changed[0])
    for width in (4, 3, 2):
        for count in range(16, 1, -1):
            end = first + width * count
            if end + width > len(after):
                continue
            pairs = after[first:end].reshape(-1, width)
            windows = np.lib.stride_tricks.sliding_window_view(after[end:], width)
            asked = [np.flatnonzero((windows == pair).all(1)) + end for pair in pairs]
            covered = {*range(first, end), *(int(at[-1]) + i for at in asked if len(at) for i in range(width))}
            if all(map(len, asked)) and covered >= set(changed.tolist()):
                return pairs, first, [int(at[-1]) for at in asked]
    return None


def test_a_row_repeats_a_passage_or_asks_for_pairs_about_equally_often() -> None:
    rows = made_rows(120)
    passages = [passage for row in rows if (passage := passage_of(*row))]
    listed = [found for row in rows if not passage_of(*row) and (found := pairs_of(*row))]
    assert len(passages) + len(listed) == len(rows)
    assert 40 <= len(passages) <= 80
    assert all(source + length <= start for source, start, length in passages)
    lengths, distances = [p[2] for p in passages], [start - source for source, start, _ in passages]
    assert 16 <= min(lengths) < 30 < 60 < max(lengths) <= LENGTH // 3
    assert min(distances) < 60 and max(distances) > 150
    counts, widths = [len(pairs) for pairs, _, _ in listed], {pairs.shape[1] for pairs, _, _ in listed}
    assert min(counts) < 5 and max(counts) > 12 and widths == {2, 3, 4}


def test_pairs_have_different_keys_and_are_asked_for_in_random_order_at_random_distances() -> None:
    listed = [found for row in made_rows(120) if not passage_of(*row) and (found := pairs_of(*row))]
    assert all(len(set(pairs[:, 0])) == len(pairs) for pairs, _, _ in listed)
    assert sum(asked != sorted(asked) for _, _, asked in listed) > len(listed) / 2
    distances = [at - first - pairs.shape[1] * i for pairs, first, asked in listed for i, at in enumerate(asked)]
    assert min(distances) < 20 and max(distances) > 180


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(lists(integers(1, 300), min_size=1, max_size=12), integers(0, 2**32), integers(0, 9), booleans(), booleans())
def test_only_scored_tokens_of_one_document_change_and_come_from_it(
    lengths: list[int], seed: int, step: int, bos: bool, chat: bool
) -> None:
    scored = np.random.default_rng(seed).random(sum(lengths)) < 0.9 if chat else None
    assume(sum(lengths) > 200)
    plain, recall = both(token_file(lengths, bos, scored), 100, 1, seed)
    before, after = plain.batch(step), recall.batch(step)
    assert before["position_ids"].equal(after["position_ids"])
    has_label = before["labels"] != IGNORED
    assert has_label.equal(after["labels"] != IGNORED) and recall.targets(step) == int(has_label[:, 1:].sum())
    assert after["labels"][has_label].equal(after["input_ids"][has_label])
    changed = before["input_ids"] != after["input_ids"]
    assert not (changed & ~has_label).any()
    ends = has_label & ~torch.nn.functional.pad(has_label[:, 1:], (0, 1))
    assert not (changed & ends).any()
    document = (before["position_ids"] == 0).cumsum(1)
    assert len(set(document[changed].tolist())) <= 1
    inside = set(before["input_ids"][torch.isin(document, document[changed]) & has_label & ~ends].tolist())
    assert set(after["input_ids"][changed].tolist()) <= inside


@settings(deadline=None, max_examples=20, derandomize=True, database=None)
@given(floats(0.05, 0.95), integers(0, 1000))
def test_share_of_the_rows_needs_recall_and_the_others_are_as_without(share: float, seed: int) -> None:
    plain, recall = both(token_file([60_000]), 128, 100, seed, share)
    changed = 0
    for step in range(4):
        before, after = plain.batch(step), recall.batch(step)
        rows = (before["input_ids"] != after["input_ids"]).any(1)
        changed += int(rows.sum())
        assert all(before[name][~rows].equal(after[name][~rows]) for name in before)
    assert abs(changed / 400 - share) < 0.1


def test_rows_depend_on_seed_and_step_alone_and_processes_share_them() -> None:
    tokens = token_file([500, 3_000, 40])
    batches = PackedBatches(tokens, LENGTH, 4, 3, 0.7)
    whole = [batches.batch(step) for step in range(9)]
    for step in (8, 0, 5):
        shares = [PackedBatches(tokens, LENGTH, 4, 3, 0.7).batch(step, rank, 2) for rank in range(2)]
        assert all(torch.cat([share[name] for share in shares]).equal(whole[step][name]) for name in whole[step])
    other = PackedBatches(tokens, LENGTH, 4, 4, 0.7)
    assert not all(other.batch(step)["input_ids"].equal(whole[step]["input_ids"]) for step in range(9))


def test_another_epoch_changes_a_row_in_another_way() -> None:
    batches = PackedBatches(token_file([LENGTH]), LENGTH, 1, 0, 1.0)
    rows = {tuple(batches.batch(epoch)["input_ids"][0].tolist()) for epoch in range(5)}
    assert len(rows) == 5


@pytest.mark.parametrize("bos", [False, True])
def test_rows_of_the_shortest_length_have_room(bos: bool) -> None:
    plain, recall = both(token_file([4_000], bos), SHORTEST_WITH_RECALL, 4)
    pairs = [(plain.batch(step)["input_ids"], recall.batch(step)["input_ids"]) for step in range(10)]
    assert all((before != after).any(1).all() for before, after in pairs)


def test_rows_of_short_documents_stay_as_they_are() -> None:
    plain, recall = both(token_file([40] * 100))
    for step in range(3):
        before, after = plain.batch(step), recall.batch(step)
        assert all(before[name].equal(after[name]) for name in before)
    assert not recall.can_need_recall()


def test_one_long_document_in_the_first_step_can_need_recall() -> None:
    assert both(token_file([40] * 20 + [200] + [40] * 80))[1].can_need_recall()
