"""Several processes on one GPU at the same time, by NVIDIA's Multi-Process Service (MPS).

Without it, processes take turns on a GPU: while the kernels of one run, those of the others wait. MPS is part of the
driver. Its daemon and the processes meet in a folder that an environment variable names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

CONTROL = "nvidia-cuda-mps-control"
FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
# How long a program may take, and how long the daemon waits for processes that still use it when it ends.
PROGRAM_SECONDS, QUIT_SECONDS = 30, 5
# Exits with 0 if this process can use a GPU. The daemon answers even where its server cannot start.
USE_GPU = """
import ctypes, sys
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
sys.exit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


@contextmanager
def shared_gpu(processes: int, device: str | None, announce: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """In its block, processes with the environment variables that it yields share the GPU.

    There are none where nothing is to be shared or where a daemon is named already. Where no daemon can be started, a
    line says so, and processes take turns.

    Args:
        processes: How many run at the same time.
        device: "cpu" or "cuda"; None for a GPU where there is one.
        announce: Gets that line.
    """
    if processes < 2 or device == "cpu" or FOLDER in os.environ or not torch.cuda.is_available():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="fastweights-mps-", ignore_cleanup_errors=True) as folder:
        names = {FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            reason = _start(names)
            if reason:
                announce(f"the runs take turns on the GPU, as NVIDIA's MPS could not be started: {reason}")
            yield {} if reason else names
        finally:
            _control(names, text=f"quit -t {QUIT_SECONDS}")


def _start(names: dict[str, str]) -> str:
    """Start a daemon. Returns why that failed, or nothing."""
    if shutil.which(CONTROL) is None:
        return f"there is no program {CONTROL}"
    return _control(names, "-d") or _run([sys.executable, "-c", USE_GPU], names, os.environ | names)


def _control(names: dict[str, str], *arguments: str, text: str = "") -> str:
    """Call the daemon's program. Returns why that failed, or nothing.

    The daemon itself must see all GPUs: it would number those of CUDA_VISIBLE_DEVICES from 0, and the processes, which
    have that variable, too, would choose among these.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return _run([CONTROL, *arguments], names, environment | names, text)


def _run(command: Sequence[str], names: dict[str, str], environment: Mapping[str, str], text: str = "") -> str:
    """Run a program. Returns why that failed, or nothing."""
    output = Path(names[FOLDER]) / "output.txt"
    try:
        # Not into a pipe, which the daemon would hold open.
        with output.open("w") as file:
            ended = subprocess.run(
                command,
                env=environment,
                input=f"{text}\n",
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PROGRAM_SECONDS,
            )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if not ended.returncode:
        return ""
    printed = output.read_text(errors="replace").strip().splitlines()
    return printed[-1] if printed else f"{Path(command[0]).name} ended with exit code {ended.returncode}"
