"""What the rules share: how a state is read, and the loop over time that every fast implementation is tested against.

Shapes, one time step: state S [B,H,d,m]   q [B,G*H,m]   k [B,H,m]   v [B,H,d]   gate logits [B,H,m], [B,H,d] or [B,H]
Shapes, a sequence:    the same with time second: q [B,T,G*H,m], ...   mask [B,T]   reset [B,T]
G query heads may read one state (grouped key-value heads); G is 1 for most models. slots.py has the shapes of the rules
with slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Floor of the gate logits. A gate of sigmoid(-10) = 4.5e-5 forgets everything in practice. Below it, the cumulative
# products of a tile would overflow float32. The floor belongs to the rules and not to one implementation, so that all
# implementations give the same result.
MIN_GATE_LOGIT = -10.0
MIN_GATE = 1 / (1 + math.exp(-MIN_GATE_LOGIT))

Step = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rule:
    """An update rule: step(S, q, k, v, *gate_logits) -> (y, new S).

    `gates` maps the name of each gate to its width: "m", "d" or "1" (one value per head). `has_normalizer` says whether
    attention normalization is defined for the rule (normalizer.py). With `slots`, m counts the slots of a bounded
    memory: queries and keys are r wide, and the state is that of slots.py. With `by_position`, its gates are no logits
    from the token, but numbers that are looked up by the token's position.
    """

    name: str
    step: Step
    gates: dict[str, str]
    has_normalizer: bool = True
    slots: bool = False
    by_position: bool = False

    @property
    def arguments(self) -> dict[str, str]:
        """The widths of the gates, by the names of their arguments."""
        return {name if self.by_position else f"{name}_logit": width for name, width in self.gates.items()}

    def state_rows(self, d: int, r: int) -> int:
        """Rows of the state for values of width d and keys of width r, without those of a normalizer."""
        return d + r + 1 if self.slots else d

    def zero_state(self, k: Tensor, v: Tensor, gate_logits: tuple[Tensor, ...]) -> Tensor:
        """The initial state [B,H,d,m] for keys [B,T,H,m] and values [B,T,H,d]; with slots [B,H,d+r+1,m]."""
        (batch, _, heads, r), d = k.shape, v.shape[-1]
        return v.new_zeros(batch, heads, self.state_rows(d, r), gate_logits[0].shape[-1] if self.slots else r)


def forget_gate(logit: Tensor) -> Tensor:
    """sigmoid(logit), with the logit clamped at the floor."""
    return logit.clamp(min=MIN_GATE_LOGIT).sigmoid()


def read(state: Tensor, q: Tensor) -> Tensor:
    """y = S q for each query head of each state: [B,H,d,m], [B,G*H,m] -> [B,G*H,d]."""
    grouped = q.unflatten(1, (state.shape[1], -1))
    return (grouped @ state.transpose(-1, -2)).flatten(1, 2)


def outer(v: Tensor, k: Tensor) -> Tensor:
    """v k^T for each head: [...,d], [...,m] -> [...,d,m]."""
    return v[..., :, None] * k[..., None, :]


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
    """Run a rule token by token.

    Args:
        rule: the rule.
        q: queries [B,T,G*H,m].
        k: keys [B,T,H,m].
        v: values [B,T,H,d].
        gate_logits: the rule's gate logits, with time second.
        state: initial state [B,H,d,m]. None: zeros.
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at document starts: the state is zeroed before the token. None: no boundaries.

    Returns:
        y [B,T,G*H,d] and the state at the end.
    """
    state = rule.zero_state(k, v, gate_logits) if state is None else state
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
