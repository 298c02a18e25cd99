"""Where a result comes from: commit, versions, hardware. Every JSON under results/ begins with it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from fastweights.utils.files import write_json


def provenance() -> dict[str, Any]:
    """The date, the commit of the source, versions of libraries and the hardware, as a result file has them."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            **_versions("fastweights", "torch", "transformers", "triton"),
        },
        "hardware": _hardware(),
    }


def write_result(path: str | os.PathLike, result: dict[str, Any]) -> None:
    """Write a result with its provenance as a JSON file.

    Args:
        path: The file.
        result: What was measured. Provenance that it already has is retained.
    """
    write_json(path, provenance() | result)


def _commit() -> str:
    """The commit of the source, with + for uncommitted changes; FASTWEIGHTS_COMMIT where there is no repository."""
    if commit := os.environ.get("FASTWEIGHTS_COMMIT"):
        return commit
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # installed, it may lie in someone else's repository
        commit, changes = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changes else "")


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]  # only to look
    return subprocess.check_output(command, cwd=Path(__file__).parent, text=True, stderr=subprocess.DEVNULL).strip()


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    import torch

    hardware: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
    return hardware
