"""Manifests: the sizes and checksums of a folder's files, written last, so that damage is found before it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastweights.utils.files import write_json
from fastweights.utils.parsing import read_json

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Write the sizes and SHA-256 checksums of all files in a folder to manifest.json in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    paths = [path for path in paths if path.name != MANIFEST]
    with ThreadPoolExecutor() as pool:  # hashing takes as long as writing
        described = list(pool.map(_describe, paths))
    files = {path.relative_to(folder).as_posix(): found for path, found in zip(paths, described, strict=True)}
    write_json(folder / MANIFEST, {"files": files})


def find_damage(folder: Path, without: Collection[str] = ()) -> str | None:
    """What differs from the manifest of a folder; None where every file in it is as it was written.

    Files that the manifest does not name are ignored, and so are the names in `without`.
    """
    try:
        files = read_json(folder / MANIFEST)["files"]
        for name, expected in files.items():
            path = folder / name
            if name in without:
                continue
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes and had {expected['bytes']:,}"
            if _describe(path) != expected:
                return f"the checksum of {name} is wrong"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} or a file in it cannot be read ({error})"
    return None


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
