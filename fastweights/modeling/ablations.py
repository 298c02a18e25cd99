"""Ablations of the decay rule that the paper reports in prose. They run on every path of a layer, but slowly.

Shapes: q [B,T,G*S,m]   k [B,T,S,m]   v [B,T,S,d]   gates [B,T,S,m], [B,T,S,d]   state [B,S,d,m]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights import ops
from fastweights.config import GATED_WRITE, LINEAR_GATES
from fastweights.rules import loop
from fastweights.rules.base import MIN_GATE_LOGIT
from fastweights.rules.decay import LINEAR_DECAY


def linear_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    state: Tensor | None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decay without a sigmoid: `gates` are f and z themselves, of any size and sign.

    The chunked forms and the kernels compute with logarithms of gates, so only the loop can do this.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, wide, *gates_wide = (x.to(dtype) for x in (q, k, v, *gates))
    state = None if state is None else state.to(dtype)
    with torch.autocast(v.device.type, enabled=False):
        y, state = loop(LINEAR_DECAY, q, k, wide, tuple(gates_wide), state, mask, reset)
    return y.to(v.dtype), state


def gated_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    state: Tensor | None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decay whose new term is gated as well, as by the gated rule: S = G * S + (1 - G) * v k^T with G = z f^T, where
    `gates` are the logits of f and z.

    1 - z f = (1 - z) + z (1 - f), and a state is linear in what is written to it. So this is the sum of two runs of the
    decay rule, neither of which cancels the other.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    f_logit, z_logit = (logit.to(dtype).clamp(min=MIN_GATE_LOGIT) for logit in gates)
    rest = (v * (-z_logit).sigmoid()).to(v.dtype)
    y, new = ops.apply("decay", q, k, rest, gates, state, mask=mask, reset=reset)
    k, v = (k * (-f_logit).sigmoid()).to(k.dtype), (v * z_logit.sigmoid()).to(v.dtype)
    more_y, more = ops.apply("decay", q, k, v, gates, mask=mask, reset=reset)
    return y + more_y, new + more


# In place of the rule's own operation. The other ablations are a matter of the layer's initialization and gates.
RUNS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {LINEAR_GATES: linear_gates, GATED_WRITE: gated_write}
