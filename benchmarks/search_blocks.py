"""The small search behind fastweights/ops/triton/blocks.json: warps, pipeline depth, registers and rows of each kernel.

    python benchmarks/search_blocks.py [--out blocks.json] [--bm 16,32] [--families tiled,wy] [--widths 16,32]
                                       [--kernels gradients]

For each padded m, family of rules and width of an element, the pass that a kernel belongs to is timed at 32 x 1024
tokens of 12 heads of d 64, with the other kernels as recorded. Flags of padding and documents are on, as in training:
with them a kernel needs more registers. Candidates compile in parallel processes first. A choice that fails, or whose
output differs from the first candidate's, is discarded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from fastweights.ops.triton import blocks, launch
from fastweights.rules import RULES

BATCH, LENGTH, HEADS, D = 32, 1024, 12, 64
FAMILIES = {"tiled": "decay", "wy": "gated_delta"}
DTYPES = {"16": torch.bfloat16, "32": torch.float32}
# Warps, pipeline depth, most registers of a thread and, for some of wy.py's kernels, rows of the state at a time.
BY_CHUNK = [(4, 2, 0, 32), (4, 3, 0, 32), (4, 1, 0, 32), (2, 2, 0, 16), (4, 2, 0, 16), (4, 2, 0, 64), (8, 2, 0, 64)]
CANDIDATES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "tiled": {
        "forward": [(4, 3, 168), (4, 3, 128), (4, 2, 168), (8, 3, 0), (8, 2, 128), (4, 3, 0)],
        "backward": [(4, 3, 0), (4, 2, 0), (4, 3, 168), (4, 2, 168), (8, 2, 0), (8, 3, 128), (8, 1, 0)],
        "segments": [(4, 3, 168), (4, 3, 128), (8, 2, 128), (4, 2, 0)],
    },
    "wy": {
        "prepare": [(4, 1, 0), (4, 1, 168), (4, 1, 128), (8, 1, 128), (2, 1, 0)],
        "forward": BY_CHUNK,
        "backward": BY_CHUNK,
        "gradients": [(4, 1, 255, 32), (4, 1, 255, 16), (8, 1, 255, 32), (8, 1, 255, 16), (8, 1, 168, 32)],
    },
}
REPEATS = 7


def inputs(rule: str, m: int, dtype: torch.dtype, batch: int, length: int) -> list[Any]:
    torch.manual_seed(0)
    widths = {"m": m, "d": D, "1": 1}

    def draw(width: int) -> torch.Tensor:
        return torch.randn(batch, length, HEADS, width, device="cuda").to(dtype)

    q, k, v, dy = draw(m), torch.nn.functional.normalize(draw(m), dim=-1), draw(D), draw(D)
    return [q, k, v, [draw(widths[width]) + 2 for width in RULES[rule].gates.values()], dy]


def pass_of(kernel: str, rule: str, m: int, dtype: torch.dtype, batch: int, length: int) -> Any:
    """A function that runs the kernel (the segments': at a length that is split) and returns what it makes."""
    if kernel == "segments":
        batch, length = max(1, batch // 16), length * 16
    q, k, v, gates, dy = inputs(rule, m, dtype, batch, length)
    flags = torch.zeros(batch, length, dtype=torch.int8, device="cuda")
    plan = launch.Plan(launch.problem_shape(rule, q, k, v, flags))
    if kernel in ("prepare", "forward"):
        return lambda: launch.forward(plan, q, k, v, gates, flags, None, True)[:2]
    _, end, saved = launch.forward(plan, q, k, v, gates, flags, None, True)
    dend = torch.randn_like(end)
    if kernel in ("backward", "gradients"):
        return lambda: launch.backward(plan, q, k, v, gates, flags, saved, dy, dend)
    return lambda: [
        launch._segment_boundaries(
            plan, False, plan.segments, plan.segment_length, k, v, gates, flags, torch.zeros_like(end)
        )
    ]


def with_choice(kernel: str, family: str, width: str, bm: int, choice: tuple[int, ...]) -> None:
    """Record a candidate, in this process alone."""
    blocks.RECORD[blocks.key(family, width, bm)][kernel] = list(choice)


def compile_some(jobs: list[tuple]) -> None:
    for kernel, family, width, bm, choice in jobs:
        with_choice(kernel, family, width, bm, choice)
        try:
            pass_of(kernel, FAMILIES[family], bm, DTYPES[width], 4, 256)()
            torch.cuda.synchronize()
        except Exception as error:  # the timing reports it
            print(kernel, family, width, bm, choice, str(error).splitlines()[0][:100], flush=True)
            if "illegal" in str(error):
                return


def milliseconds(run: Any) -> float:
    for _ in range(2):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(3_000_000)  # the launches queue up behind this, so Python's time is not measured
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def search(kernel: str, family: str, width: str, bm: int, tried: list[dict[str, Any]]) -> None:
    best, expected = None, None
    for choice in CANDIDATES[family][kernel]:
        with_choice(kernel, family, width, bm, choice)
        try:
            run = pass_of(kernel, FAMILIES[family], bm, DTYPES[width], BATCH, LENGTH)
            found = [x.float() for x in run()]
            expected = found if expected is None else expected
            off = max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, expected, strict=True))
            time = milliseconds(run) if off < 1e-2 else float("inf")
        except Exception as error:
            print(kernel, family, width, bm, choice, "failed:", str(error).splitlines()[0][:100], flush=True)
            if "illegal" in str(error):
                raise
            continue
        tried.append({"kernel": kernel, "family": family, "width": width, "bm": bm, "choice": choice, "ms": time})
        best = min(best or (time, choice), (time, choice))
    assert best is not None, f"no candidate of {kernel} runs for {family}, {width} bits, m {bm}"
    with_choice(kernel, family, width, bm, best[1])
    print(f"{kernel:9} {family:6} {width} bits, m {bm:3}: {best[0]:.3f} ms with {best[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(blocks.__file__).with_name("blocks.json"))
    parser.add_argument("--bm", type=lambda s: [int(x) for x in s.split(",")], default=[16, 32, 64, 128])
    parser.add_argument("--families", type=lambda s: s.split(","), default=list(FAMILIES))
    parser.add_argument("--widths", type=lambda s: s.split(","), default=list(DTYPES))
    parser.add_argument("--kernels", type=lambda s: s.split(","), help="by default all")
    options = parser.parse_args()
    kinds = [
        (kernel, family, width, bm)
        for family, width, bm in itertools.product(options.families, options.widths, options.bm)
        for kernel in CANDIDATES[family]
        if kernel in (options.kernels or CANDIDATES[family])
    ]
    jobs = [(*kind, choice) for kind in kinds for choice in CANDIDATES[kind[1]][kind[0]]]
    workers = min(len(jobs), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=compile_some, args=(jobs[i::workers],)) for i in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    tried: list[dict[str, Any]] = []
    for kind in kinds:
        search(*kind, tried)
        options.out.write_text(json.dumps(blocks.RECORD, indent=1) + "\n")
    options.out.with_suffix(".tried.json").write_text(json.dumps(tried) + "\n")


if __name__ == "__main__":
    main()
