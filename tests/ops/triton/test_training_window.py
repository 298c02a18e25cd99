"""The window's kernels against a masked softmax in float64: outputs and all gradients, at odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.gpu_compilation import run_compiling
from helpers.relative_error import assert_close, op_flags
from helpers.tiny import pretrained, tokens
from torch import Tensor

import fastweights as fw
from fastweights import ops
from fastweights.modeling.window import whole_sequence_attention
from fastweights.ops import window as window_ops
from fastweights.ops.window import documents_of, window_attention, window_unsupported_reason

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = {"BLOCK_T": 16, "BLOCK_S": 16, "num_warps": 4, "num_stages": 1}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several, as long ones have of the usual size."""
    if DEVICE == "cpu":
        monkeypatch.setattr(window_ops, "_blocks", lambda width, itemsize: TILES)


def inputs_of(B: int, T: int, H: int, S: int, d: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(T)
    heads = {"q": H, "k": S, "v": S}
    return {name: torch.randn(B, T, n, d, generator=generator).to(dtype) for name, n in heads.items()}


def masked_softmax(
    x: dict[str, Tensor],
    window: int,
    sinks: int = 0,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """With a mask of T x T of the real tokens that a token sees: the last ones and the first ones of its document."""
    q, k, v = (x[name].double() for name in ("q", "k", "v"))
    k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], dim=2) for y in (k, v))
    real = torch.ones(q.shape[:2], dtype=torch.bool) if mask is None else mask
    document = torch.zeros(q.shape[:2]) if reset is None else reset.cumsum(1)
    behind = real.cumsum(1)[:, :, None] - real.cumsum(1)[:, None, :]
    same = (document[:, :, None] == document[:, None, :]) & real[:, :, None] & real[:, None, :]
    place = (same & (behind > 0)).sum(-1)
    visible = same & (behind >= 0) & ((behind < window) | (place < sinks)[:, None, :])
    logits = scale * torch.einsum("bthd,bshd->bhts", q, k)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    weights = logits.exp() * visible[:, None]
    return torch.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdim=True).clamp(min=1e-300), v)


def check(x: dict[str, Tensor], run: Any, tolerance: float, **settings: Any) -> None:
    """Compare y and the gradients of q, k and v."""
    expected_leaves = {name: y.double().requires_grad_() for name, y in x.items()}
    leaves = {name: y.to(DEVICE).requires_grad_() for name, y in x.items()}
    y, expected = run(**leaves), masked_softmax(expected_leaves, **settings)
    assert y.dtype == x["v"].dtype
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(x["v"].dtype)
    found = torch.autograd.grad(y, list(leaves.values()), weight.to(DEVICE))
    gradients = torch.autograd.grad(expected, list(expected_leaves.values()), weight.double())
    assert_close("y", y.cpu(), expected, tolerance)
    for name, one, other in zip(x, found, gradients, strict=True):
        assert_close(f"gradient of {name}", one.cpu(), other, tolerance, least=0.1)


# Tokens, heads, key-value heads, width, window, sinks, documents; softcap and scale where it has two more.
CASES = [
    (2, 2, 1, 4, 1, 0, False),
    (33, 2, 2, 8, 1, 3, True),
    (63, 4, 2, 5, 7, 0, True),
    (70, 3, 1, 20, 20, 4, True, 0.7, 0.3),
    (49, 2, 1, 33, 100, 0, True),
    (50, 2, 2, 16, 5, 40, True),
    (65, 2, 1, 7, 16, 17, False, 2.0, 1.0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_match_masked_softmax_in_float64(case: tuple[Any, ...], small_tiles: None) -> None:
    T, H, S, d, window, sinks, packed, softcap, scale = (*case, None, 1.0)[:9]
    x, reset = inputs_of(1, T, H, S, d), op_flags("reset", 1, T, seed=T)["reset"] if packed else None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = None if reset is None else documents_of(reset.to(DEVICE))
        return window_attention(q, k, v, window, sinks, documents, softcap, scale)

    check(x, run, 1e-5, window=window, sinks=sinks, reset=reset, softcap=softcap, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_match_masked_softmax_in_low_precision(dtype: torch.dtype) -> None:
    x, reset = inputs_of(1, 70, 3, 1, 40, dtype), op_flags("reset", 1, 70)["reset"]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(q, k, v, 20, 2, documents_of(reset.to(DEVICE)), None, 40**-0.5)

    check(x, run, 1e-2, window=20, sinks=2, reset=reset, scale=40**-0.5)


def test_documents_end_where_the_next_one_begins() -> None:
    reset = torch.tensor([[False, False, True, True, False], [True, False, False, False, False]])
    first, end = documents_of(reset)
    assert first.tolist() == [[0, 0, 2, 3, 3], [0, 0, 0, 0, 0]]
    assert end.tolist() == [[2, 2, 3, 5, 5], [5, 5, 5, 5, 5]]


@pytest.mark.parametrize("kind", ["mask", "mask+reset"])
def test_padding_is_not_seen_and_does_not_count(kind: str, small_tiles: None) -> None:
    """Padding anywhere: windows are as many real tokens wide, and y is 0 at padding."""
    x, flags = inputs_of(2, 50, 2, 1, 8), op_flags(kind, 2, 50, seed=3)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with ops.use_backend("triton"):
            moved = {name: flag.to(DEVICE) for name, flag in flags.items()}
            return whole_sequence_attention(q, k, v, 6, sinks=2, **moved)

    check(x, run, 1e-5, window=6, sinks=2, **flags)


@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_one_override_chooses_kernels_or_torch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kernels = [], window_ops._forward
    monkeypatch.setattr(window_ops, "_forward", lambda *args: calls.append(1) or kernels(*args))
    x = {name: y.to(DEVICE) for name, y in inputs_of(1, 9, 2, 1, 4).items()}
    with ops.use_backend(backend):
        y = whole_sequence_attention(**x, window=3, sinks=1)
    assert_close("y", y.cpu(), masked_softmax({name: z.cpu() for name, z in x.items()}, 3, 1), 1e-5)
    assert bool(calls) == (backend == "triton")


def test_kernels_say_what_they_do_not_support() -> None:
    x = torch.zeros(1, 1, 1, 8, device=DEVICE)
    assert window_unsupported_reason(x, x, x, interpreter=True) is None
    wide, double = torch.zeros(1, 1, 1, 257, device=DEVICE), x.double()
    assert "up to 256, found 257" in str(window_unsupported_reason(wide, wide, wide, interpreter=True))
    assert "float64" in str(window_unsupported_reason(double, double, double, interpreter=True))
    with ops.use_backend("triton"):
        assert not ops.runs_window_kernels(wide, wide, wide)
        assert whole_sequence_attention(double, double, double, 3).dtype == torch.float64


@pytest.mark.parametrize("settings", [dict(rule="local", window=3, sinks=1), dict(m=4, window=4, mix="token")], ids=str)
def test_converted_model_trains_with_kernels_as_without(settings: dict[str, Any]) -> None:
    """In float32 and under autocast, with documents that end inside rows, also recomputed in the backward pass."""
    model, ids = fw.convert(pretrained("gemma2"), fw.FastWeightsConfig(**settings)).to(DEVICE), tokens(2, 20).to(DEVICE)
    positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1).to(DEVICE)
    model.train()
    found = {}
    for backend in ("chunked", "triton"):
        model.zero_grad()
        with ops.use_backend(backend):
            loss = model(ids, labels=ids, position_ids=positions, use_cache=False).loss
            loss.backward()
        found[backend] = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found["triton"]) == len(found["chunked"]) > 10
    for one, other in zip(found["triton"], found["chunked"], strict=True):
        assert_close("gradient", one, other, 1e-4, least=1e-4)


def test_autocast_computes_in_its_dtype() -> None:
    x = {name: y.to(DEVICE) for name, y in inputs_of(1, 9, 2, 1, 4).items()}
    with torch.autocast(DEVICE, torch.bfloat16), ops.use_backend("triton"):
        assert whole_sequence_attention(**x, window=3).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_calls_the_kernels_as_an_operator(small_tiles: None) -> None:
    x, reset = inputs_of(1, 20, 2, 1, 8), op_flags("reset", 1, 20)["reset"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor, reset: Tensor) -> Tensor:
        return window_attention(q, k, v, 5, 2, documents_of(reset))

    check(x, lambda q, k, v: compiled(q, k, v, reset.to(DEVICE)), 1e-5, window=5, sinks=2, reset=reset)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [40, 64, 128, 256])
@pytest.mark.parametrize(("window", "sinks"), [(64, 4), (1, 0), (124, 4), (2000, 0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)], ids=str)
def test_kernels_on_a_gpu(d: int, window: int, sinks: int, dtype: torch.dtype, tolerance: float) -> None:
    """At tiles of the usual size, and with the same gradients twice."""
    x, reset = inputs_of(2, 1000, 6, 2, d, dtype), torch.zeros(2, 1000, dtype=torch.bool)
    reset[0, [1, 2, 300, 999]] = reset[1, 64] = True

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return window_attention(q, k, v, window, sinks, documents_of(reset.to(DEVICE)), None, d**-0.5)

    check(x, run, tolerance, window=window, sinks=sinks, reset=reset, scale=d**-0.5)
    leaves = [y.to(DEVICE).requires_grad_() for y in x.values()]
    first, second = (torch.autograd.grad(run(*leaves).float().square().sum(), leaves) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.gpu
def test_window_op_passes_torchs_checks_of_an_operator() -> None:
    x = [y.to(DEVICE).requires_grad_() for y in inputs_of(1, 40, 2, 1, 16).values()]
    torch.library.opcheck(window_ops.window_op, (*x, None, None, 8, 2, 0.0, 0.25))


def test_training_kernels_compile_without_a_gpu_and_spill_little() -> None:
    """Of the widths that most models have, in bfloat16; the script compiles all."""
    printed = run_compiling("compile_training_window", "64", "bfloat16")
    assert printed.count("bytes spilled") == 3
