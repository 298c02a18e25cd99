"""A prompt of a million tokens in constant memory: the packaged model, converted, reads random tokens in chunks.

    python benchmarks/long_prompt.py [--lengths 65536,1048576] [--device cpu] [--out results/long_prompt.json]

On a CPU memory is the process's peak beyond what it held before reading, on a GPU the allocator's; each length is read
in a process of its own. On a CPU the tokens themselves, 8 bytes each, are counted in.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from fastweights.conversion import convert
from fastweights.decode.prefill import PREFILL_CHUNK, prefill
from fastweights.loading import load
from fastweights.quickstart import PACKAGED, SETTINGS
from fastweights.utils.provenance import write_result


def read(length: int, device: str) -> dict[str, float]:
    model = convert(load(PACKAGED, dtype="float32").eval(), SETTINGS).to(device)
    generator = torch.Generator().manual_seed(0)
    prefill(model, torch.randint(2048, (2 * PREFILL_CHUNK,), generator=generator))
    before = _peak(device)
    ids = torch.randint(2048, (length,), generator=generator)
    started = time.perf_counter()
    logits, state = prefill(model, ids, progress=True)
    seconds = time.perf_counter() - started
    assert torch.isfinite(logits).all() and int(state.seen) == length
    more = _peak(device) - before
    return {"length": length, "seconds": seconds, "state bytes": state.nbytes, "more peak bytes": more}


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=lambda s: [int(x) for x in s.split(",")], default=[65536, 1048576])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("results/long_prompt.json"))
    parser.add_argument("--one", type=int, help="read this many and print the figures")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(read(options.one, options.device)))
        return
    points = []
    for length in options.lengths:
        command = [sys.executable, __file__, "--one", str(length), "--device", options.device]
        points.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(points[-1], flush=True)
    what = f"reading a prompt in chunks of {PREFILL_CHUNK} tokens with the packaged model, decay, m 32, window 32"
    write_result(options.out, {"what": what, "seed": 0, "tokens": sum(options.lengths), "points": points})


if __name__ == "__main__":
    main()
