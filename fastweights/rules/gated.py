"""gated: S_t = g S_{t-1} + (1 - g) v_t k_t^T,  g = sigmoid(g_logit), one value per head,  y_t = S_t q_t."""

from torch import Tensor

from fastweights.rules.base import MIN_GATE_LOGIT, Rule, outer, read


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g_logit: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the gated rule; shapes as in rules/base.py."""
    logit = g_logit.clamp(min=MIN_GATE_LOGIT)[..., None, None]
    state = logit.sigmoid() * state + (-logit).sigmoid() * outer(v, k)
    return read(state, q), state


GATED = Rule("gated", step, gates={"g": "1"})
