"""Shared by the GPU benchmarks: time by events, memory by the allocator, errors, and the remaining time."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIB = 2**20
# More than any L2 holds: zeroed before each timed run, as triton.testing.do_bench does.
FLUSHED_BYTES = 256 * MIB
WARM_UP_SECONDS = 0.03
TIMED_SECONDS = 0.1
REPEATS = (20, 100)
# An error past every limit: JSON has no infinity.
NOT_FINITE = 1e30


@dataclass(frozen=True)
class Settings:
    """What a part is run with. `small` tests the script: other shapes, the same code."""

    device: str
    backend: str
    small: bool
    ends: float

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def time_left(self) -> float:
        return self.ends - time.monotonic()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def stamp(device: str) -> Any:
    """A moment on the device's own clock."""
    if device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(started: Any, ended: Any) -> float:
    return 1e3 * (ended - started) if isinstance(started, float) else started.elapsed_time(ended)


@functools.cache
def _flushed(device: str) -> Tensor:
    return torch.empty(FLUSHED_BYTES if device == "cuda" else 1, dtype=torch.int8, device=device)


def median_ms(run: Callable[[], Any], device: str) -> float:
    """Median milliseconds of a run with nothing of it in the cache, of at least 20 after a warm-up."""
    runs, started = 0, time.perf_counter()
    while runs < 3 or time.perf_counter() - started < WARM_UP_SECONDS:
        run()
        synchronize(device)
        runs += 1
    repeats = round(TIMED_SECONDS / ((time.perf_counter() - started) / runs))
    pairs = []
    for _ in range(min(max(repeats, REPEATS[0]), REPEATS[1])):
        _flushed(device).zero_()
        started = stamp(device)
        run()
        pairs.append((started, stamp(device)))
    synchronize(device)
    return statistics.median(milliseconds(*pair) for pair in pairs)


def graph_ms(run: Callable[[], Any]) -> float:
    """The same with the launches in a CUDA graph: what is left without Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_ms(graph.replay, "cuda")


def peak_extra_mib(run: Callable[[], Any], device: str) -> float | None:
    """The most that was allocated during a run beyond what was there before."""
    if device != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize(device)
    return (torch.cuda.max_memory_allocated() - before) / MIB


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.empty((4096 if device == "cuda" else 4) * MIB, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: target.copy_(source), device))


def relative_error(found: Tensor, truth: Tensor) -> float:
    """||found - truth|| / ||truth||, in float64."""
    error = float((found.double() - truth.double()).norm() / truth.double().norm())
    return error if math.isfinite(error) else NOT_FINITE


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


def guarded(run: Callable[[], Any]) -> Any:
    """What comes out, or {"error": its first line}: a peer or a tool that fails is no reason to stop."""
    try:
        return run()
    except Exception as error:
        return {"error": first_line(error)}


@contextmanager
def freed(device: str) -> Iterator[None]:
    """Give back what the block's tensors held."""
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()
