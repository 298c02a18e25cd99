"""Compiles the kernels that a rule's forward and backward pass would launch, for a Hopper GPU that need not be there.

TRITON_INTERPRET=0 PYTHONPATH=tests python -m helpers.compile_kernels RULE ...
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastweights.ops.triton import launch, run_kernels
from fastweights.rules import RULES
from helpers.relative_error import op_inputs

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
}
SHARED_BYTES = 227 * 1024
# Triton 3.6 compiles such a shift of two packed values in 64 bits, so that the lower one ends in the upper one.
SPILLING = re.compile(r"shl nuw[a-z ]*<2 x i32> [^,]+, <i32 (?:3[01]|2\d)\b")


def type_of(x: Any) -> str:
    return TYPES[x.dtype] if isinstance(x, torch.Tensor) else "fp32" if isinstance(x, float) else "i32"


def is_aligned(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, int) and x % 16 == 0)


def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> Any:
    names = kernel.arg_names
    signature = {name: type_of(x) for name, x in zip(names, args)}  # noqa: B905
    constants = {(i,): options[name] for i, name in enumerate(names) if name in options}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(args) if is_aligned(x)}
    source = ASTSource(kernel, signature | dict.fromkeys(names[len(args) :], "constexpr"), constants, aligned)
    settings = {name: value for name, value in options.items() if name not in names}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert not SPILLING.search(compiled.asm["llir"]), f"{kernel.__name__}: a packed shift that spills"
    print(
        kernel.__name__,
        *(f"{name}={options[name]}" for name in ("REVERSE", "OUTPUT", "SAVE_STATES") if name in options),
    )
    return compiled


def compile_rule(rule: str) -> None:
    print(f"rule {rule}")
    cases = [(None, 20, torch.bfloat16), (torch.ones(1, 300, dtype=torch.bool), 20, torch.bfloat16)]
    for flags, m, dtype in [*cases, (None, 42, torch.float32), (None, 128, torch.bfloat16)]:
        inputs = op_inputs(rule, B=1, T=300, H=1, m=m, d=40, dtype=dtype)
        inputs["state"] = inputs["state"].float()
        leaves = {name: x.requires_grad_() for name, x in inputs.items()}
        gates = tuple(x for name, x in leaves.items() if name.endswith("logit"))
        y, end = run_kernels(RULES[rule], leaves["q"], leaves["k"], leaves["v"], gates, leaves["state"], flags, flags)
        torch.autograd.grad((y, end), list(leaves.values()), (torch.ones_like(y), torch.ones_like(end)))


def main() -> None:
    launch.run = compile_only  # type: ignore[assignment]
    launch.multiprocessors = lambda _: 132
    for rule in sys.argv[1:]:
        compile_rule(rule)


if __name__ == "__main__":
    main()
