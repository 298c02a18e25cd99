"""Which layers of the packaged model, right after its conversion, gain most as attention, with and without --fit.

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
SETTINGS = ("--preset", "paper", "--gate-init", "log", "--window", "32", "--train-length", "512")
ASKED = {"fitted": ("--fit", "--keep", "3"), "unfitted": ()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rank_packaged.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "converted"
        run("convert", str(PACKAGED), "-o", str(converted), *SETTINGS)
        for name, asked in ASKED.items():
            output = Path(folder) / f"{name}.json"
            run("rank", str(converted), "--data", str(PACKAGED / "validation.txt.xz"), "-o", str(output), *asked)
            found[name] = json.loads(output.read_text())
    own = ("settings", "kl", "layers", "chosen", "kl_after", "seconds")
    what = "which layers of the packaged model, right after its conversion, gain most as attention: fastweights rank"
    unfitted = {name: found["unfitted"][name] for name in own}
    write_result(options.out, {"what": what} | found["fitted"] | {"unfitted": unfitted})


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "fastweights", *arguments], check=True)


if __name__ == "__main__":
    main()
