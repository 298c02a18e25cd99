"""Other libraries that are measured in the same run: attention in torch, flash-linear-attention (0.6.0, optional), and
Hugging Face's generate with a static cache. For one that fails, the reason is recorded. One whose output differs is not
timed.

Shapes: fla takes q, k [B,T,H,m], v [B,T,H,d] and logarithms of gates in float32; attention q, k, v [B,H,T,d].
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from measure import (
    Settings,
    first_line,
    freed,
    graph_ms,
    guarded,
    median_ms,
    milliseconds,
    peak_extra_mib,
    relative_error,
    stamp,
    synchronize,
)
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, StaticCache

from fastweights import ops

if TYPE_CHECKING:
    from gpu_ops import Shape

# A peer is not held to our precision, but must be the operation it is called.
LIMIT = 2e-2
CHECKED_QUERIES = 128
GATE_BIAS = 2.0
OPEN = 40.0
# What torch chooses by itself (on Hopper: cuDNN), and FlashAttention 2.
CHOSEN, FLASH = "torch SDPA", "torch SDPA (flash)"
TORCH = [(CHOSEN, None), (FLASH, None)]
KDA = ("fla chunk_kda", 64)
# The most important first: time may run out before the last.
FLA = [
    ("fla fused_recurrent_gla(gk, gv)", 32),
    ("fla chunk_gla (key gate only)", 32),
    ("fla fused_recurrent_gla(gk, gv)", 64),
    ("fla fused_recurrent_gla(gk, gv)", 16),
    ("fla chunk_gla (key gate only)", 64),
]
# What a peer should have left for itself, most of it to compile.
PEER_SECONDS = 30
# Compiled and recorded by then.
SKIPPED_TOKENS = 8
TIMED_TOKENS = 24
SHORT_PROMPT = 128


def operations(
    peers: Sequence[tuple[str, int | None]], shapes: Sequence[Shape], settings: Settings
) -> Iterator[dict[str, Any]]:
    """One row a peer and shape: forward, forward + backward and memory, or why there are none."""
    for name, m in peers:
        for shape in shapes:
            row: dict[str, Any] = {"peer": name, "m": m, "shape": str(shape)}
            if settings.time_left() < PEER_SECONDS:
                yield row | {"error": "left out: the time for this part was up"}
                continue
            chosen = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == FLASH else nullcontext()
            with freed(settings.device), chosen:
                try:
                    yield row | _measure(name, m, shape, settings)
                except Exception as error:
                    yield row | {"error": first_line(error)}


def _measure(name: str, m: int | None, shape: Shape, settings: Settings) -> dict[str, Any]:
    started = time.monotonic()
    make = _attention if m is None else _kda(m) if name == KDA[0] else _gla(name, m)
    tensors, run, truth = make(shape, settings.device)
    upstream = torch.randn_like(run(*tensors))

    def forward_backward() -> Any:
        return torch.autograd.grad(run(*tensors), tensors, upstream)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*tensors)

    forward_backward()
    synchronize(settings.device)
    found: dict[str, Any] = {
        "first seconds": time.monotonic() - started,
        "error of y": truth(forward()),
    }
    if found["error of y"] > LIMIT:
        return found
    found |= {
        "forward ms": median_ms(forward, settings.device),
        "forward+backward ms": median_ms(forward_backward, settings.device),
        "peak extra MiB": peak_extra_mib(forward_backward, settings.device),
    }
    if settings.on_gpu:
        found["graph forward ms"] = guarded(lambda: graph_ms(forward))
        found["graph forward+backward ms"] = guarded(lambda: graph_ms(forward_backward))
    return found


Made = tuple[list[Tensor], Callable[..., Tensor], Callable[[Tensor], float]]


def _attention(shape: Shape, device: str) -> Made:
    def draw() -> Tensor:
        return torch.randn(shape.B, shape.H, shape.T, shape.d, device=device, dtype=torch.bfloat16).requires_grad_()

    def truth(y: Tensor) -> float:
        """The last queries of one head, in float64."""
        queries, (one_q, one_k, one_v) = min(CHECKED_QUERIES, shape.T), (x[0, 0].detach().double() for x in tensors)
        scores = one_q[-queries:] @ one_k.T * shape.d**-0.5
        seen = torch.ones_like(scores, dtype=torch.bool).tril(shape.T - queries)
        return relative_error(y[0, 0, -queries:], scores.masked_fill(~seen, -torch.inf).softmax(-1) @ one_v)

    tensors = [draw(), draw(), draw()]
    return tensors, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), truth


def _gla(name: str, m: int) -> Callable[[Shape, str], Made]:
    from fla.ops.gla import chunk_gla, fused_recurrent_gla

    both = "gv" in name

    def make(shape: Shape, device: str) -> Made:
        def draw(width: int) -> Tensor:
            return torch.randn(shape.B, shape.T, shape.H, width, device=device)

        q, k, v, f, z = (draw(width) for width in (m, m, shape.d, m, shape.d))
        inputs = [x.bfloat16() for x in (q, k, v)]
        logits = [x + GATE_BIAS for x in ((f, z) if both else (f,))]
        tensors = [x.requires_grad_() for x in (*inputs, *(F.logsigmoid(x) for x in logits))]

        def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
            return (fused_recurrent_gla if both else chunk_gla)(q, k, v, *gates, scale=1.0)[0]

        def truth(y: Tensor) -> float:
            """One head, in float64: the decay rule, its value gate open where there is none."""
            gates = logits if both else [*logits, torch.full_like(v, OPEN)]
            one = [x[:1, :, :1].detach().double() for x in (*inputs, *gates)]
            return relative_error(y[:1, :, :1], ops.decay(*one, backend="chunked")[0])

        return tensors, run, truth

    return make


def _kda(m: int) -> Callable[[Shape, str], Made]:
    from fla.ops.kda import chunk_kda

    def make(shape: Shape, device: str) -> Made:
        def draw(*width: int) -> Tensor:
            return torch.randn(shape.B, shape.T, shape.H, *width, device=device)

        q, v = draw(m).bfloat16(), draw(shape.d).bfloat16()
        k = F.normalize(draw(m), dim=-1).bfloat16()
        f, g = draw(m) + GATE_BIAS, draw() + GATE_BIAS
        tensors = [x.requires_grad_() for x in (q, k, v, F.logsigmoid(f), g.sigmoid())]

        def run(q: Tensor, k: Tensor, v: Tensor, f: Tensor, g: Tensor) -> Tensor:
            return chunk_kda(q, k, v, f, g, scale=1.0)[0]

        def truth(y: Tensor) -> float:
            """One head, in float64."""
            one = [x[:1, :, :1].detach().double() for x in (q, k, v, f, g)]
            return relative_error(y[:1, :, :1], ops.gated_delta(*one, backend="chunked")[0])

        return tensors, run, truth

    return make


class _Stamps(LogitsProcessor):
    """A stamp on the device's clock at every token of generate; changes nothing and waits for nothing."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.stamps: list[Any] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.stamps.append(stamp(self.device))
        return scores


def attention_step(config: Any, batch: int, context: int, settings: Settings) -> dict[str, Any]:
    """Milliseconds of one token of generate with a static cache, whose steps it compiles on a GPU by itself.
    A prompt too large for the memory is cut short in a cache of the same size: a step attends to all of it."""
    prompts = [context, SHORT_PROMPT] if context > SHORT_PROMPT else [context]
    for number, prompt in enumerate(prompts):
        try:
            return _generate(config, batch, prompt, context, settings)
        except torch.OutOfMemoryError:
            if number == len(prompts) - 1:
                raise
            torch.cuda.empty_cache()
    raise AssertionError("unreachable")


def _generate(config: Any, batch: int, prompt: int, context: int, settings: Settings) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    started = time.monotonic()
    # A new model: generate would take up the compiled step of the last one.
    with torch.device(settings.device):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    tokens = SKIPPED_TOKENS + TIMED_TOKENS
    model.generation_config.eos_token_id = None
    ids = torch.randint(config.vocab_size, (batch, prompt), device=settings.device)
    stamps = _Stamps(settings.device)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        past_key_values=StaticCache(config=config, max_cache_len=context + tokens),
        logits_processor=LogitsProcessorList([stamps]),
    )
    synchronize(settings.device)
    last = stamps.stamps[-TIMED_TOKENS - 1 :]
    steps = [milliseconds(a, b) for a, b in pairwise(last)]
    return {"ms": statistics.median(steps), "prompt": prompt, "all seconds": time.monotonic() - started}
