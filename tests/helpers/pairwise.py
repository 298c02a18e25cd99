"""All-pairs selection: a few cases in which every pair of values occurs that occurs in all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Case = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    """Every pair of (factor, value) in a case."""
    return set(itertools.combinations(case.items(), 2))


def pairwise_cover(cases: Sequence[Case]) -> list[int]:
    """Chooses cases greedily, each time the first that has most pairs that no chosen case has.

    Args:
        cases: The valid combinations, as {factor: value} with the same factors in the same order.

    Returns:
        Indices of the chosen cases, in order.
    """
    remaining = [pairs_of(case) for case in cases]
    chosen = []
    while True:
        best = max(range(len(cases)), key=lambda i: len(remaining[i]))
        new = set(remaining[best])
        if not new:
            return sorted(chosen)
        chosen.append(best)
        for pairs in remaining:
            pairs -= new
