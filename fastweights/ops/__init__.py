"""The update rules as operations on whole sequences: one function per rule, with a choice of backends.

Shapes: q [B,T,G*H,m]   k [B,T,H,m]   v [B,T,H,d]   f_logit [B,T,H,m]   z_logit [B,T,H,d]   g_logit [B,T,H]
        state [B,H,d,m], float32 (float64 for float64 inputs)   mask, reset [B,T] bool   ->   y [B,T,G*H,d], state
        abc, linformer: q [B,T,G*H,r]   k [B,T,H,r]   s_logit, weight [B,T,H,m]   state [B,H,d+r+1,m]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.ops.chunked import chunked
from fastweights.ops.device import unsupported_reason
from fastweights.ops.slots import run_slots
from fastweights.ops.window import window_unsupported_reason
from fastweights.rules import RULES, loop
from fastweights.rules.normalizer import divide, join_state, split_state, with_ones
from fastweights.utils.errors import Argument, FastWeightsError

__all__ = ["BACKENDS", "abc", "add", "apply", "decay", "delta", "gated", "gated_delta", "linformer", "use_backend"]


def _triton(*args: Any, float32_output: bool = False) -> tuple[Tensor, Tensor]:
    """Import the kernels when they are first used: Triton is optional and slow to import."""
    from fastweights.ops.triton import run_kernels

    return run_kernels(*args, float32_output=float32_output)


BACKENDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"loop": loop, "chunked": chunked, "triton": _triton}
WIDEST_M = 128
_override: list[str] = []


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every operation inside the block with this backend, whatever its `backend` argument says.

    Raises:
        FastWeightsError: if there is no such backend.
    """
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
    """The add rule, S += v k^T, y = S q: the state never forgets.

    Args:
        q: queries [B,T,G*H,m]; G query heads read each state.
        k: keys [B,T,H,m].
        v: values [B,T,H,d].
        state: initial state [B,H,d,m]. None: zeros.
        normalize: divide y by the normalizer, which is then the last row of the state, [B,H,d+1,m].
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at the first token of a document: it starts from a zero state. None: no boundaries.
        backend: "loop", "chunked", "triton", or "auto" for the fastest that supports the inputs.

    Returns:
        y [B,T,G*H,d] in v's dtype, and the state after the last token, in float32 (float64 for float64 inputs).

    Raises:
        FastWeightsError: if a shape, dtype or device does not fit, or the backend cannot run. It names the argument.
    """
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
    """The gated rule, S = g S + (1 - g) v k^T, y = S q: one forget gate per head.

    Args:
        q: queries [B,T,G*H,m]; G query heads read each state.
        k: keys [B,T,H,m].
        v: values [B,T,H,d].
        g_logit: logits [B,T,H] of the gate g: the state is multiplied by g and the new term by 1 - g.
        state: initial state [B,H,d,m]. None: zeros.
        normalize: divide y by the normalizer, which is then the last row of the state, [B,H,d+1,m].
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at the first token of a document: it starts from a zero state. None: no boundaries.
        backend: "loop", "chunked", "triton", or "auto" for the fastest that supports the inputs.

    Returns:
        y [B,T,G*H,d] in v's dtype, and the state after the last token, in float32 (float64 for float64 inputs).

    Raises:
        FastWeightsError: if a shape, dtype or device does not fit, or the backend cannot run. It names the argument.
    """
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
    """The delta rule, S += g (v - S k) k^T, y = S q: writes the difference from what the state holds under the key.

    Keys should be normalized, for example by sum normalization: with long keys the state grows without bound.

    Args:
        q: queries [B,T,G*H,m]; G query heads read each state.
        k: keys [B,T,H,m].
        v: values [B,T,H,d].
        g_logit: logits [B,T,H] of the gate g, the step size.
        state: initial state [B,H,d,m]. None: zeros.
        normalize: divide y by the normalizer, which is then the last row of the state, [B,H,d+1,m].
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at the first token of a document: it starts from a zero state. None: no boundaries.
        backend: "loop", "chunked", "triton", or "auto" for the fastest that supports the inputs.

    Returns:
        y [B,T,G*H,d] in v's dtype, and the state after the last token, in float32 (float64 for float64 inputs).

    Raises:
        FastWeightsError: if a shape, dtype or device does not fit, or the backend cannot run. It names the argument.
    """
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
    """The decay rule, S = (z f^T) * S + v k^T, y = S q: forget gates along keys and values.

    Args:
        q: queries [B,T,G*H,m]; G query heads read each state.
        k: keys [B,T,H,m].
        v: values [B,T,H,d].
        f_logit: logits [B,T,H,m] of the gate f along the keys.
        z_logit: logits [B,T,H,d] of the gate z along the values.
        state: initial state [B,H,d,m]. None: zeros.
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at the first token of a document: it starts from a zero state. None: no boundaries.
        backend: "loop", "chunked", "triton", or "auto" for the fastest that supports the inputs.

    Returns:
        y [B,T,G*H,d] in v's dtype, and the state after the last token, in float32 (float64 for float64 inputs).

    Raises:
        FastWeightsError: if a shape, dtype or device does not fit, or the backend cannot run. It names the argument.
    """
    return apply("decay", q, k, v, (f_logit, z_logit), state, False, mask, reset, backend)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f_logit: Tensor,
    g_logit: Tensor,
    state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: S = S diag(f), then S += g (v - S k) k^T, y = S q.

    The state forgets along the keys, then writes the difference from what it still holds under the key. Queries and
    keys are used as they are. Keys should have unit length: with long keys the state grows without bound.

    Args:
        q: queries [B,T,G*H,m]; G query heads read each state.
        k: keys [B,T,H,m].
        v: values [B,T,H,d].
        f_logit: logits [B,T,H,m] of the gate f along the keys.
        g_logit: logits [B,T,H] of the gate g, the step size.
        state: initial state [B,H,d,m]. None: zeros.
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at the first token of a document: it starts from a zero state. None: no boundaries.
        backend: "loop", "chunked", "triton", or "auto" for the fastest that supports the inputs.

    Returns:
        y [B,T,G*H,d] in v's dtype, and the state after the last token, in float32 (float64 for float64 inputs).

    Raises:
        FastWeightsError: if a shape, dtype or device does not fit, or the backend cannot run. It names the argument.
    """
    return apply("gated_delta", q, k, v, (f_logit, g_logit), state, False, mask, reset, backend)


def abc(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_logit: Tensor,
    state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention with bounded memory: m slots average keys K and values V with weights exp(s), y = V softmax(K^T q).

    The rows of the state are the d elements of the slots' values, the r elements of their keys, and the sum of the
    weights so far. A state of zeros is an empty memory.

    Args:
        q: queries [B,T,G*H,r], with the scale of the attention logits; G query heads read each state.
        k: keys [B,T,H,r].
        v: values [B,T,H,d].
        s_logit: the control [B,T,H,m]: logits of the token's weight in each slot. They are limited to +-60.
        state: initial state [B,H,d+r+1,m]. None: zeros.
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at the first token of a document: it starts from a zero state. None: no boundaries.
        backend: "loop", "chunked", "triton", or "auto" for the fastest that supports the inputs.

    Returns:
        y [B,T,G*H,d] in v's dtype, and the state after the last token, in float32 (float64 for float64 inputs).

    Raises:
        FastWeightsError: if a shape, dtype or device does not fit, or the backend cannot run. It names the argument.
    """
    return apply("abc", q, k, v, (s_logit,), state, False, mask, reset, backend)


def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal Linformer: m slots add up weighted keys K and values V, y = V softmax(K^T q).

    The rows of the state are the d elements of the slots' values, the r elements of their keys, and the number of
    tokens so far, from which a caller who looks up weights by position finds the positions. A state of zeros is an
    empty memory.

    Args:
        q: queries [B,T,G*H,r], with the scale of the attention logits; G query heads read each state.
        k: keys [B,T,H,r].
        v: values [B,T,H,d].
        weight: weight [B,T,H,m] of the token in each slot, of either sign.
        state: initial state [B,H,d+r+1,m]. None: zeros.
        mask: [B,T] bool, False at padding: the state is unchanged there and y is 0. None: no padding.
        reset: [B,T] bool, True at the first token of a document: it starts from a zero state. None: no boundaries.
        backend: "loop", "chunked", "triton", or "auto" for the fastest that supports the inputs.

    Returns:
        y [B,T,G*H,d] in v's dtype, and the state after the last token, in float32 (float64 for float64 inputs).

    Raises:
        FastWeightsError: if a shape, dtype or device does not fit, or the backend cannot run. It names the argument.
    """
    return apply("linformer", q, k, v, (weight,), state, False, mask, reset, backend)


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
    """Run the rule called `name` ("add", "gated", "delta", "decay", "gated_delta", "abc" or "linformer").

    `gate_logits` are the logits of the gates, or the weights of linformer, in the order of the rule's own function. The
    other arguments, the results and the errors are those of that function.
    """
    _check(name, q, k, v, gate_logits, state, normalize, mask, reset)
    slots = RULES[name].slots
    widest = max(k.shape[-1], gate_logits[0].shape[-1]) if slots else k.shape[-1]
    backend = _choose(_override[-1] if _override else backend, q, k, v, widest)
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    inputs, run = [q, k, v, *gate_logits], BACKENDS[backend]
    if slots and backend != "loop":
        run = functools.partial(run_slots, run)
    # The kernels read inputs of any dtype and convert inside. Shares of a slot are too small for that.
    if slots or backend != "triton":
        inputs = [x.to(dtype) for x in inputs]
    elif normalize:  # so that y is not rounded before the division
        run = functools.partial(run, float32_output=True)
    state = None if state is None else state.to(dtype)
    with torch.autocast(v.device.type, enabled=False):
        y, state = _run(name, run, normalize, inputs, state, mask, reset)
    return y.to(v.dtype), state


def _run(name, run, normalize, inputs, state, mask, reset) -> tuple[Tensor, Tensor]:
    """Run a rule with or without its normalizer; delta's is a second run, of the add rule with values of 1."""
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


def _choose(backend: str, q: Tensor, k: Tensor, v: Tensor, m: int) -> str:
    """The backend to run; "auto" is the fastest that can run on these tensors, with states of up to m columns."""
    _check_backend(backend)
    if backend not in ("auto", "triton"):
        return backend
    reason = _kernels_unsupported_reason(q, k, v, m)
    if reason is None and (v.device.type == "cuda" or backend == "triton"):
        return "triton"
    if backend == "triton":
        raise FastWeightsError(Argument("backend"), f"='triton' cannot run here: {reason}; use 'auto' or 'chunked'")
    return "loop" if q.shape[1] == 1 else "chunked"


def runs_window_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether attention to a window of these tensors runs with the kernels (ops.window) rather than in torch.

    `use_backend` decides here, too: "triton" chooses them wherever they can run, also in Triton's interpreter.
    """
    chosen = _override[-1] if _override else "auto"
    return chosen in ("auto", "triton") and window_unsupported_reason(q, k, v, chosen == "triton") is None


def runs_head_loss_kernel(logits: Tensor) -> bool:
    """Whether losses on these logits run with the kernel (ops.head_loss); `use_backend` decides as for the window."""
    chosen = _override[-1] if _override else "auto"
    reason = unsupported_reason(logits.device, logits.dtype, interpreter=chosen == "triton")
    return chosen in ("auto", "triton") and reason is None


def _check_backend(backend: str) -> None:
    if backend != "auto" and backend not in BACKENDS:
        raise FastWeightsError(
            Argument("backend"), f"={backend!r} is not known; choose one of auto, {', '.join(BACKENDS)}"
        )


def _kernels_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, m: int) -> str | None:
    """Why the Triton kernels cannot run on these tensors with states of up to m columns; None if they can."""
    if m > WIDEST_M:
        return f"it has states of m up to {WIDEST_M}, found {m}"
    if not (k.numel() and v.numel()):
        return f"there is nothing to compute, found k {list(k.shape)} and v {list(v.shape)}"
    return unsupported_reason(v.device, q.dtype, k.dtype, v.dtype, interpreter=True)


def _check(name, q, k, v, gate_logits, state, normalize, mask, reset) -> None:
    """Check shapes, dtypes and devices of the arguments of `apply`."""
    if name not in RULES:
        raise FastWeightsError(f"rule {name!r} is not known; choose one of {', '.join(RULES)}")
    if normalize and not RULES[name].has_normalizer:
        raise FastWeightsError(f"the {name} rule has no normalizer: ", Argument("normalize"), " must be False")
    if q.ndim != 4 or 0 in q.shape[1:]:
        raise FastWeightsError(Argument("q"), f" must be [B,T,H,m] with T, H and m at least 1, found {list(q.shape)}")
    for argument, tensor in (("q", q), ("k", k), ("v", v)):
        if not tensor.is_floating_point():
            raise FastWeightsError(f"{name}: ", Argument(argument), f" must be floating-point, found {tensor.dtype}")
    if k.ndim != 4 or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise FastWeightsError(
            Argument("k"),
            f" must be [B,T,H,m] with q's heads a multiple of H, found k {list(k.shape)}, q {list(q.shape)}",
        )
    if v.ndim != 4:
        raise FastWeightsError(Argument("v"), f" must be [B,T,H,d], found {list(v.shape)}")
    (batch, length, heads, m), d = k.shape, v.shape[-1]
    expected: dict[str, tuple] = {"q": (q, (batch, length, q.shape[2], m)), "v": (v, (batch, length, heads, d))}
    rule, rows = RULES[name], RULES[name].state_rows(d, m)
    gates = rule.arguments
    if len(gate_logits) != len(gates):
        raise FastWeightsError(
            f"{name} takes {len(gates)} gate logits ({', '.join(rule.gates) or 'none'}), found {len(gate_logits)}"
        )
    if rule.slots:  # m counts the slots, which are as many as the gate has elements
        m = 1 if gate_logits[0] is None or gate_logits[0].ndim != 4 else max(1, gate_logits[0].shape[-1])
    widths = {"m": (m,), "d": (d,), "1": ()}
    for (gate, width), logit in zip(gates.items(), gate_logits, strict=True):
        if logit is None:
            raise FastWeightsError(
                f"{name}: ", Argument(gate), f" must be {[batch, length, heads, *widths[width]]}, found None"
            )
        expected[gate] = (logit, (batch, length, heads, *widths[width]))
    expected["state"] = (state, (batch, heads, rows + int(normalize), m))
    expected |= {"mask": (mask, (batch, length)), "reset": (reset, (batch, length))}
    for argument, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise FastWeightsError(
                f"{name}: ", Argument(argument), f" must be {list(shape)}, found {list(tensor.shape)}"
            )
        if tensor is not None and tensor.device != k.device:
            raise FastWeightsError(
                f"{name}: ", Argument(argument), f" is on {tensor.device} and k on {k.device}: move them to one device"
            )
    for argument, tensor in (("mask", mask), ("reset", reset)):
        if tensor is not None and tensor.dtype != torch.bool:
            raise FastWeightsError(f"{name}: ", Argument(argument), f" must be a bool tensor, found {tensor.dtype}")
