"""delta: S_t = S_{t-1} + g (v_t - S_{t-1} k_t) k_t^T,  g = sigmoid(g_logit) one number a head,  y_t = S_t q_t.

What the state holds under k_t is replaced by v_t, to the degree g. The output reads the state after the update.
"""

from torch import Tensor

from fastweights.rules.base import Rule, outer, read


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g_logit: Tensor) -> tuple[Tensor, Tensor]:
    held = read(state, k)
    state = state + outer(g_logit.sigmoid()[..., None] * (v - held), k)
    return read(state, q), state


DELTA = Rule("delta", step, gates={"g": "1"})
