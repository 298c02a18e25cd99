"""The rules with slots as calls of the other rules, which have chunked forms and kernels.

abc is two calls of decay, linformer two of add: the first writes keys into the slots and reads their products with the
queries, the second writes values and reads their sum with the softmax of these products. Before that, one call of add
adds up the totals.

Shapes: q [B,T,G*H,r]   k [B,T,H,r]   v [B,T,H,d]   gate, share, totals [B,T,H,m]   state [B,H,d+r+1,m]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.rules import RULES, Rule
from fastweights.rules.abc import MAX_CONTROL, control_weight
from fastweights.rules.slots import join_slots, split_slots

Backend = Callable[..., tuple[Tensor, Tensor]]
# Logit of a gate that lets everything through: its sigmoid is 1, and the product of 2^31 such gates, too.
OPEN_LOGIT = 60.0


def run_slots(
    run: Backend,
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor, ...],
    state: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a rule with slots over sequences; the other arguments and the results are those of rules.loop.

    Args:
        run: the backend that runs the other rules.
    """
    state = rule.zero_state(k, v, gates) if state is None else state
    values, keys, before = split_slots(state, v.shape[-1])
    (gate,) = gates
    amount = torch.ones_like(gate) if rule.by_position else control_weight(gate)
    if mask is not None:
        amount = amount.masked_fill(~mask[..., None, None], 0)
    # Keys and queries of one element, which is 1. Padding is not masked, so that it has the totals before it.
    one = torch.ones_like(amount[..., :1])
    totals, after = run(RULES["add"], one, one, amount, (), before.mT, None, reset)
    inner, share = RULES["add"], gate
    key_gates: tuple[Tensor, ...] = ()
    value_gates: tuple[Tensor, ...] = ()
    if not rule.by_position:
        inner = RULES["decay"]
        # The total of an empty memory is 0. What is added changes no other total.
        totals = torch.cat([before.transpose(1, 2), totals], dim=1) + torch.finfo(amount.dtype).tiny
        share = amount / totals[:, 1:]
        g_logit = totals[:, :-1].log() - gate.clamp(-MAX_CONTROL, MAX_CONTROL)
        key_gates, value_gates = (_open_like(k), g_logit), (g_logit, _open_like(v))
    logits, keys = run(inner, q, k, share, key_gates, keys.mT, mask, reset)
    y, values = run(inner, logits.softmax(-1), share, v, value_gates, values, mask, reset)
    return y, join_slots(values, keys.mT, after.mT)


def _open_like(x: Tensor) -> Tensor:
    """Logits of open gates, without memory for each of them."""
    return x.new_full((1,), OPEN_LOGIT).expand_as(x)
