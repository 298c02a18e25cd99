"""Applies each edit to a copy of the repository and runs its tests there; a test must fail.

PYTHONPATH=tests python -m mutations [--only TEXT] [-o results/mutations.json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 900


class Failures:
    """A pytest plugin that collects the names of tests that fail."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def mutated(package: Path, mutation: Mutation) -> tuple[Path, str]:
    """The file that an edit changes, and its new content."""
    found = []
    for path in sorted(package.rglob("*.py")):
        if mutation.file in str(path.relative_to(package)):
            content, count = re.subn(mutation.find, mutation.replace, path.read_text())
            found += [(path, content)] * count
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(package)) for path, _ in found)
        raise SystemExit(f"{mutation.name}: {mutation.find!r} matches {len(found)} times, not once: {places}")
    return found[0]


def run_tests(copy: Path, arguments: list[str], output: Path) -> None:
    """In a process of its own: runs tests of the copy with the copy's package, and writes down which failed."""
    import pytest

    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    printed = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    failures = Failures()
    options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", f"--rootdir={copy}"]
    status = pytest.main([*options, *arguments], plugins=[failures])
    import fastweights

    assert Path(fastweights.__file__).is_relative_to(copy), fastweights.__file__
    output.write_text(json.dumps({"status": int(status), "failed": failures.names}))


def check(mutation: Mutation | None, tests: list[str], root: Path = ROOT) -> dict[str, Any]:
    """Which test notices an edit (None: no edit, as a control)."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy, output = Path(folder) / "repository", Path(folder) / "outcome.json"
        left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "site")
        shutil.copytree(root, copy, ignore=left_out, symlinks=True)
        if mutation is not None:
            path, content = mutated(copy / "fastweights", mutation)
            path.write_text(content)
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, tests, output))
        process.start()
        process.join(TIMEOUT_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        outcome = json.loads(output.read_text()) if output.is_file() else {"status": -1, "failed": []}
        if outcome["status"] not in (0, 1):
            print(output.with_suffix(".log").read_text()[-1000:])
    return outcome | {"seconds": round(time.perf_counter() - start, 1)}


def arguments_of(mutation: Mutation) -> list[str]:
    return [f"tests/{test}" for test in mutation.tests] + (["-k", mutation.select] if mutation.select else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="edits whose name contains this")
    parser.add_argument("-o", "--output", type=Path, help="where the outcome is written")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    for mutation in MUTATIONS:
        mutated(ROOT / "fastweights", mutation)  # all must apply before the first is tried
    import_libraries()
    rows = []
    for mutation in chosen:
        outcome = check(mutation, arguments_of(mutation))
        rows.append({"mutation": mutation.name, "file": mutation.file, "caught_by": outcome["failed"]})
        print(f"{mutation.name}: {', '.join(outcome['failed']) or 'NOT CAUGHT'} ({outcome['seconds']} s)", flush=True)
    if options.output:
        write(options.output, rows)
    if missed := [row["mutation"] for row in rows if not row["caught_by"]]:
        raise SystemExit(f"not caught: {', '.join(missed)}")


def import_libraries() -> None:
    """Every process starts with what takes longest to import, but without the package under test."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import pytest  # noqa: F401
    import torch._dynamo
    import torch.distributed.tensor
    import transformers.modeling_utils  # noqa: F401

    torch.set_num_threads(1)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    from fastweights.utils.provenance import write_result

    before = json.loads(path.read_text()).get("before", {}) if path.is_file() else {}
    write_result(path, {"mutations": rows, "before": before})


if __name__ == "__main__":
    main()
