"""Compiles all kernels of a first call at the same time, in threads; one after another takes about twice as long.

Triton's asynchronous mode looks up and stores kernels in the caller's thread. The other threads only run the compilers
and share nothing, so a kernel that is found in the cache is always complete.
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

KernelCall = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
# While this holds a list, launch.run appends its kernel, grid, arguments and options to it instead of launching.
recording: contextvars.ContextVar[list[KernelCall] | None] = contextvars.ContextVar("recording", default=None)


def record_calls(call: Callable[[], None]) -> list[KernelCall]:
    """The kernel calls that `call` would launch; none is launched."""
    calls: list[KernelCall] = []
    before = recording.set(calls)
    try:
        call()
    finally:
        recording.reset(before)
    return calls


def compile_in_parallel(calls: list[KernelCall], device: torch.device) -> None:
    """Compile the kernels of these calls. A kernel that fails is skipped: its launch raises the error again."""
    with ThreadPoolExecutor(max(1, len(calls))) as threads:
        # In a copied context: Triton 3.6 stays in asynchronous mode if it is interrupted.
        contextvars.copy_context().run(_compile_with, threads, calls, device)


def _compile_with(threads: ThreadPoolExecutor, calls: list[KernelCall], device: torch.device) -> None:
    locks: defaultdict[Any, Lock] = defaultdict(Lock)

    def compile_and_load(compile: Callable[[], Any]) -> Any:
        with torch.cuda.device(device):
            kernel = compile()
            with locks[kernel.src.fn]:  # Triton 3.6 compiles a launcher in C here, one for all kernels of a function
                kernel._init_handles()
        return kernel

    executor = SimpleNamespace(submit=lambda compile: threads.submit(compile_and_load, compile))
    with torch.cuda.device(device), triton.AsyncCompileMode(executor, ignore_errors=True):
        # In the order of the calls: the hash of a kernel, which names its files, depends on the kernels hashed before.
        for kernel, grid, args, options in calls:
            kernel.warmup(*args, grid=grid, **options)
