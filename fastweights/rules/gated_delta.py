"""gated_delta: S_t = S' + g (v_t - S' k_t) k_t^T with S' = S_{t-1} diag(f),  y_t = S_t q_t.

f = sigmoid(f_logit) in (0,1)^m forgets along the keys, then the value that the state returns for k_t is moved towards
v_t by the fraction g = sigmoid(g_logit), one value per head. With f = 1 it is the delta rule.
"""

from torch import Tensor

from fastweights.rules.base import Rule, forget_gate
from fastweights.rules.delta import step as delta_step


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, f_logit: Tensor, g_logit: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule; shapes as in rules/base.py."""
    return delta_step(state * forget_gate(f_logit)[..., None, :], q, k, v, g_logit)


GATED_DELTA = Rule("gated_delta", step, gates={"f": "m", "g": "1"}, has_normalizer=False)
