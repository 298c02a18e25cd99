"""The operations of benchmarks/gpu.py: checked against the float64 loop, then timed.

Shapes: q, k, f_logit [B,T,H,m]   v, z_logit, y [B,T,H,d]   g_logit [B,T,H]   state [B,H,d,m]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import peers
import torch
from measure import Settings, first_line, freed, graph_ms, guarded, median_ms, peak_extra_mib, relative_error
from torch import Tensor
from torch.nn import functional as F

from fastweights import ops
from fastweights.rules import DELTA_RULES, RULES

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LIMITS = {"bfloat16": 5e-3, "float32": 1e-4}
BIASES = (-4.0, 0.0, 2.0, 6.0)
TIMED_BIAS = 2.0
TIMED_OPS = [("decay", 32), ("decay", 4), ("decay", 16), ("decay", 64), ("add", 32), ("gated", 32), ("delta", 32)]
TIMED_OPS += [("delta", 64), ("gated_delta", 32), ("gated_delta", 64)]
PRECISE_OPS = [("decay", 32), ("delta", 64), ("gated_delta", 64)]
PROFILED_RUNS = 5
PROFILED_ROWS = 12

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """`rows` x `heads` of the batch are compared with the loop, whose memory and time would not allow all."""

    B: int
    T: int
    H: int
    d: int
    rows: int
    heads: int

    def __str__(self) -> str:
        return f"B {self.B}, T {self.T}, H {self.H}, d {self.d}"

    def picked(self, x: Tensor, head_axis: int) -> Tensor:
        rows = torch.linspace(0, self.B - 1, self.rows, device=x.device).long()
        heads = torch.linspace(0, self.H - 1, self.heads, device=x.device).long()
        return x.detach().index_select(0, rows).index_select(head_axis, heads)

    def all_picked(self, tensors: Tensors) -> Tensors:
        return {name: self.picked(x, 1 if "state" in name else 2) for name, x in tensors.items()}


SHAPES = (Shape(32, 1024, 12, 64, 4, 4), Shape(8, 4096, 12, 64, 2, 4), Shape(2, 16384, 12, 64, 2, 3))
SMALL_SHAPES = (Shape(4, 32, 2, 16, 2, 2), Shape(2, 70, 3, 16, 1, 2))


def shapes(settings: Settings) -> Sequence[Shape]:
    return SMALL_SHAPES if settings.small else SHAPES


def op_inputs(rule: str, m: int, shape: Shape, dtype: torch.dtype, bias: float, device: str) -> tuple[Tensors, Tensors]:
    """Arguments of an operation and what comes back from above: random, gate logits around a bias."""
    B, T, H, d = shape.B, shape.T, shape.H, shape.d
    generator = torch.Generator(device).manual_seed(m + T)

    def draw(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    keys = draw(B, T, H, m, dtype=torch.float32)
    keys = F.normalize(keys, dim=-1) if rule in DELTA_RULES else keys
    inputs = {"q": draw(B, T, H, m), "k": keys.to(dtype), "v": draw(B, T, H, d)}
    widths: dict[str, tuple[int, ...]] = {"m": (m,), "d": (d,), "1": ()}
    for gate, width in RULES[rule].gates.items():
        inputs[f"{gate}_logit"] = (draw(B, T, H, *widths[width], dtype=torch.float32) + bias).to(dtype)
    inputs["state"] = draw(B, H, d, m, dtype=torch.float32)
    return inputs, {"y": draw(B, T, H, d), "state": draw(B, H, d, m, dtype=torch.float32)}


def with_gradients(run: Callable[..., tuple[Tensor, Tensor]], inputs: Tensors, upstream: Tensors) -> Tensors:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y, state = run(**leaves)
    gradients = torch.autograd.grad((y, state), list(leaves.values()), (upstream["y"], upstream["state"]))
    return {"y": y, "state": state} | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def split_loop(rule: str, state: Tensor, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """rules.loop with its inputs split beforehand, which spares autograd a tensor of zeros for every slice."""
    outputs = []
    for step in zip(*(x.unbind(1) for x in inputs.values()), strict=True):
        y, state = RULES[rule].step(state, *step)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def truths(rule: str, cases: list[tuple[Tensors, Tensors]]) -> list[Tensors]:
    """The float64 loop on several cases at once, as rows of one batch: it is launches that it takes its time for.
    A smaller m is filled up with zeros, which neither change nor reach the rest."""
    widest = max(inputs["k"].shape[-1] for inputs, _ in cases)

    def filled(name: str, x: Tensor) -> Tensor:
        along_m = name in ("q", "k", "f_logit", "state")
        return F.pad(x.double(), (0, widest - x.shape[-1])) if along_m else x.double()

    joined = [
        {name: torch.cat([filled(name, case[side][name]) for case in cases]) for name in cases[0][side]}
        for side in (0, 1)
    ]
    results = with_gradients(lambda **inputs: split_loop(rule, **inputs), *joined)
    found = []
    for number, (inputs, upstream) in enumerate(cases):
        rows = len(inputs["q"])
        like = upstream | {f"d{name}": x for name, x in inputs.items()}
        own = {name: x[number * rows : (number + 1) * rows] for name, x in results.items()}
        found.append({name: x[..., : like[name].shape[-1]].detach() for name, x in own.items()})
    return found


def check(rule: str, shape: Shape, cases: list[dict[str, Any]], settings: Settings) -> None:
    """Run the operation on all of each case's tensors; the case gets its errors, and whether it passed."""
    ran, asked, found = [], [], []
    for case in cases:
        with freed(settings.device):
            inputs, upstream = op_inputs(rule, case["m"], shape, DTYPES[case["dtype"]], case["bias"], settings.device)
            try:
                results = with_gradients(partial(getattr(ops, rule), backend=settings.backend), inputs, upstream)
            except Exception as error:
                case["error"] = first_line(error)
                continue
            ran.append(case)
            found.append(shape.all_picked(results))
            asked.append((shape.all_picked(inputs), shape.all_picked(upstream)))
            del inputs, upstream, results
    with freed(settings.device):
        for case, results, truth in zip(ran, found, truths(rule, asked) if ran else [], strict=True):
            case["errors"] = {name: relative_error(results[name], truth[name]) for name in truth}
    for case in cases:
        case["limit"] = LIMITS[case["dtype"]]
        case["passed"] = "errors" in case and max(case["errors"].values()) <= case["limit"]


def precision(settings: Settings) -> Iterator[dict[str, Any]]:
    """Each rule: every shape, bias and dtype against the float64 loop."""
    result: dict[str, Any] = {"compared": {}, "cases": []}
    for (rule, m), shape in product(PRECISE_OPS, shapes(settings)):
        for dtype in LIMITS:  # one at a time, for the memory that the loop's steps take
            case = {"shape": str(shape), "rule": rule, "m": m, "dtype": dtype}
            cases: list[dict[str, Any]] = [case | {"bias": bias} for bias in BIASES]
            check(rule, shape, cases, settings)
            result["cases"] += cases
        result["compared"][str(shape)] = f"{shape.rows} rows x {shape.heads} heads, all tokens"
        yield result


def kernels(settings: Settings) -> Iterator[dict[str, Any]]:
    """Attention; then each operation checked at each shape and, where it passed, timed."""
    result: dict[str, Any] = {"ops": [], "peers": [], "profiles": {}}
    if settings.on_gpu:
        compile_all(settings)
    for row in peers.operations(peers.TORCH, shapes(settings), settings):
        result["peers"].append(row)
        yield result
    for rule in dict.fromkeys(rule for rule, _ in TIMED_OPS):
        for shape in shapes(settings):
            for row in measured(rule, [m for name, m in TIMED_OPS if name == rule], shape, settings):
                result["ops"].append(row)
                yield result
            if rule == "decay":
                result["profiles"][str(shape)] = guarded(lambda shape=shape: profile(shape, settings))
                yield result


def measured(rule: str, widths: list[int], shape: Shape, settings: Settings) -> Iterator[dict[str, Any]]:
    """An operation at each m, with its times where it is right."""
    rows: list[dict[str, Any]] = [
        {"shape": str(shape), "rule": rule, "m": m, "bias": TIMED_BIAS, "dtype": "bfloat16"} for m in widths
    ]
    check(rule, shape, rows, settings)
    for row in rows:
        yield row | (timed(row, shape, settings) if row["passed"] else {})


def compile_all(settings: Settings) -> None:
    """Fill Triton's cache from a process an operation: one after another they would take minutes."""
    with ProcessPoolExecutor(len(TIMED_OPS), mp_context=get_context("spawn")) as pool:
        for started in [pool.submit(run_once, rule, m, settings) for rule, m in TIMED_OPS]:
            guarded(started.result)  # what fails here fails its check as well


def run_once(rule: str, m: int, settings: Settings) -> None:
    for shape in shapes(settings):
        inputs, upstream = op_inputs(rule, m, shape, torch.bfloat16, TIMED_BIAS, settings.device)
        with_gradients(partial(getattr(ops, rule), backend=settings.backend), inputs, upstream)
        for run in runs_of(rule, m, shape, settings):
            run()


def fla(settings: Settings) -> Iterator[dict[str, Any]]:
    """flash-linear-attention, beside attention, the delta rules and decay. chunk_kda, which computes what gated_delta
    does, comes before ours, because its autotuning takes long; other kernels of fla take a whole CUDA context down, so
    they come last."""
    result: dict[str, Any] = {"ops": [], "peers": []}
    for row in peers.operations([peers.KDA, *peers.TORCH], shapes(settings), settings):
        result["peers"].append(row)
        yield result
    for rule, widths in (("gated_delta", [64]), ("delta", [64]), ("decay", [32, 64])):
        for shape in shapes(settings):
            result["ops"] += measured(rule, widths, shape, settings)
            yield result
    for row in peers.operations(peers.FLA, shapes(settings), settings):
        result["peers"].append(row)
        yield result


def runs_of(rule: str, m: int, shape: Shape, settings: Settings) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward alone, and forward with backward, without states as in training."""
    inputs, upstream = op_inputs(rule, m, shape, torch.bfloat16, TIMED_BIAS, settings.device)
    del inputs["state"]
    tensors = [x.requires_grad_() for x in inputs.values()]
    op = getattr(ops, rule)

    def forward_backward() -> Any:
        y, _ = op(*tensors, backend=settings.backend)
        return torch.autograd.grad(y, tensors, upstream["y"])

    def forward() -> Any:
        with torch.no_grad():
            return op(*tensors, backend=settings.backend)

    return forward, forward_backward


def timed(row: dict[str, Any], shape: Shape, settings: Settings) -> dict[str, Any]:
    with freed(settings.device):
        forward, forward_backward = runs_of(row["rule"], row["m"], shape, settings)
        times: dict[str, Any] = {
            "forward ms": median_ms(forward, settings.device),
            "forward+backward ms": median_ms(forward_backward, settings.device),
            "peak extra MiB": peak_extra_mib(forward_backward, settings.device),
        }
        if settings.on_gpu:
            times["graph forward ms"] = guarded(lambda: graph_ms(forward))
            times["graph forward+backward ms"] = guarded(lambda: graph_ms(forward_backward))
        return times


def profile(shape: Shape, settings: Settings) -> list[dict[str, Any]]:
    """What decay, m = 32, spends its time on, kernel by kernel: microseconds of one forward + backward."""
    with freed(settings.device):
        _, run = runs_of("decay", 32, shape, settings)
        run()
        kind = torch.profiler.ProfilerActivity.CUDA if settings.on_gpu else torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[kind]) as profiler:
            for _ in range(PROFILED_RUNS):
                run()
            if settings.on_gpu:
                torch.cuda.synchronize()
        spent = {
            event.key: (event.self_device_time_total if settings.on_gpu else event.self_cpu_time_total) / PROFILED_RUNS
            for event in profiler.key_averages()
        }
    total = sum(spent.values())
    rows = sorted(spent.items(), key=lambda item: -item[1])[:PROFILED_ROWS]
    return [{"kernel": name[:120], "us": us, "share": us / total} for name, us in rows if us > 0]


def first_call(settings: Settings) -> Iterator[dict[str, Any]]:
    """Seconds that a new process with nothing compiled waits for its first call, for a new shape, and for other rules
    and dtypes."""
    script = Path(__file__).with_name("first_call.py")
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, str(script), settings.device, settings.backend],
            env=os.environ | {"TRITON_CACHE_DIR": empty},
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    yield {"shapes": json.loads(done.stdout.splitlines()[-1])}
