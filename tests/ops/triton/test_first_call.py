"""The kernels of a first call are compiled together, before any is launched: all of them, and no others.

TRITON_INTERPRET=0 python tests/ops/triton/test_first_call.py RULE   compiles for a Hopper GPU and prints JSON.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gpu_compilation import run_compiling
from helpers.relative_error import assert_all_close, op_flags, op_inputs, run_op, run_with_gradients

from fastweights.rules import DELTA_RULES, MATRIX_RULES, RULES

pytest.importorskip("triton")
from fastweights.ops.triton import compile, launch, tiled, wy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_rule = pytest.mark.parametrize("rule", MATRIX_RULES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# T, d, multiprocessors: one segment; several; those with several slices of d
SIZES = [(1, 6, 0), (37, 6, 0), (40, 70, 0), (129, 3, 8), (300, 70, 8)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What was to be compiled, call by call, as if there was something to compile here."""
    found: list[list[compile.KernelCall]] = []
    monkeypatch.setattr(launch, "_can_compile", lambda device: device.type == DEVICE)
    monkeypatch.setattr(launch, "compile_in_parallel", lambda launches, device: found.append(launches))
    launch.plan_for.cache_clear()
    yield found
    launch.plan_for.cache_clear()


def looks(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """All that Triton chooses a kernel by, and more."""
    kinds = [(x.dtype, x.shape, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x for x in args]
    return repr((kernel.__name__, grid, kinds, options))


@every_rule
@pytest.mark.parametrize(("T", "d", "processors"), SIZES)
def test_compiled_kernels_are_those_launched(
    rule: str, T: int, d: int, processors: int, calls: list[list[compile.KernelCall]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    collect = launch.run

    def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
        if compile.recording.get() is None:
            launched.append(looks(kernel, grid, args, options))
        else:
            collect(kernel, grid, args, **options)

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "multiprocessors", lambda _: processors)
    normalized = (False, True)[: 1 + RULES[rule].has_normalizer]
    choices = itertools.product(("none", "mask+reset"), DTYPES, (False, True), (False, True), (False, True), normalized)
    for kind, dtype, has_state, of_state, train, normalize in choices:
        launch.plan_for.cache_clear()
        inputs = op_inputs(rule, B=1, T=T, H=1, d=d, m=4, dtype=dtype, state=has_state, normalize=normalize)
        inputs |= {"state": inputs["state"].float()} if has_state else {}
        leaves = {name: x.to(DEVICE).requires_grad_(train) for name, x in inputs.items()}
        flags = {name: x.to(DEVICE) for name, x in op_flags(kind, 1, T).items()}
        y, end = run_op(rule, leaves, backend="triton", normalize=normalize, **flags)
        if train:
            loss = y.sum() + end.sum() if of_state else y.sum()
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        compiled = list(itertools.chain(*calls))
        assert len(calls) == 1 + (rule == "delta" and normalize)  # its normalizer is a call of its own
        assert sorted(looks(*one) for one in compiled) == sorted(launched)
        assert all(x.is_meta for _, _, args, _ in compiled for x in args if isinstance(x, torch.Tensor))
        kernels = 2 if rule in DELTA_RULES else 3 if processors else 1
        assert len(launched) >= (2 if train else 1) * kernels
        calls.clear()
        launched.clear()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes masked pairs too
@every_rule
def test_results_are_right_with_and_without_parallel_compiling(
    rule: str, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {name: x.to(DEVICE) for name, x in op_inputs(rule, T=20, H=1).items()}
    found = [run_with_gradients(rule, inputs, backend="triton")]

    def fail(*_: Any) -> None:
        raise RuntimeError("no compiler")

    for name in ("compile_in_parallel", "record_calls"):
        monkeypatch.setattr(launch, name, fail)
        launch.plan_for.cache_clear()
        found.append(run_with_gradients(rule, inputs, backend="triton"))
    assert len(calls) == 1
    expected = run_with_gradients(rule, inputs, backend="loop")
    for results in found:
        assert_all_close(results, expected, 1e-5)


def test_compiles_once_per_shape_with_and_without_gradients(calls: Any) -> None:
    def call(train: bool, T: int = 20) -> None:
        leaves = {name: x.to(DEVICE).requires_grad_(train) for name, x in op_inputs("add", T=T, H=1).items()}
        run_op("add", leaves, backend="triton")

    for train in (False, False, True, True, False):
        call(train)
    names = [[kernel.__name__ for kernel, *_ in launches] for launches in calls]
    assert names == [["forward"], ["forward", "backward"]]
    call(True, T=19)
    assert len(calls) == 3


def test_unaligned_inputs_compile_at_launch(calls: Any) -> None:
    inputs = {name: x.to(DEVICE) for name, x in op_inputs("add", H=1).items()}
    inputs["k"] = torch.cat([inputs["k"].flatten()[:1], inputs["k"].flatten()])[1:].view_as(inputs["k"])
    run_op("add", inputs, backend="triton")
    assert not calls


def test_no_compiling_on_cpu_or_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert launch._can_compile(torch.device("cuda", 0)) is not capturing
        assert not launch._can_compile(torch.device("cpu")) and not launch._can_compile(torch.device("meta"))


@pytest.mark.gpu
@every_rule
def test_first_call_on_gpu_compiles_in_threads(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[str] = []
    launch.plan_for.cache_clear()
    launch._compiled.clear()
    for kernel in (*vars(tiled).values(), *vars(wy).values()):
        if isinstance(kernel, triton.JITFunction):
            kernel.device_caches.clear()
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **_: compiled.append(threading.current_thread().name)
    )
    inputs = {name: x.to(DEVICE) for name, x in op_inputs(rule, B=1, T=300, H=1, m=37, d=41, state=False).items()}
    run_with_gradients(rule, inputs, backend="triton")
    assert len(compiled) >= 4 and all(name.startswith("ThreadPoolExecutor") for name in compiled)


def test_kernels_compiled_in_threads_are_not_compiled_again_at_launch(tmp_path: Path) -> None:
    found = json.loads(run_compiling("compile_first_call", "decay", TRITON_CACHE_DIR=str(tmp_path)))
    assert found["compiled"] == ["a thread"] * 6, "a launch compiles again what it does not find"
    assert found["loaded"] == ["a thread on device 0"] * 6
    assert found["launched"] == 6
    assert found["too large"] == "OutOfResources"
