"""linformer: causal Linformer (Wang et al. 2020), a bounded memory whose weights w depend on the position alone.

    (K_t, V_t) = (K_{t-1}, V_{t-1}) + w_t (k_t, v_t),  y_t = V_t softmax(K_t^T q_t).
The weights are used as they are. The totals of the state count the tokens, from which their positions follow.
"""

from torch import Tensor

from fastweights.rules.base import Rule
from fastweights.rules.slots import write_and_read


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the linformer rule; shapes as in rules/slots.py, weight [B,H,m]."""
    return write_and_read(state, q, k, v, weight, state[..., -1, :] + 1)


LINFORMER = Rule("linformer", step, gates={"weight": "m"}, has_normalizer=False, slots=True, by_position=True)
