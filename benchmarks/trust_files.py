"""Mutations of every kind of file, before and after files were checked: how many end how.

    python benchmarks/trust_files.py [--mutations 500] [--before COMMIT] [--out results/trust_files.json]

tests/helpers/damaged_files.py has the mutations and the outcomes: the same result, another result, one error that names
the file, an error that does not name it, a traceback, or no end within a few seconds. Both commits read the same
mutations of files that they wrote themselves. An address space of 8 GB protects the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEFORE = "4c795771f415"
SECONDS = 2.0
ADDRESS_SPACE = 8 * 2**30


def measure(mutations: int) -> list[dict[str, Any]]:
    """Outcomes of every kind of file with the fastweights that is imported."""
    from helpers import damaged_files as damaged

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    outcomes = (damaged.SAME, damaged.CHANGED, damaged.REFUSED, damaged.UNNAMED, damaged.TRACEBACK, damaged.HANG)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in damaged.file_kinds(Path(folder)).items():
            counts = damaged.count_outcomes(kind, mutations, SECONDS)
            failures = sum(count for outcome, count in counts.items() if damaged.is_failure(kind, outcome))
            found.append({"name": name, **{outcome: counts[outcome] for outcome in outcomes}, "failures": failures})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def measure_at(source: Path, mutations: int) -> dict[str, Any]:
    """The same in a process of its own, with the package of another folder. Every total is over all kinds."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT / "tests")]),
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, __file__, "--measure", "--mutations", str(mutations)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=source)
    kinds = json.loads(done.stdout.splitlines()[-1])
    total = {name: sum(kind[name] for kind in kinds) for name in kinds[0] if name != "name"}
    return {"kinds": kinds, "total": total}


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=500, help="of every kind of file")
    parser.add_argument("--before", default=BEFORE, help="commit to compare with")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "trust_files.json")
    parser.add_argument("--measure", action="store_true", help="print the outcomes of the package that is imported")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.mutations)))
        return
    from fastweights.utils.provenance import write_result

    with tempfile.TemporaryDirectory() as folder:
        git("worktree", "add", "--detach", folder, options.before)
        try:
            before = measure_at(Path(folder), options.mutations)
        finally:
            git("worktree", "remove", "--force", folder)
    after = measure_at(ROOT, options.mutations)
    result = {
        "what": "mutated files of every kind, by outcome",
        "mutations": options.mutations,
        "files": options.mutations * len(after["kinds"]),
        "seconds": SECONDS,
        "before": {"commit": git("rev-parse", "--short=12", options.before)} | before,
        "after": after,
    }
    write_result(options.out, result)
    print(json.dumps({"before": before["total"], "after": after["total"]}, indent=1))


if __name__ == "__main__":
    main()
