"""One token of a rule, or of a window, with what is kept written in place: static addresses and no host in between,
for CUDA graphs.

Shapes: state [B,S,d,m] float32, contiguous   q [B,G*S,m]   k [B,S,m]   v [B,S,d]   gate logits [B,S,m], [B,S,d], [B,S]
        -> y [B,G*S,d].   normalize=True: the state's last row is the normaliser, [B,S,d+1,m].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops.device import multiprocessors, obstacle, shared_bytes
from fastweights.rules.base import MIN_GATE_LOGIT
from fastweights.rules.normalizer import divide


class Rotary(NamedTuple):
    """Angles of this step, cos and sin [B,R] float32, and which of them each state's heads are turned by, [S,P]."""

    cos: Tensor
    sin: Tensor
    planes: Tensor


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels can be used here."""
    return obstacle(device, dtype) is None


def step(
    rule: str,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: Sequence[Tensor],
    normalize: bool = False,
) -> Tensor:
    """y after the state has taken in k and v; the state is changed in place."""
    if has_kernels(v.device, v.dtype):
        y = v.new_empty(v.shape[0], q.shape[1], v.shape[2])
        step_kernel(rule, state, q, k, v, gate_logits, y, normalize)
        return y
    return step_torch(rule, state, q, k, v, gate_logits, normalize)


def step_torch(
    rule: str,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: Sequence[Tensor],
    normalize: bool = False,
) -> Tensor:
    dtype, (batch, states, _, m) = v.dtype, state.shape
    if dtype != state.dtype or q.dtype != dtype:
        q, k, v, *gate_logits = (x.to(state.dtype) for x in (q, k, v, *gate_logits))
    values, total = (state[..., :-1, :], state[..., -1, :]) if normalize else (state, None)
    if rule == "decay":
        f, z = (logit.clamp(min=MIN_GATE_LOGIT).sigmoid_() for logit in gate_logits)
        values.mul_(f.unsqueeze(-2)).mul_(z.unsqueeze(-1))
    elif rule == "gated":
        logit = gate_logits[0].clamp(min=MIN_GATE_LOGIT).unsqueeze(-1)
        state.mul_(logit.sigmoid().unsqueeze(-1))
        k = k * (-logit).sigmoid()
    elif rule == "delta":
        if total is not None:
            total.add_(k)
        v = gate_logits[0].sigmoid().unsqueeze(-1) * (v - (values @ k.unsqueeze(-1)).squeeze(-1))
    values.addcmul_(v.unsqueeze(-1), k.unsqueeze(-2))
    if total is not None and rule != "delta":
        total.add_(k)
    y = torch.bmm(q.reshape(batch * states, -1, m), state.flatten(0, 1).mT).view(batch, q.shape[1], -1)
    return (divide(y[..., :-1], y[..., -1:]) if normalize else y).to(dtype)


def step_kernel(
    rule: str,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: Sequence[Tensor],
    y: Tensor,
    normalize: bool = False,
    rotary: Rotary | None = None,
    key_scale: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """The same into y, by one kernel, with queries and keys turned and keys scaled on the way."""
    from triton import cdiv, next_power_of_2

    from fastweights.ops.triton.decode_step import step_kernel as kernel

    q, k, v, *gate_logits = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v, *gate_logits))
    (batch, states, d), m = v.shape, k.shape[-1]
    crowded = batch * states * cdiv(d, 64) >= 2 * multiprocessors(v.device)
    block_m, block_d = next_power_of_2(m), min(next_power_of_2(d), 64 if crowded or normalize else 16)
    slices = cdiv(d, block_d)
    gate, gate2 = (*gate_logits, v, v)[:2]
    cos, sin, planes = rotary or (state, state, state)
    with torch.cuda.device_of(state):
        kernel[(batch * states, 1 if normalize else slices)](
            state,
            q,
            k,
            v,
            gate,
            gate2,
            cos,
            sin,
            planes,
            state if key_scale is None else key_scale,
            y,
            *(x.stride(0) for x in (q, k, v, gate, gate2, cos)),
            STATES=states,
            GROUP=q.shape[1] // states,
            D=d,
            M=m,
            PLANES=0 if rotary is None else planes.shape[1],
            RULE=rule,
            NORMALIZE=normalize,
            SCALED=key_scale is not None,
            BLOCK_D=block_d,
            BLOCK_M=block_m,
            SLICES=slices if normalize else 1,
            OVERLAP=overlap,
            num_warps=max(1, min(8, block_d * block_m // 512)),
            **launch_options(overlap),
        )


# Numbers of a window's keys that one program can hold beside as many values, and the bytes of shared memory that a
# number of both takes on its way to the tensor cores (float32's).
WINDOW_TILE, WINDOW_BYTES = 2**14, 9


def has_window_kernel(width: int, d: int, device: torch.device) -> bool:
    from triton import next_power_of_2

    tile = max(16, next_power_of_2(width)) * max(16, next_power_of_2(d))
    return tile <= WINDOW_TILE and WINDOW_BYTES * tile <= shared_bytes(device)


def window_kernel(
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rotary: Rotary | None = None,
    softcap: float | None = None,
    far: Tensor | None = None,
    share: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Attention to the last w tokens into y [B,H,d]; with `far` that much of it as `share` [H] says. The rings keys and
    values [B,S,w,d] take in k and v [B,S,d] at positions [B] modulo w; q [B,H,d]."""
    from triton import next_power_of_2

    from fastweights.ops.triton.decode_step import window_kernel as kernel

    q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
    (batch, states, width, d), group = keys.shape, q.shape[1] // keys.shape[1]
    cos, sin, planes = rotary or (y, y, y)
    block_d, block_w = (max(16, next_power_of_2(n)) for n in (d, width))
    with torch.cuda.device_of(y):
        kernel[(batch * states,)](
            keys,
            values,
            positions,
            q,
            k,
            v,
            cos,
            sin,
            planes,
            y if far is None else far.contiguous(),
            y if share is None else share,
            y,
            *(x.stride(0) for x in (q, k, v, cos)),
            STATES=states,
            GROUP=group,
            D=d,
            WIDTH=width,
            PLANES=0 if rotary is None else planes.shape[1],
            SOFTCAP=softcap or 0.0,
            MIXED=far is not None,
            OPERAND=operand(keys.dtype),
            PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
            BLOCK_G=max(16, next_power_of_2(group)),
            BLOCK_D=block_d,
            BLOCK_W=block_w,
            OVERLAP=overlap,
            num_warps=max(4, min(8, block_d * block_w // 2048)),
            **launch_options(overlap),
        )


def operand(dtype: torch.dtype) -> object:
    """What goes into the tensor cores. Not float16: a number that still waits for its norm may be too large for it."""
    import triton.language as tl

    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def launch_options(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}


def can_overlap(device: torch.device) -> bool:
    """Kernels that start before the one before them has ended are there from Hopper on."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    import triton.language as tl

    return hasattr(tl.extra.cuda, "gdc_wait") and hasattr(tl.extra.cuda, "gdc_launch_dependents")
