"""add: S_t = S_{t-1} + v_t k_t^T,  y_t = S_t q_t. The rule never forgets."""

from torch import Tensor

from fastweights.rules.base import Rule, outer, read


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the add rule; shapes as in rules/base.py."""
    state = state + outer(v, k)
    return read(state, q), state


ADD = Rule("add", step, gates={})
