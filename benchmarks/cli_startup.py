"""How long commands take until their first message: errors about paths, help and `info`.

    python benchmarks/cli_startup.py --name after [--out results/cli_startup.json] [--repeats 5]

Each command runs in a process of its own, as a user types it. The CPU time of the process and its children is measured,
which other programs on the machine change little; the median of the repeats counts. To measure another version, start
in its folder with it first in PYTHONPATH, and give it another --name.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fastweights.quickstart import PACKAGED
from fastweights.utils.provenance import provenance, write_result

COMMANDS = {
    "--help": "--help",
    "info": "info {model}",
    "convert, missing model": "convert {missing} -o {new}",
    "train, missing data": "train {model} --data {missing} -o {new}",
    "eval, missing model": "eval {missing} --data {text}",
    "generate, missing model": "generate {missing} --prompt x",
    "report, missing file": "report {missing}",
}


def seconds_of(arguments: list[str]) -> dict[str, float]:
    """CPU and wall-clock seconds of a command."""
    before, started = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "fastweights", *arguments], capture_output=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu": cpu, "wall": time.perf_counter() - started}


def measure(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """The median of each command's seconds."""
    paths = {"model": folder / "model", "missing": folder / "missing", "new": folder / "new", "text": folder / "text"}
    convert = ["convert", str(PACKAGED), "-o", str(paths["model"])]
    subprocess.run([sys.executable, "-m", "fastweights", *convert], check=True, capture_output=True)
    paths["text"].write_text("Some text.")
    medians = {}
    for name, command in COMMANDS.items():
        runs = [seconds_of(command.format(**paths).split()) for _ in range(repeats)]
        medians[name] = {kind: round(statistics.median(run[kind] for run in runs), 2) for kind in runs[0]}
        print(name, medians[name])
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="after")
    parser.add_argument("--out", type=Path, default=Path("results/cli_startup.json"))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    earlier = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        measured: dict[str, Any] = {"repeats": arguments.repeats, "commands": measure(Path(folder), arguments.repeats)}
    versions = {name: part for name, part in earlier.items() if isinstance(part, dict) and "commands" in part}
    versions[arguments.name] = provenance() | measured
    write_result(arguments.out, {"what": "seconds of commands", "seed": 0, "tokens": 0} | versions)


if __name__ == "__main__":
    main()
