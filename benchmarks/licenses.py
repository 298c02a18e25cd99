"""Write docs/licenses.md: the license of every package in constraints.txt, as the installed packages state it.

python benchmarks/licenses.py
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licenses.md"
INTRODUCTION = """# Licenses

On this page you look up the license of each package that fastweights is tested with. fastweights itself has the
license Apache-2.0. The sources of the packaged model and its texts are listed in `fastweights/packaged/SOURCES.md`. For
the version of a package that you have installed:

```python
from importlib.metadata import metadata

stated = metadata("safetensors")
print(stated["Version"], stated.get("License-Expression"), stated.get_all("Classifier"))
```

The packages are installed from PyPI, not included. Those in bold are needed by fastweights without extras, directly or
indirectly; the others belong to extras, tests or the documentation. The licenses are copied from the metadata of the
packages by `make lock`.

| Package | Version | License |
| --- | --- | --- |
"""


def main() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w.-]+)==", constraints, flags=re.MULTILINE)
    needed = needed_by("fastweights")
    rows = [row(name, _normalized(name) in needed) for name in pinned]
    PAGE.write_text(INTRODUCTION + "\n".join(rows) + "\n", encoding="utf-8")


def needed_by(package: str) -> set[str]:
    """The packages that `package` needs without extras, directly and indirectly."""
    found: set[str] = set()
    waiting = [package]
    while waiting:
        for requirement in importlib.metadata.requires(waiting.pop()) or ():
            name = _normalized(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
            if "extra ==" not in requirement and name not in found and _is_installed(name):
                found.add(name)
                waiting.append(name)
    return found


def row(name: str, is_needed: bool) -> str:
    shown = f"**{name}**" if is_needed else name
    return f"| {shown} | {importlib.metadata.version(name)} | {license_of(importlib.metadata.metadata(name))} |"


def license_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """The SPDX expression, else the classifiers, else the first line of the license field."""
    classifiers = [text.split(" :: ") for text in metadata.get_all("Classifier", [])]
    named = [parts[-1] for parts in classifiers if parts[0] == "License" and parts[-1] != "OSI Approved"]
    expression = metadata.get("License-Expression") or ", ".join(named) or metadata.get("License", "not stated")
    return expression.strip().splitlines()[0]


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
