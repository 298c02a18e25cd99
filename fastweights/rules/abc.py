"""abc: attention with bounded memory, whose control is computed from the token (ABC-MLP, Peng et al. 2022).

Each slot holds the average of all keys and values so far, with the weights exp(s):
    w_t = w_{t-1} + exp(s_t),  g = w_{t-1} / w_t,  (K_t, V_t) = g (K_{t-1}, V_{t-1}) + exp(s_t) / w_t (k_t, v_t),
    y_t = V_t softmax(K_t^T q_t).
g = sigmoid(log w_{t-1} - s_t) is a forget gate and has the floor of all of them. The totals of the state are w, so that
the first token of an empty memory has the share 1.
"""

from torch import Tensor

from fastweights.rules.base import MIN_GATE, Rule
from fastweights.rules.slots import write_and_read

# Limit of the control s on both sides. The sum of 2^31 weights of exp(60) is still within float32.
MAX_CONTROL = 60.0


def control_weight(s_logit: Tensor) -> Tensor:
    """exp(s), with the control limited on both sides."""
    return s_logit.clamp(-MAX_CONTROL, MAX_CONTROL).exp()


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, s_logit: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the abc rule; shapes as in rules/slots.py, s_logit [B,H,m]."""
    before, weight = state[..., -1, :], control_weight(s_logit)
    total = before + weight
    return write_and_read(state, q, k, v, weight / total, total, retained=(before / total).clamp(min=MIN_GATE))


ABC = Rule("abc", step, gates={"s": "m"}, has_normalizer=False, slots=True)
