"""What the tests of comparisons share: a grid, the command, and what it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from helpers.training import FINETUNE, Files, make_recipe


def write_grid(folder: Path, runs: dict[str, Any], recipe: Any = None, **more: Any) -> Path:
    """A grid, with its recipe beside it."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump((recipe or make_recipe(FINETUNE)).to_dict()))
    grid = {"recipe": "recipe.yaml", "defaults": {"m": 4}, "runs": runs} | more
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    return folder / "grid.yaml"


def typed(files: Files, grid: Any, output: Path, *more: Any) -> tuple[Any, ...]:
    texts = ("--data", files.data, "--validation", files.validation)
    return ("compare", grid, "--model", files.base, *texts, "-o", output, "--device", "cpu", *more)


def result_of(output: Path, name: str) -> dict[str, Any]:
    return json.loads((output / "results" / f"{name}.json").read_text())


def processes_of(output: Path) -> dict[str, int]:
    return {path.parent.name: int(path.read_text() or 0) for path in output.glob("runs/*/process")}
