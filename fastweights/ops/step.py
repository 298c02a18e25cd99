"""One decoding step of a rule or of a window. State and ring buffers are updated in place.

Addresses are static and the host takes no part, so the kernels can be captured in CUDA graphs.

Shapes: state [B,S,d,m] float32, contiguous   q [B,G*S,m]   k [B,S,m]   v [B,S,d]   gate logits [B,S,m], [B,S,d], [B,S]
        -> y [B,G*S,d].   normalize=True: the state's last row is the normalizer, [B,S,d+1,m].
        abc, linformer: state [B,S,d+r+1,m]   q [B,G*S,r]   k [B,S,r]   control or weights [B,S,m]
S states (key-value heads), each read by G query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.ops.device import multiprocessors, shared_bytes, unsupported_reason
from fastweights.rules import DELTA_RULES, RULES
from fastweights.rules.abc import control_weight
from fastweights.rules.base import MIN_GATE, MIN_GATE_LOGIT
from fastweights.rules.normalizer import divide


class Rotary(NamedTuple):
    """RoPE angles of this step: cos and sin [B,R] float32; pairs [S,P]: for each state, which of the R it uses."""

    cos: Tensor
    sin: Tensor
    pairs: Tensor


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels can run on this device with this dtype."""
    return unsupported_reason(device, dtype) is None


def step(
    rule: str,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: Sequence[Tensor],
    normalize: bool = False,
) -> Tensor:
    """Update a state by one token, in place, and read it.

    Args:
        rule: "add", "gated", "delta", "decay", "gated_delta", "abc" or "linformer".
        state: [B,S,d,m] float32, contiguous; [B,S,d+1,m] with `normalize`, [B,S,d+r+1,m] for abc and linformer.
            Changed in place.
        q: queries [B,G*S,m].
        k: keys [B,S,m].
        v: values [B,S,d].
        gate_logits: the rule's gate logits: decay f [B,S,m] and z [B,S,d]; gated and delta g [B,S]; gated_delta f and
            g; add none; abc its control, linformer its weights [B,S,m].
        normalize: divide by the normalizer; only for add, gated and delta, which have one.

    Returns:
        y [B,G*S,d] in v's dtype, read from the state after the update.
    """
    if has_kernels(v.device, v.dtype) and not RULES[rule].slots:
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
    """`step` in plain torch, for devices without the kernels and for the rules with slots, which have none."""
    dtype, (batch, states, _, m) = v.dtype, state.shape
    if dtype != state.dtype or q.dtype != dtype:
        q, k, v, *gate_logits = (x.to(state.dtype) for x in (q, k, v, *gate_logits))
    if RULES[rule].slots:
        return _step_slots(rule, state, q, k, v, gate_logits[0]).to(dtype)
    values, total = (state[..., :-1, :], state[..., -1, :]) if normalize else (state, None)
    if rule == "decay":
        f, z = (logit.clamp(min=MIN_GATE_LOGIT).sigmoid_() for logit in gate_logits)
        values.mul_(f.unsqueeze(-2)).mul_(z.unsqueeze(-1))
    elif rule == "gated":
        logit = gate_logits[0].clamp(min=MIN_GATE_LOGIT).unsqueeze(-1)
        state.mul_(logit.sigmoid().unsqueeze(-1))
        k = k * (-logit).sigmoid()
    elif rule in DELTA_RULES:
        if total is not None:
            total.add_(k)
        if rule == "gated_delta":
            values.mul_(gate_logits[0].clamp(min=MIN_GATE_LOGIT).sigmoid_().unsqueeze(-2))
        # as a row times a matrix: several times faster on a CPU than the matrix times a column
        v = gate_logits[-1].sigmoid().unsqueeze(-1) * (v - (k.unsqueeze(-2) @ values.mT).squeeze(-2))
    values.addcmul_(v.unsqueeze(-1), k.unsqueeze(-2))
    if total is not None and rule != "delta":
        total.add_(k)
    y = torch.bmm(q.reshape(batch * states, -1, m), state.flatten(0, 1).mT).view(batch, q.shape[1], -1)
    return (divide(y[..., :-1], y[..., -1:]) if normalize else y).to(dtype)


def _step_slots(rule: str, state: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """One step of a rule with slots: keys and values are updated together. Returns y [B,G*S,d]."""
    slots, total, d = state[..., :-1, :], state[..., -1, :], v.shape[-1]
    if rule == "linformer":
        total.add_(1)
        share = gate
    else:
        weight, before = control_weight(gate), total.clone()
        total.add_(weight)
        share = weight / total
        slots.mul_((before / total).clamp_(min=MIN_GATE).unsqueeze(-2))
    slots.addcmul_(torch.cat([v, k], dim=-1).unsqueeze(-1), share.unsqueeze(-2))
    values, keys = slots[..., :d, :], slots[..., d:, :]
    weights = torch.matmul(q.unflatten(1, (k.shape[1], -1)), keys).softmax(-1)
    return torch.matmul(weights, values.mT).flatten(1, 2)


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
    unit: bool = False,
    overlap: bool = False,
) -> None:
    """`step` as one Triton kernel that writes into y.

    Args:
        rule, state, q, gate_logits, normalize: as in `step`.
        k, v: as in `step`, or of fewer heads K, each for S / K states.
        y: output [B,G*S,d].
        rotary: apply RoPE to queries and keys; with a row of pairs for each key. None: they are used as they are.
        key_scale: [S,m], multiplied into the keys after RoPE.
        unit: scale queries and keys to unit length (unit_normalize), before key_scale.
        overlap: start before the previous kernel has ended (see `can_overlap`).
    """
    from triton import cdiv, next_power_of_2

    from fastweights.ops.triton.decode_step import step_kernel as kernel

    q, k, v, *gate_logits = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v, *gate_logits))
    (batch, states), (keys, m), d = state.shape[:2], k.shape[1:], v.shape[2]
    fills_device = batch * states * cdiv(d, 64) >= 2 * multiprocessors(v.device)
    block_m, block_d = next_power_of_2(m), min(next_power_of_2(d), 64 if fills_device or normalize else 16)
    slices = cdiv(d, block_d)
    gate, gate2 = (*gate_logits, v, v)[:2]
    cos, sin, pairs = rotary or (state, state, state)
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
            pairs,
            state if key_scale is None else key_scale,
            y,
            *(x.stride(0) for x in (q, k, v, gate, gate2, cos)),
            STATES=states,
            GROUP=q.shape[1] // states,
            STATES_PER_KEY=states // keys,
            D=d,
            M=m,
            ROTARY_PAIRS=0 if rotary is None else pairs.shape[1],
            RULE=rule,
            NORMALIZE=normalize,
            HAS_KEY_SCALE=key_scale is not None,
            UNIT=unit,
            BLOCK_D=block_d,
            BLOCK_M=block_m,
            SLICES=slices if normalize else 1,
            OVERLAP=overlap,
            num_warps=max(1, min(8, block_d * block_m // 512)),
            **pdl_options(overlap),
        )


# The most elements of a window's keys that one program can hold together with as many values, and the bytes of shared
# memory that a key and a value element need together on their way to the tensor cores, in float32. The least tokens
# that tensor cores multiply.
WINDOW_TILE, WINDOW_BYTES, LEAST_TOKENS = 2**14, 9, 16
# One program walks over the ring buffers of a head. Longer ones, of full attention, are left to torch, which spreads
# them over the GPU.
WIDEST_RING = 2048


def window_tile(width: int, d: int, device: torch.device) -> int:
    """How many tokens of ring buffers of `width` tokens, with heads of d, one program holds at once on this device.
    0: not even the least that it could multiply."""
    from triton import next_power_of_2

    block_d = max(16, next_power_of_2(d))
    most = min(WINDOW_TILE, shared_bytes(device) // WINDOW_BYTES) // block_d
    if most < LEAST_TOKENS:
        return 0
    return min(max(LEAST_TOKENS, next_power_of_2(width)), 1 << (most.bit_length() - 1))


def has_window_kernel(width: int, d: int, device: torch.device) -> bool:
    """Whether the window's kernel should handle ring buffers of `width` tokens and heads of d on this device."""
    return width <= WIDEST_RING and window_tile(width, d, device) > 0


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
    rule_output: Tensor | None = None,
    mix_logit: Tensor | None = None,
    sinks: int = 0,
    overlap: bool = False,
) -> None:
    """Add a token to a window's ring buffers, in place, and attend to the last w tokens and to the first n.

    Args:
        keys, values: ring buffers [B,S,n+w,d]. The first n tokens stay at their places; a later token is written at
            n + (positions - n) modulo w.
        positions: [B], the number of tokens seen before this one.
        q: queries [B,H,d].
        k, v: the new token's key and value [B,S,d].
        y: output [B,H,d].
        rotary: apply RoPE to queries and keys. None: they are used as they are.
        softcap: cap of the attention logits. None: no cap.
        rule_output: the rule's output [B,H,d], to be mixed with the window's. None: y is the window's output alone.
        mix_logit: [H] or [B,H]; its sigmoid is the window's share in the mix.
        sinks: n.
        overlap: start before the previous kernel has ended (see `can_overlap`).
    """
    from triton import next_power_of_2

    from fastweights.ops.triton.decode_step import window_kernel as kernel

    q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
    (batch, states, width, d), group = keys.shape, q.shape[1] // keys.shape[1]
    cos, sin, pairs = rotary or (y, y, y)
    mix_logit = y if mix_logit is None else mix_logit
    block_d, block_w = max(16, next_power_of_2(d)), window_tile(width, d, y.device)
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
            pairs,
            y if rule_output is None else rule_output.contiguous(),
            mix_logit,
            y,
            *(x.stride(0) for x in (q, k, v, cos)),
            mix_logit.stride(0) if mix_logit.ndim == 2 else 0,
            STATES=states,
            GROUP=group,
            D=d,
            WIDTH=width,
            SINKS=sinks,
            ROTARY_PAIRS=0 if rotary is None else pairs.shape[1],
            SOFTCAP=softcap or 0.0,
            MIXED=rule_output is not None,
            OPERAND=operand_dtype(keys.dtype),
            PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
            BLOCK_G=max(16, next_power_of_2(group)),
            BLOCK_D=block_d,
            BLOCK_W=block_w,
            OVERLAP=overlap,
            num_warps=max(4, min(8, block_d * block_w // 2048)),
            num_stages=1,  # tiles that are loaded ahead would need shared memory beside the one that is in use
            **pdl_options(overlap),
        )


def operand_dtype(dtype: torch.dtype) -> object:
    """Triton dtype of matmul operands. float16 is multiplied as float32: values before their norm may overflow it."""
    import triton.language as tl

    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def pdl_options(overlap: bool) -> dict[str, bool]:
    """Launch options for programmatic dependent launch."""
    return {"launch_pdl": True} if overlap else {}


def can_overlap(device: torch.device) -> bool:
    """Whether the device supports programmatic dependent launch (Hopper and later) and Triton exposes it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    import triton.language as tl

    return hasattr(tl.extra.cuda, "gdc_wait") and hasattr(tl.extra.cuda, "gdc_launch_dependents")
