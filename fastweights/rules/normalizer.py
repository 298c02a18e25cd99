"""Attention normalisation: y = S q / (n . q), n a running sum of keys that is updated like the state itself.

add and gated: n obeys the very rule of S with a value of 1, so it is one more row of S.
delta: n is add's normaliser. Either way it is kept as the last row of the state, [B,H,d+1,m].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# Learned ReLU features can all be zero; where the divisor vanishes so does what is divided.
SMALLEST_DIVISOR = 1e-6


def with_ones(v: Tensor) -> Tensor:
    return F.pad(v, (0, 1), value=1.0)


def split_state(state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if state is None else (state[..., :-1, :], state[..., -1:, :])


def join_state(values: Tensor, total: Tensor) -> Tensor:
    return torch.cat([values, total], dim=-2)


def divide(y: Tensor, divisor: Tensor) -> Tensor:
    """y / divisor with the divisor kept away from zero on its own side (features need not be positive)."""
    small = torch.full_like(divisor, SMALLEST_DIVISOR).copysign(divisor)
    return y / torch.where(divisor.abs() < SMALLEST_DIVISOR, small, divisor)
