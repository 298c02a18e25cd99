"""The Triton kernels against the float64 loop: outputs, end state and every gradient, at odd sizes, with every output
poisoned first. Without a GPU they run under Triton's interpreter; the same tests run on a GPU, and larger ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.gpu_compilation import run_compiling
from helpers.relative_error import (
    MATRIX_CASES,
    assert_all_close,
    case_name,
    op_flags,
    op_inputs,
    run_op,
    run_with_gradients,
)

from fastweights import ops
from fastweights.ops import device
from fastweights.rules import DELTA_RULES, MATRIX_RULES

pytest.importorskip("triton")
from fastweights.ops.triton import _plan, launch, rule_op, tiled, wy
from fastweights.ops.triton.primitives import SIZES as CHANGING_SIZES

# the interpreter computes masked pairs too, whose running products may overflow
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# relative to the float64 loop
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
# T, m, d: single ones, a tile's edges, padded widths, several slices of d
SIZES = [(1, 1, 1), (15, 3, 2), (16, 16, 16), (17, 5, 7), (33, 33, 9), (20, 2, 70), (18, 128, 20)]
every_case = pytest.mark.parametrize(("rule", "normalize"), MATRIX_CASES, ids=[str(case_name(c)) for c in MATRIX_CASES])
every_rule = pytest.mark.parametrize("rule", MATRIX_RULES)
TILED_RULES = [rule for rule in MATRIX_RULES if rule not in DELTA_RULES]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Every tensor that is made empty holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend the chip has this many multiprocessors: 0 never splits time, more do."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(launch, "multiprocessors", lambda _: count)
        launch.plan_for.cache_clear()

    yield pretend
    monkeypatch.undo()
    launch.plan_for.cache_clear()


def check(
    rule: str, flags: dict[str, Any], dtype: torch.dtype = torch.float32, normalize: bool = False, **sizes: Any
) -> None:
    check_inputs(rule, op_inputs(rule, normalize=normalize, **sizes), flags, dtype, normalize)


def check_inputs(
    rule: str,
    inputs: dict[str, torch.Tensor],
    flags: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    normalize: bool = False,
) -> None:
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if "state" in inputs:
        inputs["state"] = inputs["state"].float()
    truth = {name: x.double() for name, x in inputs.items()}
    expected = run_with_gradients(rule, truth, backend="loop", normalize=normalize, **flags)
    here = {name: x.to(DEVICE) for name, x in inputs.items()}
    flags = {name: x.to(DEVICE) for name, x in flags.items()}
    found = run_with_gradients(rule, here, backend="triton", normalize=normalize, **flags)
    assert found["y"].dtype == dtype and found["state"].dtype == torch.float32
    assert_all_close({name: x.cpu() for name, x in found.items()}, expected, LIMITS[dtype])


@every_rule
@pytest.mark.parametrize(("T", "m", "d"), SIZES)
def test_kernels_match_loop_for_odd_sizes(rule: str, T: int, m: int, d: int) -> None:
    check(rule, {}, B=1, T=T, H=2, m=m, d=d)


@every_case
@pytest.mark.parametrize("kind", ["mask", "reset", "mask+reset"])
def test_kernels_match_loop_with_padding_and_documents(rule: str, normalize: bool, kind: str) -> None:
    check(rule, op_flags(kind, 2, 37), normalize=normalize, T=37, H=1, m=5, d=6)


@every_rule
@pytest.mark.parametrize("kind", ["none", "mask+reset"])
def test_kernels_match_loop_with_time_in_segments(rule: str, kind: str, processors: Any) -> None:
    processors(3)
    flags = op_flags(kind, 1, 300) if kind != "none" else {}
    check(rule, flags, B=1, T=300, H=1, m=4, d=3)
    plan = launch.plan_for(
        launch.ProblemShape(rule, 1, 300, 1, 4, 3, torch.float32, kind != "none", torch.device(DEVICE))
    )
    assert plan.segments > 1 and (rule in DELTA_RULES or plan.backward_segments > 1)


@pytest.mark.parametrize("rule", sorted(DELTA_RULES))
@pytest.mark.parametrize(
    ("dtype", "m", "d"),
    [(torch.bfloat16, 40, 70), (torch.float32, 5, 70), (torch.bfloat16, 5, 70), (torch.float32, 70, 5)],
)
def test_delta_kernels_match_loop_in_segments_of_several_slices(
    rule: str, dtype: torch.dtype, m: int, d: int, processors: Any
) -> None:
    """Slices of the state's rows, and of its transition's columns, which may be fewer than the rows of a slice."""
    processors(60)
    check(rule, {}, dtype, B=1, T=135, H=1, m=m, d=d)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["abc", "linformer"])
def test_slots_by_kernels_match_loop(rule: str, dtype: torch.dtype) -> None:
    check(rule, op_flags("mask+reset", 1, 21), dtype, B=1, T=21, H=1, m=5, d=6, groups=2)


def test_widest_keys_of_slots_decide_whether_kernels_run() -> None:
    inputs = {name: x.to(DEVICE) for name, x in op_inputs("abc", m=5, r=129).items()}
    with pytest.raises(ValueError, match="m up to 128, found 129"):
        run_op("abc", inputs, backend="triton")


@every_rule
def test_kernels_match_loop_with_grouped_queries(rule: str) -> None:
    check(rule, {}, T=18, H=2, m=3, d=4, groups=3, state=False)


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_match_loop_in_half_precision(rule: str, dtype: torch.dtype) -> None:
    check(rule, {}, dtype, T=40, H=1, m=20, d=18, low=-1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["add", "gated", "delta"])
def test_normalized_kernels_match_loop_in_half_precision(rule: str, dtype: torch.dtype) -> None:
    """Divided before it is rounded: sums of keys leave float16's range."""
    inputs = op_inputs(rule, T=40, H=1, m=16, d=18, normalize=True, state=False)
    inputs |= {name: 200 * inputs[name] for name in "q" if rule != "delta"}
    inputs = {name: x.to(DEVICE, dtype) for name, x in inputs.items()}
    y, _ = run_op(rule, inputs, backend="triton", normalize=True)
    expected, _ = run_op(rule, {name: x.double() for name, x in inputs.items()}, backend="loop", normalize=True)
    assert_all_close({"y": y}, {"y": expected}, LIMITS[dtype])


@pytest.mark.parametrize(
    ("rule", "gate"),
    [("decay", "f_logit"), ("decay", "z_logit"), ("gated_delta", "f_logit"), ("gated_delta", "g_logit")],
)
def test_nan_gate_gives_nan_output(rule: str, gate: str) -> None:
    inputs = {name: x.to(DEVICE) for name, x in op_inputs(rule, T=20, H=1).items()}
    inputs[gate][:, 3] = math.nan
    y, _ = run_op(rule, inputs, backend="triton")
    assert y[:, 4:].isnan().any()


@pytest.mark.parametrize(("low", "high"), [(-30.0, -9.0), (-10.0, -10.0), (9.0, 20.0), (-12.0, 12.0)])
@pytest.mark.parametrize("rule", ["gated", "decay", "gated_delta"])
def test_kernels_match_loop_with_extreme_gates(rule: str, low: float, high: float) -> None:
    check(rule, {}, T=50, H=1, m=4, d=5, low=low, high=high)


@pytest.mark.parametrize("kind", ["none", "reset"])
def test_chunks_with_small_gates_stand_beside_others(kind: str) -> None:
    """A chunk of 32 tokens whose gates are too small for one pass over its pairs is left to a second launch: here the
    second of the first head, because of one column, and the first of the second head."""
    inputs = op_inputs("gated_delta", B=1, T=100, H=2, m=4, d=5)
    inputs["f_logit"][:, 32:64, 0, 2] = -10.0
    inputs["f_logit"][:, :32, 1] = -10.0
    check_inputs("gated_delta", inputs, op_flags(kind, 1, 100) if kind != "none" else {})


@every_rule
def test_gradient_through_state_alone_matches_loop(rule: str) -> None:
    inputs = op_inputs(rule, T=20, H=1)
    grads = {}
    for backend in ("loop", "triton"):
        leaves = {name: x.to(DEVICE).requires_grad_() for name, x in inputs.items()}
        _, state = run_op(rule, leaves, backend=backend)
        grads[backend] = torch.autograd.grad(state.sin().sum(), leaves["k"])[0].cpu()
    assert_all_close({"k": grads["triton"]}, {"k": grads["loop"]}, 1e-5)


@every_rule
def test_nothing_is_saved_without_gradients(rule: str) -> None:
    inputs = {name: x.to(DEVICE) for name, x in op_inputs(rule, T=33, H=1).items()}
    y, state = run_op(rule, inputs, backend="triton")
    expected = run_op(rule, inputs, backend="loop")
    assert_all_close({"y": y, "state": state}, dict(zip(("y", "state"), expected, strict=True)), 1e-5)
    q, k, v = (inputs[name] for name in "qkv")
    gates = [x if x.ndim == 4 else x[..., None] for name, x in inputs.items() if name.endswith("logit")]
    plan = _plan(rule, q, k, v, None)
    assert not launch.forward(plan, q, k, v, gates, None, None, False)[2]
    shapes = [(x.shape, x.dtype) for x in launch.forward(plan, q, k, v, gates, None, None, True)[2]]
    assert shapes and shapes == plan.saved()


@every_rule
def test_custom_operators_pass_opcheck(rule: str, processors: Any) -> None:
    processors(3)
    inputs = {name: x.to(DEVICE) for name, x in op_inputs(rule, B=1, T=300, H=1, m=4, d=3).items()}
    gates = [x if x.ndim == 4 else x[..., None] for name, x in inputs.items() if name.endswith("logit")]
    for x in (*inputs.values(), *gates):
        x.requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (rule, inputs["q"], inputs["k"], inputs["v"], gates, None, inputs["state"], True, False)
    torch.library.opcheck(rule_op, arguments, test_utils=checks)


@every_rule
def test_compiles_without_a_graph_break(rule: str) -> None:
    inputs = {name: x.to(DEVICE) for name, x in op_inputs(rule, T=20, H=1).items()}

    def loss(**tensors: Any) -> Any:
        y, state = run_op(rule, tensors, backend="triton")
        return (y.sin().sum() + state.sin().sum()) * 2

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        results.append(torch.autograd.grad(run(**leaves), list(leaves.values())))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_kernels_compile_without_a_gpu() -> None:
    """The interpreter forgives what the compiler does not."""
    printed = run_compiling("compile_kernels", *MATRIX_RULES)
    for section in printed.split("rule ")[1:]:
        rule, *lines = section.splitlines()
        others = {"prepare", "gradients", "segment_effects"} if rule in DELTA_RULES else {"segment_sums"}
        assert {line.split()[0] for line in lines} == {"forward", "backward", "scan_segments"} | others
    assert printed.count("rule ") == len(MATRIX_RULES)


class FakeKernel:
    """What launch.run needs of a jitted kernel and of what it compiles to."""

    arg_names = ("x", "n", "WIDTH", "FLAG")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def jitted(*args: Any, **options: Any) -> Any:
            self.calls.append(("compile", grid, args, options))
            return compiled

        def launch_again(grid: Any) -> Any:
            return lambda *args: self.calls.append(("again", grid, args))

        compiled = type("Compiled", (), {"__getitem__": lambda _, grid: launch_again(grid)})()
        return jitted


def test_compiled_kernel_is_looked_up_once() -> None:
    kernel, x, options = FakeKernel(), torch.zeros(8), {"FLAG": True, "num_warps": 4, "WIDTH": 3}
    for _ in range(2):
        launch.run(kernel, (5, 2), (x, 7), **options)
    assert kernel.calls == [("compile", (5, 2), (x, 7), options), ("again", (5, 2, 1), (x, 7, 3, True))]
    kernel.calls.clear()
    for other, change in ((x.double(), {}), (x, {"WIDTH": 4}), (x[1:], {})):  # a type, a setting, an odd address
        launch.run(kernel, (5,), (other, 7), **options | change)
    launch.run(kernel, (5,), (x, 2**40), **options)
    assert [call[0] for call in kernel.calls] == ["compile"] * 4


def test_kernel_constants_are_last_arguments() -> None:
    """launch.run gives a compiled kernel its arguments first, then what it is specialised for."""
    every: tuple[Any, ...] = (tiled.forward, tiled.backward, tiled.segment_sums, tiled.scan_segments)
    every += (wy.prepare, wy.forward, wy.backward, wy.gradients, wy.segment_effects, wy.scan_segments)
    for kernel in every:
        constant = [name.isupper() for name in kernel.arg_names]
        assert constant == sorted(constant) and any(constant)
        numbers = kernel.arg_names[kernel.arg_names.index("length" if "length" in kernel.arg_names else "segments") :]
        assert {name for name in numbers if name.islower()} <= set(CHANGING_SIZES), (
            "Triton would compile for such a number"
        )


@every_rule
def test_compiles_once_for_all_lengths(rule: str, processors: Any) -> None:
    processors(3)
    torch.compiler.reset()

    def both(**tensors: Any) -> Any:
        y, state = run_op(rule, tensors, backend="triton")
        return y.sin().sum() + state.sin().sum()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (20, 140, 300):
        inputs = {name: x.to(DEVICE).requires_grad_() for name, x in op_inputs(rule, B=1, T=T, H=1, m=4, d=3).items()}
        eager, again = (torch.autograd.grad(f(**inputs), list(inputs.values())) for f in (both, compiled))
        for a, b in zip(eager, again, strict=True):
            torch.testing.assert_close(b, a)


@every_rule
def test_two_million_tokens_can_be_launched(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid's second dimension ends at 65535."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(launch, "run", lambda kernel, grid, args, **options: grids.append(grid))
    inputs = op_inputs(rule, B=1, T=2**21, H=1, m=1, d=1)
    leaves = {name: x.to(DEVICE).requires_grad_() for name, x in inputs.items()}
    y, _ = run_op(rule, leaves, backend="triton")
    torch.autograd.grad(y.sum(), list(leaves.values()))
    assert len(grids) >= 4 and all(max(grid[1:], default=1) <= 65535 for grid in grids)


# --- which backend runs


def test_auto_uses_triton_on_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ops.BACKENDS:
        monkeypatch.setitem(ops.BACKENDS, name, lambda *a, name=name: asked.append(name) or ops.loop(*a))
    run_op("add", {name: x.to(DEVICE) for name, x in op_inputs("add").items()})
    assert asked == ["triton" if DEVICE == "cuda" else "chunked"]


def test_triton_error_names_unsupported_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' cannot run here: it needs a CUDA device.*on cpu.*'auto'"):
        run_op("add", op_inputs("add"), backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="float64"):
        run_op("add", op_inputs("add", dtype=torch.float64), backend="triton")
    with pytest.raises(ValueError, match="m up to 128, found 129"):
        run_op("add", op_inputs("add", m=129), backend="triton")
    for nothing in (dict(B=0), dict(d=0)):
        with pytest.raises(ValueError, match="nothing to compute"):
            run_op("add", op_inputs("add", **nothing), backend="triton")
        run_op("add", op_inputs("add", **nothing))
    with pytest.raises(ValueError, match="gated takes 1 gate logits \\(g\\), found 0"):
        ops.apply("gated", *(op_inputs("add")[name] for name in "qkv"), ())
    monkeypatch.setattr(device, "TRITON_INSTALLED", False)
    with pytest.raises(ValueError, match=r"not installed.*fastweights\[gpu\]"):
        run_op("add", op_inputs("add"), backend="triton")


# --- at full size, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("T", "m", "d"), [(1000, 32, 64), (3000, 16, 64), (513, 64, 80), (400, 128, 256)])
@every_rule
def test_kernels_match_loop_at_full_size(rule: str, dtype: torch.dtype, T: int, m: int, d: int) -> None:
    check(rule, op_flags("mask+reset", 2, T), dtype, T=T, H=3, m=m, d=d)
