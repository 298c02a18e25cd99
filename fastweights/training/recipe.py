"""Recipes: how a model is trained, as data. A YAML file says what differs from the defaults here; each field is
documented once, and the command line's help texts are taken from these descriptions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from fastweights.config import LARGEST_SEED
from fastweights.utils.errors import FastWeightsError

LOSSES = ("finetune", "transfer", "distill")
PRECISIONS = ("auto", "float32", "bfloat16")
FITS = ("none", "scale", "full")


class RecipeError(FastWeightsError):
    """A recipe that says something undefined, with where and why."""


def _setting(default: Any, help: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


def _check_names(kind: Any, values: dict[str, Any], where: str) -> None:
    known = [f.name for f in fields(kind)]
    unknown = [f"{where}{name}" for name in values if name not in known]
    if unknown:
        raise RecipeError(f"unknown setting {', '.join(unknown)}; known are {', '.join(known)}")


def _check(settings: Any, skip: tuple[str, ...] = ()) -> None:
    """Each value is of its field's type (a whole number will do for a float) and one of its choices."""
    hints = get_type_hints(type(settings))
    for f in fields(settings):
        if f.name in skip:
            continue
        value = getattr(settings, f.name)
        if f.metadata["choices"] and value not in f.metadata["choices"]:
            raise RecipeError(f"{f.name}={value!r} is not known; choose one of {', '.join(f.metadata['choices'])}")
        kinds = getattr(hints[f.name], "__args__", (hints[f.name],))
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            raise RecipeError(f"{f.name} must be {_words(kinds)}, found {value!r}")


def _words(kinds: tuple) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "empty"}
    return " or ".join(names[kind] for kind in kinds)


def _check_range(settings: Any, name: str, smallest: float, largest: float | None) -> None:
    value = getattr(settings, name)
    if value is None:
        return
    if not value >= smallest or (largest is not None and value > largest):  # "not >=": a NaN lies nowhere
        limits = f"at least {smallest}" if largest is None else f"between {smallest} and {largest}"
        raise RecipeError(f"{name} must be {limits}, found {value!r}")


@contextmanager
def _errors_in(place: str) -> Iterator[None]:
    """Errors, which begin with a setting's name, say whose setting it is."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{place}.{error}") from error


@dataclass(frozen=True)
class Stage:
    """One loss, trained for a number of tokens."""

    loss: str = _setting(
        "finetune",
        "finetune: cross-entropy; transfer: each new layer learns the teacher's attention output from the teacher's "
        "input; distill: divergence from the teacher's next-token distribution.",
        LOSSES,
    )
    tokens: int = _setting(1_000_000, "Tokens to train on.")
    learning_rate: float = _setting(1e-3, "Highest learning rate of the new attention (of everything, where none is).")
    body_learning_rate: float | None = _setting(
        None, "Highest learning rate of the rest of the model, 0 to freeze it; by default as the new attention's."
    )
    warmup: float = _setting(0.05, "Share of the stage's steps in which the learning rate rises from 0.")
    final: float = _setting(0.1, "Share of the highest learning rate that a cosine falls to; 1 keeps it constant.")
    cross_entropy: float = _setting(0.0, "Weight of the cross-entropy beside the divergence when distilling.")
    temperature: float = _setting(1.0, "Temperature of both distributions when distilling.")
    top_k: int = _setting(
        0, "Distil the teacher's likeliest tokens, this many, and all the others as one; 0 for every token."
    )
    hidden: float = _setting(
        0.0, "Weight of the error of every block's output, in shares of the teacher's, beside the divergence."
    )
    fit: str = _setting(
        "none",
        "What is set by least squares to the teacher's attention before the first step: the new layers' output "
        "projections (full), one scale for each head (scale) or nothing.",
        FITS,
    )
    length: int | None = _setting(None, "Tokens of a sequence in this stage; by default the recipe's.")
    weight_decay: float = _setting(0.0, "Weight decay of matrices.")
    beta1: float = _setting(0.9, "AdamW's first beta.")
    beta2: float = _setting(0.95, "AdamW's second beta.")
    clip: float = _setting(1.0, "Largest norm of the gradient.")

    def __post_init__(self) -> None:
        _check(self)
        for name, smallest, largest in (
            ("tokens", 1, None),
            ("length", 2, None),
            ("learning_rate", 0, None),
            ("body_learning_rate", 0, None),
            ("warmup", 0, 1),
            ("final", 0, 1),
            ("cross_entropy", 0, None),
            ("top_k", 0, None),
            ("hidden", 0, None),
            ("weight_decay", 0, None),
        ):
            _check_range(self, name, smallest, largest)
        for name in ("temperature", "clip"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"{name} must be above 0, found {getattr(self, name)!r}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise RecipeError(f"{name} must be at least 0 and below 1, found {getattr(self, name)!r}")

    @property
    def teaches_layers(self) -> bool:
        """Whether new layers learn from the attention that they took the place of."""
        return self.loss == "transfer" or self.fit != "none"

    @property
    def needs_teacher(self) -> bool:
        return self.loss != "finetune" or self.teaches_layers


@dataclass(frozen=True)
class Recipe:
    stages: tuple[Stage, ...] = field(default=(Stage(),), metadata={"help": "The stages, in order.", "choices": ()})
    length: int = _setting(512, "Tokens of a sequence.")
    batch_tokens: int = _setting(16_384, "Tokens of a step, over all processes.")
    micro_batch: int | None = _setting(
        None, "Sequences that a process takes through the model at once; by default what fits 80% of a GPU's memory."
    )
    precision: str = _setting("auto", "Arithmetic of the model; auto is bfloat16 on a GPU, else float32.", PRECISIONS)
    gradient_checkpointing: bool = _setting(False, "Recompute activations instead of keeping them: slower, smaller.")
    compile: bool = _setting(False, "Compile the blocks with torch.compile on a GPU: slower to start, faster steps.")
    dropout: bool = _setting(False, "Keep the model's own dropout while training.")
    lora: int = _setting(
        0, "Train low-rank updates of this rank on the projections, and the new parameters; 0 for all."
    )
    seed: int = _setting(0, "Seed of the order of the data and of dropout.")
    validate_every: int = _setting(100, "Steps between validations.")
    validation_tokens: int = _setting(65_536, "Tokens to validate on, at most.")
    checkpoint_every: int = _setting(100, "Steps between checkpoints.")
    diverged_above: float = _setting(1.0, "A run has diverged when its loss lies this far above its best, in nats …")
    diverged_for: int = _setting(200, "… for this many steps on end.")

    def __post_init__(self) -> None:
        _check(self, skip=("stages",))
        for name, smallest, largest in (
            ("length", 2, None),
            ("batch_tokens", 2, None),
            ("micro_batch", 1, None),
            ("lora", 0, None),
            ("seed", 0, LARGEST_SEED),
            ("validate_every", 1, None),
            ("validation_tokens", 2, None),
            ("checkpoint_every", 1, None),
            ("diverged_above", 0, None),
            ("diverged_for", 1, None),
        ):
            _check_range(self, name, smallest, largest)
        if not self.stages:
            raise RecipeError("stages must name at least one stage")
        for stage in self.stages:
            length = self.length_of(stage)
            if self.batch_tokens % length:
                raise RecipeError(
                    f"batch_tokens must be a multiple of the sequence length, found {self.batch_tokens} and {length}"
                )

    def length_of(self, stage: Stage) -> int:
        return stage.length or self.length

    def rows_of(self, stage: Stage) -> int:
        """Sequences of a step, over all processes."""
        return self.batch_tokens // self.length_of(stage)

    def steps_of(self, stage: Stage) -> int:
        return max(1, -(-stage.tokens // self.batch_tokens))

    @property
    def needs_teacher(self) -> bool:
        return any(stage.needs_teacher for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stages": [asdict(stage) for stage in self.stages]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        _check_names(cls, values, "")
        stages = values.get("stages", [{}])
        if not isinstance(stages, list | tuple) or not all(isinstance(stage, dict) for stage in stages):
            raise RecipeError(f"stages must be a list of settings, found {stages!r}")
        made = []
        for number, stage in enumerate(stages):
            _check_names(Stage, stage, f"stages[{number}].")
            with _errors_in(f"stages[{number}]"):
                made.append(Stage(**stage))
        return cls(**values | {"stages": tuple(made)})

    @classmethod
    def help(cls, name: str) -> str:
        metadata = next(f for f in fields(cls) if f.name == name).metadata
        return metadata["help"] + (f" [{'|'.join(metadata['choices'])}]" if metadata["choices"] else "")


RECIPE_FOLDER = Path(__file__).parents[1] / "recipes"


def load_recipe(name: str | os.PathLike) -> Recipe:
    """A shipped recipe by its name, or a YAML file."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = RECIPE_FOLDER / f"{name}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml")))
        found = "that is a folder" if Path(name).is_dir() else "its name must end in .yaml"
        found = found if Path(name).exists() else "no such recipe"
        raise RecipeError(f"--recipe {name}: {found}; shipped are {shipped}, or give a YAML file")
    values = read_settings(path)
    try:
        return Recipe.from_dict(numbers(values))
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def read_settings(path: Path, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> dict[str, Any]:
    """What a YAML file says."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold settings, `name: value`, found {type(values).__name__}")
    return values


def numbers(value: Any) -> Any:
    """YAML reads 1e-3 as a word; here it is a number, and 1e6 a whole one."""
    if isinstance(value, dict):
        return {name: numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [numbers(inner) for inner in value]
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def change(recipe: Recipe, changes: dict[str, Any]) -> Recipe:
    """A recipe with some settings replaced: `seed`, or `distill.tokens` for every stage with that loss."""
    own: dict[str, Any] = {}
    stages = list(recipe.stages)
    if "stages" in changes:
        raise RecipeError("stages cannot be changed as a whole: change one's setting, LOSS.NAME, or write a YAML file")
    for name, value in changes.items():
        loss, dot, setting = name.partition(".")
        if not dot:
            own[name] = value
            continue
        matching = [i for i, stage in enumerate(stages) if stage.loss == loss]
        if not matching:
            found = ", ".join(stage.loss for stage in stages)
            raise RecipeError(f"{name}={value}: the recipe has no stage {loss}; its stages are {found}")
        _check_names(Stage, {setting: value}, f"{loss}.")
        for i in matching:
            with _errors_in(loss):
                stages[i] = replace(stages[i], **{setting: value})
    _check_names(Recipe, own, "")
    return replace(recipe, **own | {"stages": tuple(stages)})


def parse_changes(texts: list[str]) -> dict[str, Any]:
    """`name=value` as it is typed, values read as YAML."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise RecipeError(f"--set takes NAME=VALUE, such as seed=1 or distill.tokens=100000, found {text!r}")
        try:
            changes[name.strip()] = numbers(yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise RecipeError(f"--set {text}: {value!r} is no value") from error
    return changes
