"""Compiles the kernels that a rule's forward and backward pass would launch, for a Hopper GPU that need not be there.

TRITON_INTERPRET=0 python tests/compile_kernels.py RULE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from relative_error import op_inputs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastweights.ops.kernels import kernels, launch
from fastweights.rules import RULES

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int8: "*i8"}
SHARED_BYTES = 227 * 1024


def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
    names = kernel.arg_names
    signature = {name: TYPES[x.dtype] if isinstance(x, torch.Tensor) else "i32" for name, x in zip(names, args)}  # noqa: B905
    constants = {(i,): options[name] for i, name in enumerate(names) if name in options}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(args) if isinstance(x, torch.Tensor)}
    source = ASTSource(kernel, signature | dict.fromkeys(names[len(args) :], "constexpr"), constants, aligned)
    settings = {name: value for name, value in options.items() if name not in names}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
    assert compiled.metadata.shared <= SHARED_BYTES
    print(kernel.__name__, *(f"{name}={options[name]}" for name in ("BACK", "OUTPUT", "KEEP") if name in options))


def main() -> None:
    rule = sys.argv[1]
    launch.run = compile_only  # type: ignore[assignment]
    launch.multiprocessors = lambda _: 132
    for flags in (None, torch.ones(1, 300, dtype=torch.bool)):
        inputs = op_inputs(rule, B=1, T=300, H=1, m=20, d=40, dtype=torch.bfloat16)
        inputs["state"] = inputs["state"].float()
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        gates = tuple(x for name, x in leaves.items() if name.endswith("logit"))
        y, end = kernels(RULES[rule], leaves["q"], leaves["k"], leaves["v"], gates, leaves["state"], flags, flags)
        torch.autograd.grad((y, end), list(leaves.values()), (torch.ones_like(y), torch.ones_like(end)))


if __name__ == "__main__":
    main()
