"""Compiles the kernel of the losses on logits for a Hopper GPU that need not be there, and prints what it needs.

TRITON_INTERPRET=0 PYTHONPATH=tests python -m helpers.compile_head_loss
"""

from __future__ import annotations

import torch

from fastweights.ops.head_loss import head_loss_in_place
from fastweights.ops.triton import launch
from helpers.compile_kernels import TYPES
from helpers.compile_training_window import all_spilled, measured


def main() -> None:
    launch.run = measured  # type: ignore[assignment]
    TYPES[torch.int64] = "*i64"
    for dtype in (torch.bfloat16, torch.float32):
        logits, labels = torch.zeros(2, 49152, dtype=dtype), torch.zeros(2, dtype=torch.long)
        head_loss_in_place(logits, logits.clone(), labels, 30.0, 30.0, 0.3, 2.0, -100, True)
    assert not any(all_spilled)


if __name__ == "__main__":
    main()
