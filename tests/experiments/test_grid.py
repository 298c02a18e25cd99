"""Grids as files: their runs, and errors that name the file, the run and the setting."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from fastweights.experiments.grid import choose, load_grid, with_changes, with_seeds
from fastweights.presets import preset_config
from fastweights.training.recipe import RECIPE_FOLDER, load_recipe
from fastweights.utils.errors import FastWeightsError

SHIPPED = [file.stem for file in sorted((RECIPE_FOLDER / "grids").glob("*.yaml"))]
BASE = "recipe: paper\nruns:\n"
BAD = {
    "": "grid.yaml must hold settings, `name: value`, found NoneType",
    "- 1": "grid.yaml must hold settings, `name: value`, found list",
    "a: [": "grid.yaml is not YAML: ",
    "runs: {a: {}}": "grid.yaml: recipe None: no such recipe; shipped are distill, ",
    "recipe: nonsense\nruns: {a: {}}": "grid.yaml: recipe nonsense: no such recipe; shipped are distill, ",
    "recipe: no.yaml\nruns: {a: {}}": "no.yaml: no such recipe",
    "recipe: paper": "grid.yaml: runs must name at least one run",
    "recipe: paper\nrun: {}": "grid.yaml: unknown setting run; known are recipe, set, defaults, runs",
    "recipe: paper\nruns: [a]": "grid.yaml: runs must hold settings, `name: value`, found ['a']",
    "recipe: paper\nset: {batch: 3}\nruns: {a: {}}": "grid.yaml: set: unknown setting batch; known are stages, ",
    "recipe: paper\nset: {seed: 3}\nruns: {a: {}}": "grid.yaml: set: seed: give `seeds: [0, 1]` to a run",
    "recipe: paper\nset: {distill.tokens: 3}\nruns: {a: {}}": "set: distill.tokens=3: the recipe has no stage distill",
    "recipe: paper\ndefaults: {k: 3}\nruns: {a: {}}": "grid.yaml: defaults: unknown setting k; known are rule, m, ",
    BASE + "  a: {ruel: decay}": "grid.yaml: run a: unknown setting ruel; known are rule, m, feature_map, ",
    BASE + "  a: {seed: 1}": "grid.yaml: run a: seed: give `seeds: [0, 1]` to a run",
    BASE + "  a: 3": "grid.yaml: run a: a must hold settings, `name: value`, found 3",
    BASE + "  a: {rule: hebb}": "grid.yaml: run a: rule='hebb' is not known; choose one of decay, gated",
    BASE + "  a: {m: 0}": "grid.yaml: run a: m must be between 1 and 65,536, found 0",
    BASE + "  a: {rule: decay, normalize: sum}": "run a: rule='decay', normalize='sum' is not defined",
    BASE + "  a: {rule: add}\n  a: {rule: delta}": "line 4: a is given twice",
    BASE + "  a: {rule: add, seeds: [0, 1]}\n  a_seed1: {rule: add}": "run a_seed1: two runs have this name",
    BASE + "  a/b: {}": "grid.yaml: run a/b: its name must be a folder's: letters, digits",
    BASE + "  3: {}": "grid.yaml: run 3: its name must be a folder's",
    BASE + "  a: {seeds: 3}": "run a: seeds must be a list of whole numbers, found 3",
    BASE + "  a: {seeds: [true]}": "run a: seeds must be a list of whole numbers, found [True]",
    BASE + "  a: {seeds: []}": "run a: seeds must be a list of whole numbers, found []",
    BASE + "  a: {seeds: [1, 1]}": "run a_seed1: two runs have this name",
    BASE + "  a: {seeds: [-1]}": "run a: seed must be between 0 and 2,147,483,648, found -1",
    BASE + "  a: {set: {finetune.tokens: x}}": "run a: set: finetune.tokens must be a whole number, found 'x'",
    BASE + "  a: {set: {batch_tokens: 5}}": "run a: set: batch_tokens must be a multiple of the sequence length",
    BASE + "  a: {cell: 3}": "run a: cell must hold settings, `name: value`, found 3",
    BASE
    + "  a: {cell: {row: x}}": "run a: cell must have a table and a row, and only text and numbers, found {'row': 'x'}",
    BASE + "  a: {cell: {table: x, row: [x]}}": "only text and numbers, found {'table': 'x', 'row': ['x']}",
    BASE + "  a: {cell: {table: x, row: true}}": "only text and numbers, found {'table': 'x', 'row': True}",
    "recipe: distill\nruns: {a: {}}": "run a: without settings it is the base itself, which only finetune can train",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text.replace("\n", " ") or "empty")
def test_bad_grid_is_refused_with_file_run_and_setting(tmp_path: Path, text: str) -> None:
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(FastWeightsError) as found:
        load_grid(tmp_path / "grid.yaml")
    assert BAD[text] in str(found.value) and str(found.value).startswith(str(tmp_path))


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_grids_are_defined(name: str) -> None:
    variants = load_grid(name)
    assert variants and all(variant.cell for variant in variants)
    cells = {tuple(sorted((variant.cell or {}).items())) for variant in variants}
    assert len(cells) == len({variant.entry for variant in variants})
    configs = [(variant.config, variant.recipe) for variant in variants]
    assert all(configs.count(pair) == 1 for pair in configs), "two runs are the same"


def test_variants_of_the_recommended_settings_differ_from_them_in_what_their_names_say() -> None:
    """A grid has no link to the preset, so a change of the preset must not go unnoticed."""
    preset = preset_config("recommended", head_dim=64, width=576)
    for grid, name, reference in (
        ("smollm2_design", "reference_seed0", replace(preset, wide_window=0)),  # from before there were wide windows
        ("smollm2_windows", "reference_seed0", preset),
        ("smollm2_final", "b", preset),
    ):
        variants = {variant.name: variant.config for variant in load_grid(grid)}
        assert variants[name] == reference
    assert variants["c"] == replace(preset, layers=variants["c"].layers)
    assert variants["c"].layers == tuple(sorted(set(range(30)) - {17, 18, 24}))


def test_shipped_grid_has_the_cells_of_the_papers_tables() -> None:
    variants = load_grid("paper")
    assert len({variant.name for variant in variants}) == len(variants) == 22
    cells = [(variant, variant.cell) for variant in variants if variant.cell]
    first = {(cell["row"], cell["column"]): cell["paper"] for _, cell in cells if cell["table"] == "Table 1"}
    columns = ("baseline", "no normalisation", "no map, no normalisation")
    assert [[first.get((rule, column)) for column in columns] for rule in ("add", "delta", "gated", "decay")] == [
        [22.6, "diverged", 20.0],
        [21.6, 20.1, "diverged"],
        ["diverged", 19.7, 17.1],
        [None, 18.8, 17.1],
    ]
    assert first["add", "normalisation, no map"] == "diverged" and len(first) == 12
    second = {variant.name: cell.get("paper") for variant, cell in cells if cell["table"] == "Table 2"}
    assert second == {
        "base": 14.5,
        "local_32": 19.4,
        "gated_16": 16.8,
        "gated_32_seed0": 16.4,
        "gated_32_seed1": 16.4,
        "gated_64": None,
        "decay_16": 16.1,
        "decay_32_seed0": 14.6,
        "decay_32_seed1": 14.6,
        "decay_64": None,
    }
    for variant, cell in cells:
        if variant.config is None:
            assert variant.name == "base"
        elif cell["table"] == "Table 1":
            assert variant.config.m == 4 and variant.config.rule == cell["row"]
        else:
            assert (variant.config.feature_map, variant.config.normalize) == ("none", "none")
        assert variant.tokens == 40_009_728 and variant.recipe.compile
    assert {variant.name for variant in choose(variants, ["decay_32"])} == {"decay_32_seed0", "decay_32_seed1"}


def test_later_changes_override_earlier_ones(tmp_path: Path) -> None:
    """The recipe, the grid's, the run's, the command line's."""
    (tmp_path / "grid.yaml").write_text(
        textwrap.dedent("""
        recipe: paper
        set: {finetune.learning_rate: 1e-3, finetune.clip: 2, batch_tokens: 2_048}
        runs:
          a: {m: 8, set: {finetune.learning_rate: 2e-3, finetune.clip: 3}}
          b: {}
        """)
    )
    a, b = with_changes(load_grid(tmp_path / "grid.yaml"), {"finetune.clip": 4})
    stages = [variant.recipe.stages[0] for variant in (a, b)]
    assert [(stage.learning_rate, stage.clip) for stage in stages] == [(2e-3, 4), (1e-3, 4)]
    assert a.recipe.batch_tokens == 2048 and stages[0].weight_decay == load_recipe("paper").stages[0].weight_decay
    assert a.config is not None and a.config.m == 8 and b.config is None


def test_run_with_a_recipe_of_its_own_is_not_changed_by_the_set_of_the_grid(tmp_path: Path) -> None:
    """--set reaches every run that has the stage."""
    (tmp_path / "own.yaml").write_text("stages: [{loss: finetune, tokens: 999}]\nlength: 32\nbatch_tokens: 64\n")
    (tmp_path / "grid.yaml").write_text(
        textwrap.dedent("""
        recipe: distill
        set: {distill.tokens: 5_000_000, length: 256}
        runs:
          base: {recipe: finetune, set: {finetune.clip: 2}}
          small: {rule: decay, recipe: own.yaml}
          decay: {rule: decay}
        """)
    )
    changes = {"finetune.tokens": 4096, "distill.tokens": 8192, "validate_every": 7}
    base, small, decay = with_changes(load_grid(tmp_path / "grid.yaml"), changes)
    finetune = load_recipe("finetune")
    assert base.recipe.length == finetune.length and base.recipe.stages[0].clip == 2
    assert base.recipe.stages[0].learning_rate == finetune.stages[0].learning_rate
    assert [stage.tokens for stage in (base.recipe.stages[0], small.recipe.stages[0])] == [4096, 4096]
    assert small.recipe.length == 32 and decay.recipe.length == 256
    assert [stage.tokens for stage in decay.recipe.stages] == [load_recipe("distill").stages[0].tokens, 8192]
    assert {variant.recipe.validate_every for variant in (base, small, decay)} == {7}
    with pytest.raises(FastWeightsError, match=r"run decay: changes: unknown setting transfer\.speed"):
        with_changes([base, decay], {"transfer.speed": 1})
    with pytest.raises(
        FastWeightsError, match=r"run base: changes: distill\.tokens=1: the recipe has no stage distill"
    ):
        with_changes([base, small], {"distill.tokens": 1})


def test_seeds_replace_those_of_the_grid_and_runs_of_the_grid_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("recipe: paper\nruns: {a: {rule: gated, seeds: [0, 1]}, b: {m: 8}, c: {}}\n")
    variants = load_grid(tmp_path / "grid.yaml")
    found = with_seeds(variants, [2, 0, 2])
    assert [variant.name for variant in found] == ["a_seed2", "a_seed0", "b_seed2", "b", "c_seed2", "c"]
    assert [variant.recipe.seed for variant in found] == [2, 0] * 3
    assert [variant.config and variant.config.seed for variant in found] == [2, 0, 2, 0, None, None]
    assert found[1] == variants[0] and found[3] == variants[2] and found[2].entry == "b"
    with pytest.raises(FastWeightsError, match="seed must be between 0"):
        with_seeds(variants, [-1])


def test_grids_are_not_listed_as_recipes() -> None:
    with pytest.raises(ValueError, match=re.escape("shipped are distill")) as found:
        load_recipe("nothing")
    assert "grids" not in str(found.value)
