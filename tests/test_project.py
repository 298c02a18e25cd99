"""The project's own files: lint commands, and where tests import from."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from mutations.table import MUTATIONS

ROOT = Path(__file__).parents[1]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")
UV = """
import pathlib, re, sys
output = pathlib.Path(sys.argv[-1])
kept = re.findall(r"--hash=\\S+", output.read_text()) if output.exists() else []
lines = [[pin.strip(), f"--hash=sha256:{1:064}", *kept] for pin in sys.stdin]
output.write_text("".join(" \\\\\\n    ".join(line) + "\\n" for line in lines))
"""


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == commands
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in hooks)


def test_no_test_imports_from_another_test() -> None:
    """What tests share is in tests/helpers."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if re.search(r"(^|\.)(tests|test_\w+|conftest)\b", name)], path


def test_every_pinned_package_has_hashes_of_its_version() -> None:
    """`make test` installs with --require-hashes from these files."""
    pinned = _pins((ROOT / "constraints.txt").read_text())
    locked = "".join((ROOT / ".ci" / name).read_text() for name in ("first.txt", "requirements.txt"))
    entries = re.split(r"^(?=\w)", locked, flags=re.MULTILINE)[1:]
    assert all(HASH.search(entry) for entry in entries)
    assert all(len(hashes) == len(set(hashes)) for hashes in map(HASH.findall, entries))
    assert _pins(locked) == pinned and len(entries) == len(pinned)


def test_lock_twice_writes_the_same_files(tmp_path: Path) -> None:
    """With a program in the place of uv that keeps what it finds in its output file, as uv does."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "lock", tmp_path / ".ci")
    (tmp_path / "constraints.txt").write_text("other==2.0\nsetuptools==1.0\ntorch==3.0\n")
    (tmp_path / "uv").write_text(f"#!{sys.executable}\n{UV}")
    (tmp_path / "uv").chmod(0o755)
    written = []
    for _ in range(2):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run([tmp_path / ".ci" / "lock"], check=True, env=environment)
        written.append([(tmp_path / ".ci" / name).read_text() for name in ("first.txt", "requirements.txt")])
    assert written[0] == written[1]
    assert len(HASH.findall(written[0][0])) == 3 and len(HASH.findall(written[0][1])) == 1


def test_build_backend_is_the_pinned_one() -> None:
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert backend in (ROOT / "constraints.txt").read_text().splitlines()


def _pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_every_mutation_matches_the_package_once() -> None:
    """`make mutations` takes long, so an edit that no longer fits the code must be noticed here."""
    files = {path.relative_to(ROOT / "fastweights").as_posix(): path for path in (ROOT / "fastweights").rglob("*.py")}
    for mutation in MUTATIONS:
        texts = [path.read_text() for name, path in files.items() if mutation.file in name]
        assert sum(len(re.findall(mutation.find, text)) for text in texts) == 1, mutation.name
        assert all((ROOT / "tests" / test).is_file() for test in mutation.tests), mutation.name
