"""Compiles the step of a window for a Hopper GPU that need not be there.

TRITON_INTERPRET=0 PYTHONPATH=tests python -m helpers.compile_window
"""

from __future__ import annotations

import torch

from fastweights.ops import step
from fastweights.ops.triton import decode_step
from helpers.compile_kernels import TYPES
from helpers.compile_linear import Compiler


def main() -> None:
    TYPES[torch.int64] = "*i64"
    compiler = decode_step.window_kernel = Compiler(decode_step.window_kernel)  # type: ignore[assignment]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width, d in ((64, 64), (256, 64), (512, 64), (512, 200)):
            rings, q, k = torch.zeros(4, 3, width, d), torch.zeros(4, 9, d), torch.zeros(4, 3, d)
            rings, q, k = (x.to(dtype) for x in (rings, q, k))
            angles = torch.zeros(4, d // 2)
            rotary = step.Rotary(angles, angles, torch.zeros(3, d // 2, dtype=torch.long))
            mix = (torch.zeros_like(q), torch.zeros(4, 9, dtype=dtype))
            step.window_kernel(rings, rings, torch.zeros(4, dtype=torch.long), q, k, k, q, rotary, 30.0, *mix, 4, True)
            shared, options = compiler.compiled.metadata.shared, compiler.options
            assert shared <= step.WINDOW_BYTES * options["BLOCK_W"] * options["BLOCK_D"]
            print(f"{shared} bytes shared, {options['num_warps']} warps", flush=True)


if __name__ == "__main__":
    main()
