"""decay: S_t = (z f^T) * S_{t-1} + v_t k_t^T (elementwise),  y_t = S_t q_t.

f = sigmoid(f_logit) in (0,1)^m forgets along the keys, z = sigmoid(z_logit) in (0,1)^d along the values.
"""

from torch import Tensor

from fastweights.rules.base import Rule, forget_gate, outer, read


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, f_logit: Tensor, z_logit: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the decay rule; shapes as in rules/base.py."""
    state = outer(forget_gate(z_logit), forget_gate(f_logit)) * state + outer(v, k)
    return read(state, q), state


def linear_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The same without the sigmoid: f and z themselves are the gates, and nothing bounds the state."""
    state = outer(z, f) * state + outer(v, k)
    return read(state, q), state


DECAY = Rule("decay", step, gates={"f": "m", "z": "d"}, has_normalizer=False)
# Only the loop runs it: it is for an ablation of the paper (modeling/ablations.py), and not one of the RULES.
LINEAR_DECAY = Rule("decay without sigmoid", linear_step, gates=DECAY.gates, has_normalizer=False)
