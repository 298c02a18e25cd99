"""Ablations of the decay rule that the paper reports in prose. They run on every path of a layer, as slowly as they may.

Shapes: q [B,T,G*S,m]   k [B,T,S,m]   v [B,T,S,d]   f_logit [B,T,S,m]   z_logit [B,T,S,d]   state [B,S,d,m]
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights import ops
from fastweights.config import GATED_WRITE, LINEAR_GATES
from fastweights.rules import loop
from fastweights.rules.base import MIN_GATE_LOGIT
from fastweights.rules.decay import LINEAR_DECAY


def linear_gates(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, ...], state: Tensor | None, **flags: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Decay without a sigmoid: `gates` are f and z themselves, of any size and sign.

    The chunked forms and the kernels compute with logarithms of gates, so only the loop can do this.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        inputs = (x.to(dtype) for x in (q, k, v))
        state = None if state is None else state.to(dtype)
        y, state = loop(LINEAR_DECAY, *inputs, tuple(gate.to(dtype) for gate in gates), state, **flags)
    return y.to(v.dtype), state


def gated_write(
    q: Tensor, k: Tensor, v: Tensor, gate_logits: tuple[Tensor, ...], state: Tensor | None, **flags: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Decay whose new term is gated as well, as by the gated rule: S = G * S + (1 - G) * v k^T with G = z f^T.

    1 - z f = (1 - z) + z (1 - f), and a state is linear in what is written to it. So this is the sum of two runs of the
    decay rule, neither of which cancels the other.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    f_logit, z_logit = (logit.to(dtype).clamp(min=MIN_GATE_LOGIT) for logit in gate_logits)
    writes = (
        (k, v * (-z_logit).sigmoid(), state),
        (k * (-f_logit).sigmoid(), v * z_logit.sigmoid(), None),
    )
    runs = [
        ops.apply("decay", q, key.to(k.dtype), value.to(v.dtype), gate_logits, start, **flags)
        for key, value, start in writes
    ]
    return runs[0][0] + runs[1][0], runs[0][1] + runs[1][1]


# In place of the rule's own operation. The third ablation is a matter of the initialization.
RUNS = {LINEAR_GATES: linear_gates, GATED_WRITE: gated_write}
