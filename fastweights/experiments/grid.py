"""Grids: many variants of one base under one recipe, as a YAML file. It is checked when it is read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fastweights.config import LARGEST_SEED, FastWeightsConfig
from fastweights.training.recipe import (
    RECIPE_FOLDER,
    Recipe,
    RecipeError,
    change,
    load_recipe,
    numbers,
    read_settings,
)
from fastweights.utils.errors import Argument, FastWeightsError, error_context

GRID = ("recipe", "set", "defaults", "runs")
SETTINGS = tuple(f.name for f in fields(FastWeightsConfig) if f.name != "seed")
# A run's name is that of its folder.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


class GridError(FastWeightsError):
    """A grid that cannot be run. The message names the file, the run and the setting."""


@dataclass(frozen=True)
class Variant:
    """One run of a grid.

    name: The run's name and that of its folder.
    entry: Its name in the file; the runs of one entry differ in their seeds.
    recipe: How it is trained.
    config: How the base is converted; None to train the base itself.
    cell: Its place in a table. Reports read `table`, `row` and `column`; other names are for the reader of the result.
    """

    name: str
    entry: str
    recipe: Recipe
    config: FastWeightsConfig | None = None
    cell: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return sum(self.recipe.steps_of(stage) for stage in self.recipe.stages) * self.recipe.batch_tokens


def load_grid(name: str | os.PathLike) -> list[Variant]:
    """Read the runs of a grid.

    Args:
        name: name of a shipped grid, or a YAML file.

    Returns:
        The runs in the order of the file, a run for each seed.

    Raises:
        GridError: the grid cannot be run.
    """
    path = _find(name)
    values = _read(path)
    with _errors_in(str(path)):
        _check_names(values, GRID)
        recipe = _set(_recipe_of(path, values), values)
        defaults = _mapping("defaults", values.get("defaults"))
        with _errors_in("defaults"):
            _check_names(defaults, SETTINGS)
        runs = _mapping("runs", values.get("runs"))
        if not runs:
            raise GridError("it has no runs: name them under `runs:`, each with its settings")
        found = []
        for entry, settings in runs.items():
            with _errors_in(f"run {entry}"):
                found += _variants(entry, _mapping("it", settings), recipe, defaults)
        twice = [name for name, count in Counter(variant.name for variant in found).items() if count > 1]
        if twice:
            raise GridError(f"run {twice[0]}: two runs have this name; seeds are part of it, NAME_seed1")
    return found


def choose(variants: Sequence[Variant], only: Iterable[str]) -> list[Variant]:
    """Select runs by name.

    Args:
        variants: the runs of a grid.
        only: names of runs, or of entries with several seeds; empty for all runs.

    Raises:
        GridError: the grid has no run or entry of such a name.
    """
    names = [name.strip() for name in only if name.strip()]
    known = list(dict.fromkeys(name for variant in variants for name in (variant.entry, variant.name)))
    unknown = [name for name in names if name not in known]
    if unknown:
        missing = f" {', '.join(unknown)}: the grid has no such run; it has {', '.join(known)}"
        raise GridError(Argument("only"), missing)
    return [variant for variant in variants if not names or {variant.name, variant.entry} & set(names)]


def with_changes(variants: Sequence[Variant], changes: dict[str, Any]) -> list[Variant]:
    """Change settings of all recipes.

    Args:
        variants: the runs of a grid.
        changes: values by name, as `training.recipe.change` takes them.

    Raises:
        GridError: a recipe has no such setting, or not such a value.
    """
    changed = []
    for variant in variants:
        with error_context(f"run {variant.name}: "):
            with error_context(Argument("changes"), ": "):
                recipe = _changed(variant.recipe, changes)
            changed.append(replace(variant, recipe=recipe))
            _check_recipe(changed[-1])
    return changed


@contextmanager
def _errors_in(place: str) -> Iterator[None]:
    """Errors become GridErrors that name the place in the file."""
    try:
        yield
    except FastWeightsError as error:
        raise GridError(f"{place}: {error}") from error


def _find(name: str | os.PathLike) -> Path:
    path, shipped = Path(name), RECIPE_FOLDER / "grids"
    if path.suffix not in (".yaml", ".yml"):
        path = shipped / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in shipped.glob("*.yaml")))
        raise GridError(f"{name}: no such grid; shipped are {names}, or give a YAML file")
    return path


class _EachNameOnce(yaml.SafeLoader):
    """Refuses two settings of one name, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise GridError(f"line {key.start_mark.line + 1}: {key.value} is given for the second time")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    if not path.read_bytes().strip():
        raise GridError(f"{path} is empty: a grid names a `recipe` and `runs`")
    try:
        return read_settings(path, _EachNameOnce)
    except RecipeError as error:
        raise GridError(str(error)) from error
    except GridError as error:
        raise GridError(f"{path}, {error}") from error


def _check_names(values: dict[Any, Any], known: Sequence[str]) -> None:
    if "seed" in values:
        raise GridError("seed: give `seeds: [0, 1]` to a run; they are the seeds of its recipe and of its conversion")
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise GridError(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")


def _mapping(what: str, value: Any) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise GridError(f"{what} must hold settings, `name: value`, found {value!r}")
    return value


def _recipe_of(path: Path, values: dict[str, Any]) -> Recipe:
    """The path of a recipe is relative to the grid."""
    name = values.get("recipe")
    if not isinstance(name, str):
        raise GridError(f"recipe must be a shipped recipe's name or a YAML file, found {name!r}")
    try:
        return load_recipe(path.parent / name if name.endswith((".yaml", ".yml")) else name)
    except RecipeError as error:
        raise GridError(str(error).removeprefix("--")) from error


def _changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    if "seed" in changes:
        raise GridError("seed: give `seeds: [0, 1]` to a run of the grid")
    try:
        return change(recipe, {str(name): value for name, value in numbers(changes).items()})
    except RecipeError as error:
        raise GridError(str(error)) from error


def _set(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """The recipe as the `set` of a grid or of a run changes it."""
    changes = _mapping("set", values.get("set"))
    with _errors_in("set"):
        return _changed(recipe, changes)


def _variants(entry: Any, values: dict[str, Any], recipe: Recipe, defaults: dict[str, Any]) -> list[Variant]:
    if not isinstance(entry, str) or not NAME.fullmatch(entry):
        raise GridError("its name must be a folder's: letters, digits, _ . + -, and no number alone (quote it)")
    _check_names(values, (*SETTINGS, "seeds", "set", "cell"))
    recipe = _set(recipe, values)
    seeds, cell = _seeds(values.get("seeds", [0])), _cell(values.get("cell"))
    settings = {name: value for name, value in values.items() if name in SETTINGS}
    found = []
    for seed in seeds:
        name = entry if len(seeds) == 1 else f"{entry}_seed{seed}"
        config = FastWeightsConfig.from_dict(numbers({**defaults, **settings, "seed": seed})) if settings else None
        found.append(Variant(name, entry, replace(recipe, seed=seed), config, cell))
        _check_recipe(found[-1])
    return found


def _check_recipe(variant: Variant) -> None:
    """The base has no new layers and no teacher."""
    recipe = variant.recipe
    if variant.config is None and (recipe.needs_teacher or recipe.lora):
        losses = ", ".join(stage.loss for stage in recipe.stages)
        raise GridError(
            "without settings it is the base itself, which only finetune can train on, and not with lora; its recipe "
            f"has {losses}{', lora' if recipe.lora else ''}"
        )


def _seeds(seeds: Any) -> list[int]:
    whole = isinstance(seeds, list) and all(isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed <= LARGEST_SEED for seed in seeds):
        raise GridError(f"seeds must be a list of different whole numbers up to {LARGEST_SEED}, found {seeds!r}")
    return seeds


def _cell(values: Any) -> dict[str, Any] | None:
    """The place of a run in a table."""
    if values is None:
        return None
    cell = _mapping("cell", values)
    with _errors_in("cell"):
        missing = [name for name in ("table", "row") if name not in cell]
        if missing:
            raise GridError(f"it must have a {' and a '.join(missing)}")
        for name, value in cell.items():
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise GridError(f"{name} must be text or a number, found {value!r}")
    return cell
