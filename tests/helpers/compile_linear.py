"""Compiles the linear layers of a decoding step for a Hopper GPU that need not be there, and looks whether a copy could
overwrite what the tensor cores still read.

TRITON_INTERPRET=0 PYTHONPATH=tests python -m helpers.compile_linear [ROWS ...]
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from fastweights.ops import linear
from fastweights.ops.triton import decode_linear
from helpers.compile_kernels import compile_only

# columns, inner size, epilogue; each without and with a norm's sums that are given or handed on
LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qkv": (2016, 576, dict(norm="rms")),
    "outer": (576, 576, dict(add=True)),
    "up": (1536, 576, dict(norm="rms", activation="silu", gated=True)),
    "down": (576, 1536, dict(add=True)),
    "head": (49152, 576, dict(norm="rms")),
    "centered": (2048, 768, dict(norm="layer", activation="gelu", biased=True)),
    "centered outer": (768, 768, dict(biased=True, add=True, handed_on="layer")),
    "large": (8192, 2048, dict(norm="rms")),
}
COPY, DOT, WAIT = "ttg.async_copy_global_to_local", "ttng.warp_group_dot", "ttng.warp_group_dot_wait"


class Compiler:
    """In place of the kernel: compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_it(*args: Any, **options: Any) -> None:
            self.compiled, self.options = compile_only(self.kernel, grid, args, **options), options

        return compile_it


def check_pipeline(ir: str, stages: int) -> str:
    """Check that the copies of an iteration overwrite no tile in use.

    An iteration multiplies tile t and copies tile t + stages - 1 to the buffer of tile t - 1. Products of this
    iteration may be under way when the copies start, but none of an earlier one.
    """
    if DOT not in ir:
        return "no warp groups"
    start = ir.rindex("scf.for", 0, ir.index(DOT))
    loop = ir[start : ir.index("scf.yield", start)]
    found = re.findall(rf"({re.escape(COPY)}|{re.escape(DOT)}|{re.escape(WAIT)})\b(?:.*pendings = (\d+))?", loop)
    order = [operation for operation, _ in found]
    dots, copies = order.count(DOT), order.count(COPY)
    assert order[len(order) - copies - 1 :] == [WAIT] + [COPY] * copies, order
    pending = int(found[-copies - 1][1])
    buffers = [int(count) for count in re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ir)]
    if pending:
        assert pending <= dots, f"{pending} of {dots} products pending"
        assert buffers == [stages] * copies, f"{stages} stages, buffers: {buffers}"
    return f"{dots} products, {pending} pending, buffers {buffers}"


def compile_layer(name: str, rows: int, dtype: torch.dtype, passed: bool) -> None:
    n, k, around = LAYERS[name]
    kind, gated = around.get("norm"), around.get("gated", False)
    norm = linear.Norm(torch.ones(k), torch.ones(k) if kind == "layer" else None, 1e-5, kind == "layer")
    weight = torch.zeros(n * (2 if gated else 1), k, dtype=dtype)
    bias = torch.zeros(len(weight), dtype=dtype) if around.get("biased") else None
    activation = around.get("activation", "none")
    layer = linear.FusedLinear(weight, bias, norm if kind else None, activation, gated, kernel=True, overlap=True)
    sums = None
    if passed:
        centered = (around.get("handed_on") or kind) == "layer"
        sums = linear.NormSums(rows, k if kind else n, centered, weight.device)
        sums.parts = -(-k // 16)  # the most there can be
    compiler = Compiler(decode_linear.linear_kernel)
    decode_linear.linear_kernel = compiler  # type: ignore[assignment]
    try:
        layer(torch.zeros(rows, k, dtype=dtype), torch.zeros(rows, n, dtype=dtype), around.get("add", False), sums)
    finally:
        decode_linear.linear_kernel = compiler.kernel
    compiled, options = compiler.compiled, compiler.options
    tile = "x".join(str(options[x]) for x in ("ROWS", "COLUMNS", "BLOCK_K", "SPLIT", "num_warps", "num_stages"))
    found = check_pipeline(compiled.asm["ttgir"], options["num_stages"])
    variant = "given" if options["NORM_PARTS"] else "handed on" if options["WRITE_SUMS_FOR"] != "none" else "alone"
    print(name, variant, rows, str(dtype)[6:], tile, f"{compiled.metadata.shared} bytes,", found, flush=True)


def main() -> None:
    for rows in map(int, sys.argv[1:] or ["2", "32", "256"]):
        for name in LAYERS:
            for passed in (False, True):
                compile_layer(name, rows, torch.bfloat16, passed)


if __name__ == "__main__":
    main()
