"""What the rules with slots share: a bounded memory of m slots, each with a key and a value, which softmax attention
reads. A token is written into every slot, with a share for each.

Shapes, one time step: state [B,H,d+r+1,m]   q [B,G*H,r]   k [B,H,r]   v [B,H,d]   share, total, retained [B,H,m]
The rows of a state are the d elements of the slots' values, then the r elements of their keys, then a total for each
slot: a number that the rule adds up over the tokens. A state of zeros is an empty memory.
"""

import torch
from torch import Tensor

from fastweights.rules.base import outer, read


def split_slots(state: Tensor, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a state [B,H,d+r+1,m] into the slots' values, their keys and their totals: [..,d,m], [..,r,m], [..,1,m]."""
    return state[..., :d, :], state[..., d:-1, :], state[..., -1:, :]


def join_slots(values: Tensor, keys: Tensor, total: Tensor) -> Tensor:
    """The inverse of split_slots."""
    return torch.cat([values, keys, total], dim=-2)


def write_and_read(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, share: Tensor, total: Tensor, retained: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write a token into the slots, then read them.

    Args:
        state: [B,H,d+r+1,m].
        q: queries [B,G*H,r].
        k: key [B,H,r].
        v: value [B,H,d].
        share: what each slot gets of the key and the value [B,H,m].
        total: the new totals [B,H,m].
        retained: the part of its content that each slot retains [B,H,m]. None: all of it.

    Returns:
        y [B,G*H,d] and the new state.
    """
    d, slots = v.shape[-1], state[..., :-1, :]
    slots = slots if retained is None else slots * retained[..., None, :]
    slots = slots + outer(torch.cat([v, k], dim=-1), share)
    values, keys = slots[..., :d, :], slots[..., d:, :]
    y = read(values, read(keys.transpose(-1, -2), q).softmax(-1))
    return y, torch.cat([slots, total[..., None, :]], dim=-2)
