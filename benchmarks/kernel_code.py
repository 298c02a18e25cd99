"""What decay's kernels compile to for a Hopper GPU: instructions in the loop and registers. Needs no GPU.

    python benchmarks/kernel_code.py [--out results/kernel_code.json]

bfloat16, m 32, d 64, as recorded in blocks.json. Instructions are those between the longest backward branch and its
target, times the program's warps, over the tokens of a tile: what one token costs in warps' issue slots.
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

from fastweights.ops.triton import launch, tiled
from fastweights.ops.triton.blocks import SEGMENT_TILE, TILE
from fastweights.utils.provenance import write_result

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOAT32 = {"starts", "end", "dends", "dstart", "sums", "decays"}
LAUNCHES = {
    "forward": (tiled.forward, {"HAS_START": False, "SAVE_STATES": False, "TILE": TILE}),
    "backward": (tiled.backward, {"TILE": TILE}),
    "segments": (tiled.segment_sums, {"REVERSE": False, "TILE": SEGMENT_TILE}),
}


def compiled(name: str) -> tuple[Any, int]:
    kernel, kinds = LAUNCHES[name]
    shape = launch.ProblemShape("decay", 32, 1024, 12, 32, 64, torch.bfloat16, False, torch.device("cpu"))
    plan = launch.Plan(shape)
    choice = getattr(plan.blocks, name)
    options = {**plan.constants, **kinds, **choice.options}
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        known = "constexpr" if argument in options else "i32" if argument in ("length", *tiled.SIZES) else None
        pointer = "*fp32" if argument in FLOAT32 else "*i8" if argument == "flags" else "*bf16"
        signature[argument] = known or pointer
    places = {argument: i for i, argument in enumerate(kernel.arg_names)}
    constants = {(places[key],): value for key, value in options.items() if key in places}
    aligned = {(places[key],): [["tt.divisibility", 16]] for key, kind in signature.items() if kind[0] == "*"}
    settings = {key: value for key, value in options.items() if key not in places}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings), choice.warps


def figures(name: str) -> dict[str, float]:
    code, warps = compiled(name)
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
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
    tokens = SEGMENT_TILE if name == "segments" else TILE
    per_token = max(loops) * warps / tokens
    return {"instructions a token": per_token, "registers": registers, "spilled bytes": stack, "warps": warps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/kernel_code.json"))
    options = parser.parse_args()
    found = {name: figures(name) for name in LAUNCHES}
    for name, row in found.items():
        print(name, row)
    what = "decay's kernels compiled for sm_90, bfloat16, m 32, d 64: warp instructions a token in the loop over tiles"
    write_result(options.out, {"what": what, "seed": 0, "tokens": 0, "kernels": found})


if __name__ == "__main__":
    main()
