"""One step of generation, timed: all contenders run in the same way, and they alternate.

On CUDA a step is captured in a graph, which takes Python and the launches out of it for all contenders alike, and timed
with events around several replays. On a CPU it runs as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.filesize import decimal
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastweights.results import CostPoint, ModelCost, SkippedLength

Step = Callable[[], Any]
REPLAYS = 20
CAPTURE_WARM_UP = 3
CHOOSING_REPEATS = 3
KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@dataclass(frozen=True)
class Conditions:
    """How steps are timed.

    repeats: Each contender is timed so often, and the median is reported.
    compiled: Whether to compile the steps with torch.compile.
    settle: On a CPU, untimed steps before each timed one. They fill the processor's caches with the contender's data.
    """

    device: torch.device
    repeats: int
    compiled: bool = False
    settle: int = 0


@dataclass(frozen=True)
class Contender:
    """A step that generates one token.

    step: May be run any number of times. It reads and writes the same addresses each time.
    cached_bytes: Bytes cached of the sequence before the token.
    attends: Whether it runs torch's scaled_dot_product_attention.
    is_engine: Whether it is the engine's step, which is never compiled.
    """

    step: Step
    cached_bytes: int
    attends: bool
    is_engine: bool = False


@dataclass(frozen=True)
class Runner:
    """A step that is ready to be timed.

    how: How it runs, such as "CUDA graph"; also why it could not be captured.
    kernel: The attention kernel that was chosen for it.
    """

    run: Step
    how: str
    kernel: SDPBackend | None = None


@dataclass
class Findings:
    """What was measured of one contender at each length, and what could not be."""

    points: list[CostPoint] = field(default_factory=list)
    left_out: list[SkippedLength] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)

    def add(self, length: int, seconds: float, cached_bytes: int, peak_bytes: int, runner: Runner) -> None:
        """Add the measurement of a length."""
        kernel = None if runner.kernel is None else runner.kernel.name.lower()
        self.points.append(
            CostPoint(length=length, seconds=seconds, bytes=cached_bytes, peak_bytes=peak_bytes, kernel=kernel)
        )
        self.ways.append(runner.how)

    def leave_out(self, length: int, reason: str) -> None:
        """Note a length that could not be measured."""
        self.left_out.append(SkippedLength(length=length, reason=reason))

    def cost(self, name: str, converted: bool, positions: str | None = None) -> ModelCost:
        """The measurements as a part of a CostResult."""
        how = ", ".join(dict.fromkeys(self.ways)) or None
        return ModelCost(
            name=name, converted=converted, how=how, points=self.points, left_out=self.left_out, positions=positions
        )


def measure(
    contenders: Mapping[str, Callable[[], Contender]],
    length: int,
    conditions: Conditions,
    found: Mapping[str, Findings],
) -> None:
    """Measure each contender after `length` tokens and add the point, or the reason why there is none, to `found`."""
    if conditions.compiled:
        torch.compiler.reset()  # every length is compiled again, and torch limits the number of compilations
    made = _each(contenders, lambda make: make(), length, found)
    runners = _each(made, lambda contender: ready(contender, conditions), length, found)
    steps = {name: (made[name].step, runner.kernel) for name, runner in runners.items()}
    peaks = _each(steps, lambda pair: peak_bytes(pair[0], pair[1], conditions.device), length, found)
    for name, seconds in median_seconds({name: runners[name] for name in peaks}, conditions).items():
        cached = made[name].cached_bytes
        found[name].add(length, seconds, cached, cached + peaks[name], runners[name])


def _each(items: Mapping[str, Any], do: Callable, length: int, found: Mapping[str, Findings]) -> dict[str, Any]:
    done = {}
    for name, item in items.items():
        try:
            done[name] = do(item)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            found[name].leave_out(length, f"out of memory: {_first_line(error)}")
    return done


def ready(contender: Contender, conditions: Conditions) -> Runner:
    """Compile the step if `conditions` say so, and capture it in a CUDA graph on a GPU.

    On a GPU, attention uses the kernel of torch's scaled_dot_product_attention that is measured to be the fastest for
    its shapes, which may not be the one that torch selects.
    """
    compiled = conditions.compiled and not contender.is_engine
    way = "engine" if contender.is_engine else "compiled" if compiled else "eager"
    step = torch.compile(contender.step, dynamic=False) if compiled else contender.step
    if conditions.device.type != "cuda":
        if compiled:
            step()
        return Runner(step, way)
    kernel = _fastest_kernel(contender.step, conditions) if contender.attends else None
    with _only(kernel):
        _warm_up(step)
        try:
            return Runner(_captured(step), "CUDA graph" if way == "eager" else f"{way}, CUDA graph", kernel)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            torch.cuda.synchronize()
            return Runner(step, f"{way}: not captured in a CUDA graph ({_first_line(error)})", kernel)


def _warm_up(step: Step) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)


def _captured(step: Step) -> Step:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _fastest_kernel(step: Step, conditions: Conditions) -> SDPBackend | None:
    seconds = {}
    for kernel in KERNELS:
        with _only(kernel), warnings.catch_warnings(action="ignore"):
            try:
                _warm_up(step)
                runner = Runner(_captured(step), "")
            except RuntimeError:  # a kernel that is not for this device, dtype or shape, or that needs too much memory
                torch.cuda.synchronize()
                continue
        seconds[kernel] = median_seconds({"": runner}, replace(conditions, repeats=CHOOSING_REPEATS))[""]
    return min(seconds, key=seconds.__getitem__, default=None)


def median_seconds(runners: Mapping[str, Runner], conditions: Conditions) -> dict[str, float]:
    """The median time of each step. The contenders alternate, so that other load on the machine affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(conditions.repeats):
        for name, runner in runners.items():
            seconds[name].append(_seconds(runner.run, conditions))
    return {name: statistics.median(values) for name, values in seconds.items()}


def _seconds(run: Step, conditions: Conditions) -> float:
    if conditions.device.type != "cuda":
        for _ in range(conditions.settle):
            run()
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / REPLAYS


def _only(kernel: SDPBackend | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if kernel is None else sdpa_kernel(kernel)


def peak_bytes(step: Step, kernel: SDPBackend | None, device: torch.device) -> int:
    """The most bytes that are allocated at once during a step."""
    if device.type == "cuda":
        with _only(kernel):
            step()  # libraries allocate workspaces once, such as cuBLAS's; they are not part of the step
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr at every start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held, default=0)


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` the current CUDA device, to which streams, events and graphs belong."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_room(nbytes: int, device: torch.device) -> None:
    """Raise MemoryError if a CPU has too little free memory. The system would kill the process without an error."""
    free = psutil.virtual_memory().available
    if device.type == "cpu" and nbytes > free:
        raise MemoryError(f"{decimal(nbytes)} are needed and {decimal(free)} are free")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory is exhausted, on any device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
