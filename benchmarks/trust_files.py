"""Mutations of every kind of file: how many end how.

    python benchmarks/trust_files.py [--mutations 500] [--out results/trust_files.json]

tests/helpers/damaged_files.py has the mutations and the outcomes: the same result, another result, one error that names
the file, an error that does not name it, a traceback, or no end within a few seconds. An address space of 8 GB protects
the machine. What the result says of a version before files were checked stays as it is: it was measured with that
version's own helpers.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=500, help="of every kind of file")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "trust_files.json")
    options = parser.parse_args()
    from fastweights.utils.provenance import write_result

    kinds = measure(options.mutations)
    total = {name: sum(kind[name] for kind in kinds) for name in kinds[0] if name != "name"}
    found = json.loads(options.out.read_text()) if options.out.is_file() else {}
    result = {
        "what": "mutated files of every kind, by outcome",
        "mutations": options.mutations,
        "files": options.mutations * len(kinds),
        "seconds": SECONDS,
        "before": found.get("before"),
        "after": {"kinds": kinds, "total": total},
    }
    write_result(options.out, result)
    print(json.dumps(total, indent=1))


if __name__ == "__main__":
    main()
