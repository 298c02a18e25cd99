"""Several processes on one GPU at the same time, by NVIDIA's Multi-Process Service (MPS).

Without it, processes take turns on a GPU: while the kernels of one run, those of the others wait. MPS is part of the
driver. Its daemon and the processes meet in a folder that an environment variable names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CONTROL = "nvidia-cuda-mps-control"
FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
# How long it may take to answer, and to end while processes still use it.
CONTROL_SECONDS, QUIT_SECONDS = 20, 5


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
    with tempfile.TemporaryDirectory(prefix="fastweights-mps-") as folder:
        names = {FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if reason := _start(names):
            announce(f"the runs take turns on the GPU, as NVIDIA's MPS could not be started: {reason}")
            yield {}
            return
        try:
            yield names
        finally:
            _control(names, text=f"quit -t {QUIT_SECONDS}")


def _start(names: dict[str, str]) -> str:
    """Start a daemon. Returns why that failed, or nothing."""
    if shutil.which(CONTROL) is None:
        return f"there is no program {CONTROL}"
    # A daemon answers only if it runs.
    return _control(names, "-d") or _control(names, text="get_default_active_thread_percentage")


def _control(names: dict[str, str], *arguments: str, text: str = "") -> str:
    """Call the daemon's program. Returns why that failed, or nothing."""
    log = Path(names[FOLDER]) / "control.log"
    try:
        # Not into a pipe, which the daemon would hold open.
        with log.open("w") as output:
            ended = subprocess.run(
                [CONTROL, *arguments],
                env=os.environ | names,
                input=f"{text}\n",
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=CONTROL_SECONDS,
            )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if ended.returncode == 0 else log.read_text(errors="replace").strip() or f"exit code {ended.returncode}"
