"""What the rules share: how a state is read, and the plain loop over time that is the truth for every fast path.

Shapes, one time step: state S [B,H,d,m]   q [B,G*H,m]   k [B,H,m]   v [B,H,d]   gate logits [B,H,m], [B,H,d] or [B,H]
Shapes, a sequence:    the same with time second: q [B,T,G*H,m], ...   mask [B,T]   reset [B,T]
G query heads may read one state (grouped key-value heads); G is 1 for most models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A gate of sigmoid(-10) = 4.5e-5 forgets everything. The floor belongs to the rules, not to a fast path, so that
# every way of running them gives the same answer; below it tiles of running products would overflow float32.
MIN_GATE_LOGIT = -10.0

Step = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rule:
    """step(S, q, k, v, *gate_logits) -> (y, new S). `gates` maps each gate's name to its width: "m", "d" or "1"."""

    name: str
    step: Step
    gates: dict[str, str]


def read(state: Tensor, q: Tensor) -> Tensor:
    """y = S q for each query head of each state: [B,H,d,m], [B,G*H,m] -> [B,G*H,d]."""
    grouped = q.unflatten(1, (state.shape[1], -1))
    return (grouped @ state.transpose(-1, -2)).flatten(1, 2)


def outer(v: Tensor, k: Tensor) -> Tensor:
    return v[..., :, None] * k[..., None, :]


def zero_state(k: Tensor, v: Tensor) -> Tensor:
    """The empty state for a sequence's keys [B,T,H,m] and values [B,T,H,d]."""
    return v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3])


def loop(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: tuple[Tensor, ...],
    state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a rule token by token. A masked-out token leaves the state alone and puts out zero;
    a token with reset set finds an empty state."""
    state = zero_state(k, v) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        if reset is not None:
            state = state.masked_fill(reset[:, t, None, None, None], 0)
        y, new_state = rule.step(state, q[:, t], k[:, t], v[:, t], *(logit[:, t] for logit in gate_logits))
        if mask is not None:
            real = mask[:, t, None, None]
            y = y.masked_fill(~real, 0)
            new_state = torch.where(real[..., None], new_state, state)
        state = new_state
        outputs.append(y)
    return torch.stack(outputs, dim=1), state
