"""Attention normalization: y = S q / (n . q), where n is a running sum of keys that is updated like the state.

add and gated: n obeys the rule of S with a value of 1, so it is one more row of S.
delta: n is the normalizer of add. In both cases it is stored as the last row of the state, [B,H,d+1,m].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# Learned ReLU features can all be zero. The divisor is then zero, and so is the dividend.
SMALLEST_DIVISOR = 1e-6


def with_ones(v: Tensor) -> Tensor:
    """Append a 1 to each value, [...,d] -> [...,d+1], so that the rule itself updates the normalizer."""
    return F.pad(v, (0, 1), value=1.0)


def split_state(state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a state [B,H,d+1,m] into that of the values and the normalizer, [B,H,d,m] and [B,H,1,m]."""
    return (None, None) if state is None else (state[..., :-1, :], state[..., -1:, :])


def join_state(values: Tensor, total: Tensor) -> Tensor:
    """The inverse of split_state."""
    return torch.cat([values, total], dim=-2)


def divide(y: Tensor, divisor: Tensor) -> Tensor:
    """y / divisor, with a divisor smaller than 1e-6 moved to 1e-6 with its own sign (features may be negative)."""
    small = torch.full_like(divisor, SMALLEST_DIVISOR).copysign(divisor)
    return y / torch.where(divisor.abs() < SMALLEST_DIVISOR, small, divisor)
