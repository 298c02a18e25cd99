"""Compiles the window's training kernels for a Hopper GPU that need not be there, and prints what they need.

TRITON_INTERPRET=0 PYTHONPATH=tests python -m helpers.compile_training_window [WIDTH DTYPE]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from triton.backends.nvidia.compiler import get_ptxas

from fastweights.ops.triton import launch
from fastweights.ops.window import documents_of, window_attention
from helpers.compile_kernels import compile_only

# Bytes that a kernel may spill for each thread: reloading them costs less than smaller tiles.
MOST_SPILLED = 256
all_spilled: list[int] = []
WIDTHS, DTYPES = ("64", "128", "256"), ("bfloat16", "float16", "float32")


def measured(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
    compiled = compile_only(kernel, grid, args, **options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(compiled.asm["ptx"])
        ptx.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, spilled = (int(re.search(pattern, log)[1]) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill st"))  # type: ignore[index]
    used = f"{registers} registers, {spilled} bytes spilled, {compiled.metadata.shared} bytes shared"
    print(f"  {options['num_warps']} warps: {used}", flush=True)
    all_spilled.append(spilled)


def main() -> None:
    launch.run = measured  # type: ignore[assignment]
    widths, names = (sys.argv[1:2], sys.argv[2:3]) if sys.argv[1:] else (WIDTHS, DTYPES)
    for width in map(int, widths):
        for dtype in (getattr(torch, name) for name in names):
            print(f"d {width}, {dtype}")
            q, k, v = (torch.zeros(1, 300, n, width, dtype=dtype, requires_grad=True) for n in (9, 3, 3))
            documents = documents_of(torch.zeros(1, 300, dtype=torch.bool))
            y = window_attention(q, k, v, 64, 4, documents, 30.0)
            y.sum().backward()
    assert max(all_spilled) <= MOST_SPILLED


if __name__ == "__main__":
    main()
