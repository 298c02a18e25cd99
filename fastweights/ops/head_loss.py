"""The losses on next-token logits as one kernel: cross-entropy and the divergence from a teacher, with gradients.

Shapes: logits, teacher [N,V]   labels [N]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Elements of a row that a program handles at once, and its warps.
BLOCK, WARPS = 4096, 8


def head_loss_in_place(
    logits: Tensor,
    teacher: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    teacher_softcap: float | None,
    cross_entropy: float,
    temperature: float,
    ignored: int,
    with_gradient: bool,
) -> Tensor:
    """The loss of each token, summed; its gradient by the logits replaces them.

    Args:
        logits: Of the student; contiguous. Changed in place with `with_gradient`.
        teacher: Logits of the teacher; contiguous. None: no divergence.
        labels: The next tokens, or `ignored`: such tokens have no loss.
        softcap, teacher_softcap: Caps of the logits. None: no cap.
        cross_entropy: Weight of the cross-entropy.
        temperature: Temperature of both distributions in the divergence.
        ignored: The label of tokens that do not count.
        with_gradient: Whether to compute the gradient.

    Returns:
        The sum [] in float32.
    """
    from fastweights.ops.triton import launch
    from fastweights.ops.triton.head_loss import head_loss_kernel

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    numbers = tuple(float(x or 0) for x in (softcap, teacher_softcap, cross_entropy, temperature))
    options: dict[str, Any] = {
        "HAS_TEACHER": teacher is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_TEACHER_SOFTCAP": teacher_softcap is not None,
        "WITH_GRADIENT": with_gradient,
        "IGNORED": ignored,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    arguments = (logits, logits if teacher is None else teacher, labels, losses, logits.shape[1], *numbers)
    launch.run(head_loss_kernel, (len(logits),), arguments, **options)
    return losses.sum()
