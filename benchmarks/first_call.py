"""How much longer the first forward and backward of each operation take than the second in a new process, and how many
kernels are compiled for it. Prints JSON.

TRITON_CACHE_DIR=EMPTY_FOLDER python benchmarks/first_call.py cuda triton
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from gpu_ops import Shape, op_inputs
from measure import synchronize

from fastweights import ops

# rule, dtype, m, d
CASES = [("decay", "bfloat16", 32, 64), ("decay", "bfloat16", 48, 80)]
CASES += [(rule, dtype, 64, 64) for rule in ("gated_delta", "delta", "decay") for dtype in ("bfloat16", "float32")]


def seconds_of_a_call(rule: str, dtype: str, m: int, d: int, device: str, backend: str) -> float:
    inputs, _ = op_inputs(rule, m, Shape(8, 512, 12, d, 1, 1), getattr(torch, dtype), 2.0, device)
    tensors = [x.requires_grad_() for name, x in inputs.items() if name != "state"]
    synchronize(device)
    started = time.perf_counter()
    y, _ = getattr(ops, rule)(*tensors, backend=backend)
    torch.autograd.grad(y, tensors, torch.ones_like(y))
    synchronize(device)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("backend", choices=("triton", "chunked"))
    options = parser.parse_args()
    device, backend = options.device, options.backend
    compiled: list[str] = []
    if backend == "triton":
        import triton

        triton.knobs.compilation.listener = lambda src, **_: compiled.append(src.name)
    warm = torch.ones(8, 8, device=device, requires_grad=True)
    (warm @ warm).sum().backward()
    found = {}
    for rule, dtype, m, d in CASES:
        compiled.clear()
        name = f"{rule}, {dtype}, m {m}, d {d}"
        first, second = (seconds_of_a_call(rule, dtype, m, d, device, backend) for _ in range(2))
        found[name] = {"first seconds": first, "second seconds": second, "waited seconds": first - second}
        found[name]["kernels"] = len(compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
