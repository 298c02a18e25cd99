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

from fastweights.config import FastWeightsConfig
from fastweights.training.recipe import (
    RECIPE_FOLDER,
    Recipe,
    change,
    find_settings,
    load_recipe,
    numbers,
    read_settings,
)
from fastweights.utils.errors import Argument, FastWeightsError, error_context

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

    def __post_init__(self) -> None:
        if self.config is None and (self.recipe.needs_teacher or self.recipe.lora):
            losses = ", ".join(stage.loss for stage in self.recipe.stages)
            raise GridError(
                "without settings it is the base itself, which only finetune can train on, and not with lora; its "
                f"recipe has {losses}{', lora' if self.recipe.lora else ''}"
            )

    @property
    def tokens(self) -> int:
        """Tokens of all stages of its recipe."""
        return sum(self.recipe.steps_of(stage) for stage in self.recipe.stages) * self.recipe.batch_tokens


def load_grid(name: str | os.PathLike) -> list[Variant]:
    """Read the runs of a grid.

    Args:
        name: name of a shipped grid, or a YAML file.

    Returns:
        The runs in the order of the file, a run for each seed.

    Raises:
        GridError: the grid cannot be run.
        RecipeError: there is no such grid, or its file is not YAML.
    """
    path = find_settings(name, "grid", RECIPE_FOLDER / "grids")
    values = read_settings(path)
    with _errors_in(str(path)):
        _check_names(values, ("recipe", "set", "defaults", "runs"))
        recipe = _set(_recipe(path, values.get("recipe")), values)
        defaults = _mapping(values, "defaults")
        with _errors_in("defaults"):
            _check_names(defaults, SETTINGS)
        runs = _mapping(values, "runs")
        if not runs:
            raise GridError("runs must name at least one run, each with its settings")
        variants = [variant for entry in runs for variant in _variants(path, entry, runs, recipe, defaults)]
        twice = [name for name, count in Counter(variant.name for variant in variants).items() if count > 1]
        if twice:
            raise GridError(f"run {twice[0]}: two runs have this name; seeds are part of it, NAME_seed1")
    return variants


def result_file(folder: Path, name: str) -> Path:
    """The result of a run in the folder of its comparison. Where it exists, the run is done."""
    return folder / "results" / f"{name}.json"


def choose(variants: Sequence[Variant], only: Iterable[str]) -> list[Variant]:
    """Select runs by name.

    Args:
        variants: the runs of a grid.
        only: names of runs, or of entries with several seeds; empty for all runs.

    Raises:
        GridError: the grid has no run or entry of such a name.
    """
    names = {name.strip() for name in only if name.strip()}
    known = list(dict.fromkeys(name for variant in variants for name in (variant.entry, variant.name)))
    unknown = sorted(names - set(known))
    if unknown:
        missing = f" {', '.join(unknown)}: the grid has no such run; it has {', '.join(known)}"
        raise GridError(Argument("only"), missing)
    return [variant for variant in variants if not names or names & {variant.name, variant.entry}]


def with_seeds(variants: Sequence[Variant], seeds: Sequence[int]) -> list[Variant]:
    """Give every entry of a grid these seeds in place of its own: a run for each of them.

    A run that the grid has with this seed keeps its name; any other is called NAME_seed1.
    """
    named = {(variant.entry, variant.recipe.seed): variant for variant in variants}
    first = {variant.entry: variant for variant in reversed(variants)}
    return [
        named.get((entry, seed)) or _with_seed(variant, seed)
        for entry, variant in reversed(first.items())
        for seed in dict.fromkeys(seeds)
    ]


def _with_seed(variant: Variant, seed: int) -> Variant:
    config = None if variant.config is None else replace(variant.config, seed=seed)
    recipe = replace(variant.recipe, seed=seed)
    return replace(variant, name=f"{variant.entry}_seed{seed}", recipe=recipe, config=config)


def with_changes(variants: Sequence[Variant], changes: dict[str, Any]) -> list[Variant]:
    """Change settings of all recipes. A setting of a stage is changed where a recipe has that stage.

    Args:
        variants: the runs of a grid.
        changes: values by name, as `training.recipe.change` takes them.

    Raises:
        RecipeError: a recipe has no such setting, or not such a value, or no recipe has the stage.
        GridError: a run cannot be trained with the changed recipe.
    """
    losses = {stage.loss for variant in variants for stage in variant.recipe.stages}
    changed = []
    for variant in variants:
        elsewhere = losses - {stage.loss for stage in variant.recipe.stages}
        own = {name: value for name, value in changes.items() if name.partition(".")[0] not in elsewhere}
        with error_context(f"run {variant.name}: "):
            with error_context(Argument("changes"), ": "):
                recipe = _change(variant.recipe, own)
            changed.append(replace(variant, recipe=recipe))
    return changed


@contextmanager
def _errors_in(place: str) -> Iterator[None]:
    """Errors become GridErrors that name the place in the file."""
    try:
        yield
    except FastWeightsError as error:
        raise GridError(f"{place}: {error}") from error


def _check_names(values: dict[str, Any], known: Sequence[str]) -> None:
    _refuse_seed(values)
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise GridError(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")


def _refuse_seed(settings: dict[str, Any]) -> None:
    if "seed" in settings:
        raise GridError("seed: give `seeds: [0, 1]` to a run; they are the seeds of its recipe and of its conversion")


def _mapping(values: dict[Any, Any], name: str) -> dict[Any, Any]:
    value = values.get(name)
    if not isinstance(value, dict | None):
        raise GridError(f"{name} must hold settings, `name: value`, found {value!r}")
    return value or {}


def _change(recipe: Recipe, changes: dict[Any, Any]) -> Recipe:
    _refuse_seed(changes)
    return change(recipe, {str(name): value for name, value in numbers(changes).items()})


def _recipe(grid: Path, name: Any) -> Recipe:
    """The path of a recipe is relative to the grid."""
    name = str(name)
    return load_recipe(grid.parent / name if name.endswith((".yaml", ".yml")) else name)


def _set(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    """The recipe as the `set` of a grid or of a run changes it."""
    changes = _mapping(values, "set")
    with _errors_in("set"):
        return _change(recipe, changes)


def _variants(grid: Path, entry: Any, runs: dict[Any, Any], recipe: Recipe, defaults: dict[str, Any]) -> list[Variant]:
    """The runs of an entry: one for each seed. A recipe of its own is not changed by the grid's `set`."""
    with _errors_in(f"run {entry}"):
        if not isinstance(entry, str) or not NAME.fullmatch(entry):
            raise GridError("its name must be a folder's: letters, digits, _ . + -, and no number alone (quote it)")
        values = _mapping(runs, entry)
        _check_names(values, (*SETTINGS, "recipe", "seeds", "set", "cell"))
        recipe = _set(_recipe(grid, values["recipe"]) if "recipe" in values else recipe, values)
        seeds, cell = _seeds(values), _cell(values)
        settings = {name: value for name, value in values.items() if name in SETTINGS}
        variants = []
        for seed in seeds:
            name = entry if len(seeds) == 1 else f"{entry}_seed{seed}"
            config = FastWeightsConfig.from_dict(numbers({**defaults, **settings, "seed": seed})) if settings else None
            variants.append(Variant(name, entry, replace(recipe, seed=seed), config, cell))
        return variants


def _seeds(values: dict[str, Any]) -> list[int]:
    seeds = values.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise GridError(f"seeds must be a list of whole numbers, found {seeds!r}")
    return seeds


def _cell(values: dict[str, Any]) -> dict[str, Any] | None:
    cell = _mapping(values, "cell")
    if cell and not (
        {"table", "row"} <= cell.keys() and all(type(value) in (int, float, str) for value in cell.values())
    ):
        raise GridError(f"cell must have a table and a row, and only text and numbers, found {cell!r}")
    return cell or None
