"""How much longer the first forward and backward of decay take than the second in a new process, and how many kernels
are compiled for it. Prints JSON.

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

CASES = {"m 32, d 64": (32, 64), "m 48, d 80": (48, 80)}


def seconds_of_a_call(m: int, d: int, device: str, backend: str) -> float:
    inputs, _ = op_inputs("decay", m, Shape(8, 512, 12, d, 1, 1), torch.bfloat16, 2.0, device)
    tensors = [x.requires_grad_() for name, x in inputs.items() if name != "state"]
    synchronize(device)
    started = time.perf_counter()
    y, _ = ops.decay(*tensors, backend=backend)
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
    for name, (m, d) in CASES.items():
        compiled.clear()
        first, second = (seconds_of_a_call(m, d, device, backend) for _ in range(2))
        found[name] = {"first seconds": first, "second seconds": second, "waited seconds": first - second}
        found[name]["kernels"] = len(compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
