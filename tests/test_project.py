"""The project's own files: lint commands, and where tests import from."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]


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
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)
    assert _pins(locked) == pinned and len(entries) == len(pinned)


def test_build_backend_is_the_pinned_one() -> None:
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert backend in (ROOT / "constraints.txt").read_text().splitlines()


def _pins(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}
