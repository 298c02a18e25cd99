"""Measurements on a GPU: precision and speed of the operations, a training step and decoding, beside other libraries.

    python benchmarks/gpu.py [--parts precision,kernels,fla,first_call,training,decode] [--out results/gpu.json]
    python benchmarks/gpu.py --device cpu --backend chunked --small --out OUT    a test of the script, no result

Each operation is first compared with the float64 loop (models: with the chunked form). What fails is not timed. Every
part runs in its own process and writes each measurement at once, beside those of other parts of the same commit. Times
are medians of CUDA events with the cache flushed before each run; "graph" is the same with all launches in a CUDA
graph. Memory is the allocator's peak beyond the inputs.
flash-linear-attention is measured where it can be imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_models
import gpu_ops
import gpu_tables
from measure import Settings, first_line

from fastweights.utils.provenance import provenance, write_result

PARTS = {
    "precision": gpu_ops.precision,
    "kernels": gpu_ops.kernels,
    "fla": gpu_ops.fla,
    "first_call": gpu_ops.first_call,
    "training": gpu_models.training,
    "decode": gpu_models.decode,
}
# A part looks at its time between measurements; one that hangs is ended this much later.
GRACE_SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", default="results/gpu.json", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="triton", help="of the operations; models take what the package chooses")
    parser.add_argument("--small", action="store_true", help="small shapes, to test the script")
    parser.add_argument("--part-seconds", type=float, default=220, help="after which a part leaves out further peers")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - PARTS.keys():
        parser.error(f"--parts: {', '.join(sorted(unknown))} not known; choose from {', '.join(PARTS)}")
    if options.here:
        run(options.here, options)
        return
    for name in names:
        command = [sys.executable, __file__, *sys.argv[1:], "--here", name]
        try:
            subprocess.run(command, timeout=options.part_seconds + GRACE_SECONDS, check=True)
        except subprocess.SubprocessError as error:
            print(f"{name} ended early: {error}", flush=True)
    gpu_tables.show_targets(json.loads(options.out.read_text(encoding="utf-8")))


def run(name: str, options: argparse.Namespace) -> None:
    """One part, in this process."""
    started = time.monotonic()
    settings = Settings(options.device, options.backend, options.small, started + options.part_seconds)
    found: dict[str, Any] = {}
    try:
        for found in PARTS[name](settings):
            save(name, found | {"finished": False}, options)
        found = found | {"finished": True}
    except Exception as error:
        found = found | {"finished": False, "error": first_line(error)}
        raise
    finally:
        seconds = time.monotonic() - started
        result = save(name, found | {"seconds": seconds}, options)
    gpu_tables.show_part(name, result["parts"][name])


def save(name: str, found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Write a part beside the others of the same commit and settings."""
    own = {"device": options.device, "backend": options.backend, "small": options.small}
    held = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    same = held.get("commit") == provenance()["commit"] and held.get("settings") == own
    parts = (held["parts"] if same else {}) | {name: found}
    result = {
        "what": "precision and speed of the operations, training and decoding on a GPU, beside their peers",
        "seed": 0,
        "tokens": 32 * 1024,
        "settings": own,
        "targets": gpu_tables.targets(parts),
        "parts": parts,
    }
    write_result(options.out, result)
    return result


if __name__ == "__main__":
    main()
