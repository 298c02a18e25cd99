"""What a rule's kernels compile to for a Hopper GPU: instructions, registers, shared memory. Needs no GPU.

    python benchmarks/kernel_code.py [--rule decay] [--m 32] [--dtype bfloat16] [--set prepare=8,1] [--out FILE]

At d 64 and 32 x 1024 tokens of 12 heads, with the launch settings of blocks.json. Loop instructions are those between
the longest backward branch and its target, times the program's warps, over the tokens of a tile: what one token costs
in warps' issue slots. Kernels without a loop over tokens have their whole code counted in the same way.
--set tries another launch setting for a kernel: warps,stages[,registers[,rows]].
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastweights.ops.triton import blocks, launch
from fastweights.ops.triton.compile import record_calls
from fastweights.rules import DELTA_RULES, RULES
from fastweights.utils.provenance import write_result

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BATCH, LENGTH, HEADS, D = 32, 1024, 12, 64
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8"}


def launches(rule: str, m: int, dtype: torch.dtype, with_flags: bool) -> list[Any]:
    """The kernel calls of a forward and a backward pass without a state at the start."""
    launch.multiprocessors = lambda _: 132  # type: ignore[assignment]
    options: dict[str, Any] = {"dtype": dtype, "device": "meta"}
    widths = {"m": m, "d": D, "1": 1}
    q, k = (torch.empty(BATCH, LENGTH, HEADS, m, **options) for _ in range(2))
    v = torch.empty(BATCH, LENGTH, HEADS, D, **options)
    gates = [torch.empty(BATCH, LENGTH, HEADS, widths[width], **options) for width in RULES[rule].gates.values()]
    flags = torch.empty(BATCH, LENGTH, dtype=torch.int8, device="meta") if with_flags else None
    plan = launch.Plan(launch.problem_shape(rule, q, k, v, flags))

    def both() -> None:
        y, end, saved = launch.forward(plan, q, k, v, gates, flags, None, True)
        launch.backward(plan, q, k, v, gates, flags, saved, y, end)

    return record_calls(both)


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False))
    signature = {name: TYPES[x.dtype] if isinstance(x, torch.Tensor) else "i32" for name, x in given.items()}
    constants = {(i,): options[name] for i, name in enumerate(names) if name in options}
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(args) if isinstance(x, torch.Tensor)}
    source = ASTSource(kernel, signature | dict.fromkeys(names[len(args) :], "constexpr"), constants, aligned)
    settings = {name: value for name, value in options.items() if name not in names}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)


def figures(code: Any, tokens: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        listing, usage = (
            subprocess.run([CUOBJDUMP, flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("-sass", "-res-usage")
        )
    loops = [
        (int(at, 16) - int(target, 16)) // 16
        for at, target in re.findall(r"/\*([0-9a-f]{4,5})\*/[^;\n]*\bBRA\b[^;\n]*0x([0-9a-f]+)", listing)
    ]
    whole = len(re.findall(r"/\*[0-9a-f]{4,5}\*/\s+\S", listing))
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
    warps = code.metadata.num_warps
    return {
        "loop instructions a token": max(loops, default=0) * warps / tokens,
        "instructions a token": whole * warps / tokens,
        "registers": registers,
        "spilled bytes": stack,
        "shared bytes": code.metadata.shared,
        "warps": warps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=RULES, default="decay")
    parser.add_argument("--m", type=int, default=32)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--flags", action="store_true", help="padding or packed documents, as in training")
    parser.add_argument("--set", action="append", default=[], metavar="KERNEL=WARPS,STAGES[,REGISTERS[,ROWS]]")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dtype, family = getattr(torch, options.dtype), "wy" if options.rule in DELTA_RULES else "tiled"
    record = blocks.RECORD[blocks.key(family, "16" if dtype == torch.bfloat16 else "32", blocks.padded(options.m))]
    for setting in options.set:
        kernel, choice = setting.split("=")
        record[kernel] = [int(x) for x in choice.split(",")]
    found = {}
    for kernel, _, args, given in launches(options.rule, options.m, dtype, options.flags):
        if "BM" in given:  # the others are elementwise
            name, tokens = kernel.__name__, given.get("TILE") or given["CHUNK"]
            found[name] = figures(compiled(kernel, args, given), tokens)
            print(f"{name:14}", found[name], flush=True)
    if options.out:
        what = f"{options.rule}'s kernels compiled for sm_90, {options.dtype}, m {options.m}, d {D}"
        what += ", with flags" if options.flags else ""
        write_result(options.out, {"what": what, "seed": 0, "tokens": 0, "kernels": found})


if __name__ == "__main__":
    main()
