"""The recorded choice of block sizes: a user's first call searches nothing. benchmarks/search_blocks.py is the search;
of what is recorded it found tiled/16 up to 64, and the rest is by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

# Running products of 16 tokens stay within e^80 even at the gates' floor, sigmoid(-10).
TILE = 16
SEGMENT_TILE = 32
SCAN_BLOCK = 512
# Wider states are cut into slices of this many rows, one program each. Of the largest ones half as many: in float32
# these would be compiled for a quarter of a minute.
WIDEST_SLICE = 64


class Launch(NamedTuple):
    """A kernel's warps, the depth of its pipeline, and the most registers of a thread (0: as many as it likes)."""

    warps: int
    stages: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "STAGES": self.stages, **limit}


class Blocks(NamedTuple):
    """Padded widths (of d: a slice's), and how each kernel is launched."""

    bm: int
    bd: int
    forward: Launch
    backward: Launch
    segments: Launch


RECORD: dict[str, dict[str, list[int]]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def key(family: str, bits: str, bm: int) -> str:
    return f"{family}/{bits}/{bm}"


def blocks_for(rule: str, m: int, d: int, dtype: torch.dtype) -> Blocks:
    bits, bm = "16" if dtype == torch.bfloat16 and rule != "delta" else "32", padded(m)
    bd = min(WIDEST_SLICE // (2 if bits == "32" and bm == 128 else 1), padded(d))
    choice = RECORD[key("delta" if rule == "delta" else "tiled", bits, bm)]
    return Blocks(bm, bd, *(Launch(*choice[kernel]) for kernel in ("forward", "backward", "segments")))


def padded(n: int) -> int:
    """A matrix unit's least width is 16, and blocks are powers of two."""
    return max(16, 1 << (n - 1).bit_length())
