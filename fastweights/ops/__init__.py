"""The rules as fast operations on whole sequences: one function a rule, one dispatch table.

Shapes: q [B,T,G*H,m]   k [B,T,H,m]   v [B,T,H,d]   f_logit [B,T,H,m]   z_logit [B,T,H,d]   g_logit [B,T,H]
        state [B,H,d,m], float32 (float64 for float64 inputs)   mask, reset [B,T] bool   ->   y [B,T,G*H,d], state
mask: False marks padding (the state is left alone, y is 0). reset: True marks the first token of a document.
normalize=True divides by the rule's normaliser, which is then the last row of the state: [B,H,d+1,m].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.chunked import chunked
from fastweights.ops.device import obstacle
from fastweights.rules import RULES, loop
from fastweights.rules.normalizer import divide, join_state, split_state, with_ones

__all__ = ["BACKENDS", "add", "apply", "decay", "delta", "gated", "use_backend"]


def _triton(*args: Any, wide: bool = False) -> tuple[Tensor, Tensor]:
    # imported when first used: Triton is an extra, and takes a while
    from fastweights.ops.triton import kernels

    return kernels(*args, wide=wide)


BACKENDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"loop": loop, "chunked": chunked, "triton": _triton}
WIDEST_M = 128
_override: list[str] = []


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every operation inside the block with this backend, whatever it was called with."""
    _check_backend(name)
    _override.append(name)
    try:
        yield
    finally:
        _override.pop()


def add(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    normalize: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S += v k^T, y = S q."""
    return apply("add", q, k, v, (), state, normalize, mask, reset, backend)


def gated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_logit: Tensor,
    state: Tensor | None = None,
    *,
    normalize: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S = g S + (1 - g) v k^T, y = S q."""
    return apply("gated", q, k, v, (g_logit,), state, normalize, mask, reset, backend)


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_logit: Tensor,
    state: Tensor | None = None,
    *,
    normalize: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S += g (v - S k) k^T, y = S q. Keys should be normalised: see rules/README.md."""
    return apply("delta", q, k, v, (g_logit,), state, normalize, mask, reset, backend)


def decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f_logit: Tensor,
    z_logit: Tensor,
    state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """S = (z f^T) * S + v k^T, y = S q."""
    return apply("decay", q, k, v, (f_logit, z_logit), state, False, mask, reset, backend)


def apply(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_logits: tuple[Tensor, ...],
    state: Tensor | None = None,
    normalize: bool = False,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run the rule called `name`; y comes back in v's dtype, the state in float32 or float64."""
    _check(name, q, k, v, gate_logits, state, normalize, mask, reset)
    backend = _choose(_override[-1] if _override else backend, q, k, v)
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    inputs, run = [q, k, v, *gate_logits], BACKENDS[backend]
    if backend != "triton":  # the kernels read what they get and round inside
        inputs = [x.to(dtype) for x in inputs]
    elif normalize:  # what is divided is not rounded before
        run = functools.partial(run, wide=True)
    state = None if state is None else state.to(dtype)
    with torch.autocast(v.device.type, enabled=False):
        y, state = _run(name, run, normalize, inputs, state, mask, reset)
    return y.to(v.dtype), state


def _run(name, run, normalize, inputs, state, mask, reset) -> tuple[Tensor, Tensor]:
    rule, (q, k, v, *gates) = RULES[name], inputs
    if not normalize:
        return run(rule, q, k, v, tuple(gates), state, mask, reset)
    if name != "delta":
        y, state = run(rule, q, k, with_ones(v), tuple(gates), state, mask, reset)
        y = y.to(state.dtype)
        return divide(y[..., :-1], y[..., -1:]), state
    values, total = split_state(state)
    y, values = run(rule, q, k, v, tuple(gates), values, mask, reset)
    divisor, total = run(RULES["add"], q, k, torch.ones_like(v[..., :1]), (), total, mask, reset)
    return divide(y.to(values.dtype), divisor.to(values.dtype)), join_state(values, total)


def _choose(backend: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The backend to run; `auto` is the fastest that can run here."""
    _check_backend(backend)
    if backend not in ("auto", "triton"):
        return backend
    obstacle = _obstacle(q, k, v)
    if obstacle is None and (v.device.type == "cuda" or backend == "triton"):
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='auto' or 'chunked'")
    return "loop" if q.shape[1] == 1 else "chunked"


def _check_backend(backend: str) -> None:
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; choose one of auto, {', '.join(BACKENDS)}")


def _obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the Triton kernels cannot run on these tensors."""
    if k.shape[-1] > WIDEST_M:
        return f"it has states of m up to {WIDEST_M}, found {k.shape[-1]}"
    if not (k.numel() and v.numel()):
        return f"there is nothing to compute, found k {list(k.shape)} and v {list(v.shape)}"
    return obstacle(v.device, q.dtype, k.dtype, v.dtype, interpreter=True)


def _check(name, q, k, v, gate_logits, state, normalize, mask, reset) -> None:
    if name not in RULES:
        raise ValueError(f"rule {name!r} is not known; choose one of {', '.join(RULES)}")
    if normalize and name == "decay":
        raise ValueError("the decay rule has no normaliser")
    if q.ndim != 4 or 0 in q.shape[1:]:
        raise ValueError(f"q must be [B,T,H,m] with T, H and m at least 1, found {list(q.shape)}")
    for argument, tensor in (("q", q), ("k", k), ("v", v)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: {argument} must be floating-point, found {tensor.dtype}")
    if k.ndim != 4 or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k must be [B,T,H,m] with q's heads a multiple of H, found k {list(k.shape)}, q {list(q.shape)}"
        )
    if v.ndim != 4:
        raise ValueError(f"v must be [B,T,H,d], found {list(v.shape)}")
    (batch, length, heads, m), d = k.shape, v.shape[-1]
    widths = {"m": (m,), "d": (d,), "1": ()}
    expected: dict[str, tuple] = {"q": (q, (batch, length, q.shape[2], m)), "v": (v, (batch, length, heads, d))}
    gates = RULES[name].gates
    if len(gate_logits) != len(gates):
        raise ValueError(
            f"{name} takes {len(gates)} gate logits ({', '.join(gates) or 'none'}), found {len(gate_logits)}"
        )
    for (gate, width), logit in zip(gates.items(), gate_logits, strict=True):
        if logit is None:
            raise ValueError(f"{name}: {gate}_logit must be {[batch, length, heads, *widths[width]]}, found None")
        expected[f"{gate}_logit"] = (logit, (batch, length, heads, *widths[width]))
    expected["state"] = (state, (batch, heads, d + int(normalize), m))
    expected |= {"mask": (mask, (batch, length)), "reset": (reset, (batch, length))}
    for argument, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: {argument} must be {list(shape)}, found {list(tensor.shape)}")
        if tensor is not None and tensor.device != k.device:
            raise ValueError(f"{name}: {argument} is on {tensor.device} and k on {k.device}: move them to one device")
    for argument, tensor in (("mask", mask), ("reset", reset)):
        if tensor is not None and tensor.dtype != torch.bool:
            raise ValueError(f"{name}: {argument} must be a bool tensor, found {tensor.dtype}")
