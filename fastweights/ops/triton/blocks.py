"""Recorded launch settings of the training kernels, so that a first call only compiles and never searches.

benchmarks/search_blocks.py is the search.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from fastweights.rules import DELTA_RULES

# Tokens per tile. Cumulative products of 16 gates at the floor, sigmoid(-10), stay within e^80 (primitives.py); those
# of 32 would overflow float32. Kernels that never divide by a gate use SEGMENT_TILE.
TILE = 16
SEGMENT_TILE = 32
# Tokens of the delta rules' chunks: two tiles, which have a reference point each (wy.py).
CHUNK = 2 * TILE
SCAN_BLOCK = 512
# Wider states are cut into slices of this many rows, one program each. The largest float32 states use half as many:
# their kernels would otherwise take a quarter of a minute to compile.
WIDEST_SLICE = 64


class LaunchConfig(NamedTuple):
    """Warps of a kernel, the depth of its software pipeline, the most registers of a thread (0: Triton's choice), and
    how many of the state's d rows a program has in registers at a time (0: a slice of the rule)."""

    warps: int
    stages: int
    registers: int = 0
    rows: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The keyword arguments of a kernel's launch."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "STAGES": self.stages, **limit}


class Blocks(NamedTuple):
    """Padded state width, rows of a slice, and the launch settings of each kernel by its name."""

    bm: int
    bd: int
    kernels: dict[str, LaunchConfig]


RECORD: dict[str, dict[str, list[int]]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def key(family: str, bits: str, bm: int) -> str:
    """The key of a record: "tiled" or "wy", "16" for bfloat16 and "32" for other dtypes, and the padded m."""
    return f"{family}/{bits}/{bm}"


def blocks_for(rule: str, m: int, d: int, dtype: torch.dtype) -> Blocks:
    """The recorded settings for a rule, its state [d,m] and the dtype of its inputs."""
    bits, bm = "16" if dtype == torch.bfloat16 else "32", padded(m)
    bd = min(WIDEST_SLICE // (2 if bits == "32" and bm == 128 else 1), padded(d))
    choices = RECORD[key("wy" if rule in DELTA_RULES else "tiled", bits, bm)]
    return Blocks(bm, bd, {kernel: LaunchConfig(*choice) for kernel, choice in choices.items()})


def padded(n: int) -> int:
    """n as a block size: a power of two, at least 16, the least width that tensor cores multiply."""
    return max(16, 1 << (n - 1).bit_length())
