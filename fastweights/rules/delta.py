"""delta: S_t = S_{t-1} + g (v_t - S_{t-1} k_t) k_t^T,  g = sigmoid(g_logit), one value per head,  y_t = S_t q_t.

The value that the state returns for k_t is moved towards v_t by the fraction g. The output reads the state after the
update.
"""

from torch import Tensor

from fastweights.rules.base import Rule, outer, read


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g_logit: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the delta rule; shapes as in rules/base.py."""
    predicted = read(state, k)
    state = state + outer(g_logit.sigmoid()[..., None] * (v - predicted), k)
    return read(state, q), state


DELTA = Rule("delta", step, gates={"g": "1"})
