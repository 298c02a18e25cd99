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


def measure(folder: Path, repeats: int) -> list[dict[str, Any]]:
    paths = {"model": folder / "model", "missing": folder / "missing", "new": folder / "new", "text": folder / "text"}
    convert = ["convert", str(PACKAGED), "-o", str(paths["model"])]
    subprocess.run([sys.executable, "-m", "fastweights", *convert], check=True, capture_output=True)
    paths["text"].write_text("Some text.")
    rows = []
    for name, command in COMMANDS.items():
        runs = [seconds_of(command.format(**paths).split()) for _ in range(repeats)]
        rows.append({"command": name} | {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]})
        print(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="after")
    parser.add_argument("--out", type=Path, default=Path("results/cli_startup.json"))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    result = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {"versions_measured": {}}
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.repeats)
    result["versions_measured"][arguments.name] = provenance() | {"repeats": arguments.repeats, "commands": rows}
    write_result(arguments.out, {"what": "seconds until a command's message", "seed": 0, "tokens": 0} | result)


if __name__ == "__main__":
    main()
