"""Which layers of the packaged model, right after its swap, gain most as attention, with and without fitting first.

python benchmarks/rank_packaged.py [--out results/rank_packaged.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fastweights
from fastweights.utils.provenance import write_result

PACKAGED = Path(fastweights.__file__).parent / "packaged"
SETTINGS = ("--gate-init", "log", "--window", "32", "--train-length", "512")
ASKED = {"fitted": ("--fit", "--keep", "3"), "unfitted": ()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rank_packaged.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        swapped = Path(folder) / "swapped"
        run("convert", str(PACKAGED), "-o", str(swapped), *SETTINGS)
        for name, asked in ASKED.items():
            output = Path(folder) / f"{name}.json"
            run("rank", str(swapped), "--data", str(PACKAGED / "validation.txt.xz"), "-o", str(output), *asked)
            found[name] = json.loads(output.read_text())
    first = found["fitted"]
    shared = {name: first[name] for name in ("kind", "seed", "tokens", "model", "data")}
    own = ("settings", "kl", "layers", "chosen", "kl_after", "seconds")
    what = "which layers of the packaged model, right after its swap, gain most as attention: fastweights rank"
    write_result(options.out, {"what": what} | shared | {n: {k: r[k] for k in own} for n, r in found.items()})


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "fastweights", *arguments], check=True)


if __name__ == "__main__":
    main()
