"""Compiles all kernels of a first call at the same time, in threads: they would take about twice as long in turn.

Triton's asynchronous mode looks kernels up and stores them in the caller's thread; others run the compilers alone, on
nothing that they share. A kernel that another thread may find is thus whole.
"""

from __future__ import annotations

import contextvars
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
import triton

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
# Where launch.run leaves its kernel, grid, arguments and options instead of launching.
collected: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar("collected", default=None)


def launches_of(call: Callable[[], None]) -> list[Launch]:
    """What `call` would launch; it launches nothing."""
    launches: list[Launch] = []
    before = collected.set(launches)
    try:
        call()
    finally:
        collected.reset(before)
    return launches


def compile_together(launches: list[Launch], device: torch.device) -> None:
    """A kernel that cannot be compiled is passed over: its launch says why."""
    with ThreadPoolExecutor(max(1, len(launches))) as threads:
        # Triton 3.6 stays in its mode if it is interrupted: of a copied context nobody sees that.
        contextvars.copy_context().run(_compile_in, threads, launches, device)


def _compile_in(threads: ThreadPoolExecutor, launches: list[Launch], device: torch.device) -> None:
    locks: defaultdict[Any, Lock] = defaultdict(Lock)

    def compile_and_load(compile: Callable[[], Any]) -> Any:
        with torch.cuda.device(device):
            kernel = compile()
            with locks[kernel.src.fn]:  # Triton 3.6 compiles a launcher in C here, one for all kernels of a function
                kernel._init_handles()
        return kernel

    executor = SimpleNamespace(submit=lambda compile: threads.submit(compile_and_load, compile))
    with torch.cuda.device(device), triton.AsyncCompileMode(executor, ignore_errors=True):
        # In the order of the launches: Triton hashes a kernel, for its files, with those that it hashed before.
        for kernel, grid, args, options in launches:
            kernel.warmup(*args, grid=grid, **options)
