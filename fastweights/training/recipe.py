"""Recipes: how a model is trained. A YAML file holds the fields that differ from the defaults here. Each field is
documented once, and the command line shows these descriptions as its help."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fastweights.config import LARGEST_SEED
from fastweights.utils.errors import Argument, FastWeightsError, error_context
from fastweights.utils.parsing import ParseError, parse_yaml, read_yaml
from fastweights.utils.settings import check_names, check_settings, setting, setting_help

LOSSES = ("finetune", "transfer", "distill")
PRECISIONS = ("auto", "float32", "bfloat16")
FITS = ("none", "scale", "full")
# Larger values would overflow in the optimizer, need more memory than any machine has, or never end.
LARGEST_TOKENS, LARGEST_RATE, LARGEST_LORA_RANK = 10**15, 10**6, 2**16


# Room for a passage of 16 tokens, 16 others, the passage again, and what may not change in a sequence.
SHORTEST_WITH_RECALL = 64


class RecipeError(FastWeightsError):
    """A recipe with an unknown or wrong setting."""


@dataclass(frozen=True)
class Stage:
    """One loss, trained for a number of tokens."""

    loss: str = setting(
        "finetune",
        "finetune: cross-entropy; transfer: each new layer learns the teacher's attention output from the teacher's "
        "input; distill: divergence from the teacher's next-token distribution.",
        LOSSES,
    )
    tokens: int = setting(1_000_000, "Tokens to train on.", ge=1, le=LARGEST_TOKENS)
    learning_rate: float = setting(
        1e-3,
        "Peak learning rate of the new attention, or of all parameters if no layer is converted.",
        ge=0,
        le=LARGEST_RATE,
    )
    body_learning_rate: float | None = setting(
        None,
        "Peak learning rate of the rest of the model (0 freezes it); by default learning_rate.",
        ge=0,
        le=LARGEST_RATE,
    )
    warmup: float = setting(
        0.05, "Fraction of the steps of the stage during which the learning rate rises from 0.", ge=0, le=1
    )
    final: float = setting(
        0.1, "Final learning rate of the cosine schedule, as a fraction of the peak; 1 for a constant rate.", ge=0, le=1
    )
    cross_entropy: float = setting(
        0.0, "Weight of the cross-entropy that is added to the divergence when distilling.", ge=0
    )
    temperature: float = setting(1.0, "Temperature of both distributions when distilling.", gt=0)
    top_k: int = setting(
        0, "Distill only this many of the teacher's likeliest tokens, with all others as one; 0 for all.", ge=0
    )
    hidden: float = setting(
        0.0, "Weight of the relative error of every block's output that is added to the divergence.", ge=0
    )
    fit: str = setting(
        "none",
        "What to fit to the teacher's attention by least squares before the first step: the output projections of the "
        "new layers (full), one scale for each head (scale) or nothing (none). With gate_init=teacher, full and scale "
        "also set the memory lengths.",
        FITS,
    )
    recall: float = setting(
        0.0,
        "Share of the sequences that are made to need recall: a passage is repeated later, or pairs are listed and "
        "asked for again.",
        ge=0,
        le=1,
    )
    window_dropout: float = setting(
        0.0,
        "Share of the sequences that are trained without the window: all layers use the output of the state alone.",
        ge=0,
        le=1,
    )
    length: int | None = setting(None, "Tokens in a sequence in this stage; by default that of the recipe.", ge=2)
    weight_decay: float = setting(0.0, "Weight decay of the matrices.", ge=0)
    beta1: float = setting(0.9, "AdamW's first beta.", ge=0, lt=1)
    beta2: float = setting(0.95, "AdamW's second beta.", ge=0, lt=1)
    clip: float = setting(1.0, "Largest gradient norm; gradients are clipped to it.", gt=0)

    def __post_init__(self) -> None:
        check_settings(self, RecipeError)

    @property
    def teaches_layers(self) -> bool:
        """Whether new layers learn from the attention that they replaced."""
        return self.loss == "transfer" or self.fit != "none"

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss compares the student with a teacher."""
        return self.loss != "finetune" or self.teaches_layers


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: stages, and what they share. Settings are checked when the object is made.

    Raises:
        RecipeError: A setting is unknown, has a wrong type or value, or does not fit the others.
    """

    stages: tuple[Stage, ...] = field(default=(Stage(),), metadata={"help": "The stages, in order.", "choices": ()})
    length: int = setting(512, "Tokens in a sequence.", ge=2)
    batch_tokens: int = setting(16_384, "Tokens in a step, over all processes.", ge=2)
    micro_batch: int | None = setting(
        None,
        "Sequences in a forward pass of a process; by default as many as fit in 80% of the GPU's memory.",
        ge=1,
    )
    precision: str = setting("auto", "Arithmetic of the model; auto is bfloat16 on a GPU, else float32.", PRECISIONS)
    gradient_checkpointing: bool = setting(
        False, "Recompute activations instead of storing them: slower, but less memory."
    )
    compile: bool = setting(False, "Compile the blocks with torch.compile on a GPU: slower to start, faster steps.")
    cuda_graphs: bool = setting(
        False, "Run each micro-batch as a CUDA graph on a GPU, in a run of one process: less work for the host."
    )
    dropout: bool = setting(False, "Use the dropout of the pretrained model while training.")
    lora: int = setting(
        0,
        "Train only LoRA updates of this rank and the new parameters; 0 trains all parameters.",
        ge=0,
        le=LARGEST_LORA_RANK,
    )
    seed: int = setting(0, "Seed of the order of the data and of dropout.", ge=0, le=LARGEST_SEED)
    validate_every: int = setting(100, "Steps between validations.", ge=1)
    validation_tokens: int = setting(65_536, "Validate on at most this many tokens.", ge=2)
    checkpoint_every: int = setting(100, "Steps between checkpoints.", ge=1)
    diverged_above: float = setting(
        1.0, "A run has diverged if its loss is more than this many nats above its best, for diverged_for steps.", ge=0
    )
    diverged_for: int = setting(200, "Consecutive steps above diverged_above after which a run has diverged.", ge=1)

    def __post_init__(self) -> None:
        check_settings(self, RecipeError)
        if not self.stages:
            raise RecipeError(Argument("stages"), " must name at least one stage")
        for name in ("dropout", "gradient_checkpointing"):
            if self.cuda_graphs and getattr(self, name):
                raise RecipeError(Argument("cuda_graphs"), " cannot be used with ", Argument(name), ": leave one out")
        for stage in self.stages:
            length = self.length_of(stage)
            given = Argument("length") if stage.length is None else f"{stage.loss}.length"
            if self.batch_tokens % length:
                found = (f", found {self.batch_tokens} and ", given, f"={length}")
                raise RecipeError(Argument("batch_tokens"), " must be a multiple of the sequence length", *found)
            if stage.recall and length < SHORTEST_WITH_RECALL:
                needed = f" must be at least {SHORTEST_WITH_RECALL}, found {length}"
                raise RecipeError(f"{stage.loss}.recall={stage.recall:g}: ", given, needed)

    def length_of(self, stage: Stage) -> int:
        """Tokens of a sequence in this stage."""
        return stage.length or self.length

    def rows_of(self, stage: Stage) -> int:
        """Sequences of a step, over all processes."""
        return self.batch_tokens // self.length_of(stage)

    def steps_of(self, stage: Stage) -> int:
        """Steps of a stage, rounded up to whole batches."""
        return max(1, -(-stage.tokens // self.batch_tokens))

    def validations_of(self, stage: Stage, done: int = 0) -> int:
        """Validations of a stage after `done` steps of it: at intervals, and one at its end."""
        steps, every = self.steps_of(stage), self.validate_every
        return steps // every - done // every + (steps % every > 0)

    @property
    def needs_teacher(self) -> bool:
        """Whether any stage needs a teacher."""
        return any(stage.needs_teacher for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values. `from_dict` reverses it."""
        return asdict(self) | {"stages": [asdict(stage) for stage in self.stages]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The recipe with these settings; RecipeError names a setting that is unknown or wrong."""
        check_names(cls, values, RecipeError)
        stages = values.get("stages", [{}])
        if not isinstance(stages, list | tuple) or not all(isinstance(stage, dict) for stage in stages):
            raise RecipeError(Argument("stages"), f" must be a list of settings, found {stages!r}")
        made = []
        for number, stage in enumerate(stages):
            check_names(Stage, stage, RecipeError, f"stages[{number}].")
            with error_context(f"stages[{number}].", plain=True):
                made.append(Stage(**stage))
        return cls(**values | {"stages": tuple(made)})

    @classmethod
    def help(cls, name: str) -> str:
        """The description of a setting, with its choices."""
        return setting_help(cls, name)


RECIPE_FOLDER = Path(__file__).parents[1] / "recipes"


def load_recipe(name: str | os.PathLike) -> Recipe:
    """A shipped recipe by its name, or a YAML file."""
    path = find_settings(name, "recipe", RECIPE_FOLDER)
    values = read_settings(path)
    with error_context(f"{path}: ", plain=True):
        return Recipe.from_dict(numbers(values))


def find_settings(name: str | os.PathLike, kind: str, shipped: Path) -> Path:
    """The YAML file of a recipe or grid (`kind`): a file, or the name of one in the folder `shipped`."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = shipped / f"{name}.yaml"
    if not os.path.isfile(path):  # unlike Path.is_file, also False for names that are too long
        names = ", ".join(sorted(file.stem for file in shipped.glob("*.yaml")))
        found = "that is a folder" if os.path.isdir(name) else "its name must end in .yaml"
        found = found if os.path.exists(name) else f"no such {kind}"
        raise RecipeError(Argument(kind), f" {name}: {found}; shipped are {names}, or give a YAML file")
    return path


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML file."""
    try:
        values = read_yaml(path)
    except ParseError as error:
        raise RecipeError(f"{path} {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold settings, `name: value`, found {type(values).__name__}")
    return values


def numbers(value: Any) -> Any:
    """YAML reads 1e-3 as a string. Here it becomes a float, and 1e6 a whole number."""
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
        loss, dot, field_name = name.partition(".")
        if not dot:
            own[name] = value
            continue
        matching = [i for i, stage in enumerate(stages) if stage.loss == loss]
        if not matching:
            found = ", ".join(stage.loss for stage in stages)
            raise RecipeError(f"{name}={value}: the recipe has no stage {loss}; its stages are {found}")
        check_names(Stage, [field_name], RecipeError, f"{loss}.")
        for i in matching:
            with error_context(f"{loss}.", plain=True):
                stages[i] = replace(stages[i], **{field_name: value})
    losses = dict.fromkeys(stage.loss for stage in stages)
    check_names(Recipe, own, RecipeError, elsewhere=[f"{loss}.{f.name}" for loss in losses for f in fields(Stage)])
    return replace(recipe, **own | {"stages": tuple(stages)})


def for_all_stages(recipe: Recipe, values: dict[str, Any]) -> dict[str, Any]:
    """Changes that give every stage these settings, without those that are None."""
    given = {name: value for name, value in values.items() if value is not None}
    return {f"{stage.loss}.{name}": value for stage in recipe.stages for name, value in given.items()}


def parse_changes(texts: list[str]) -> dict[str, Any]:
    """Parse `name=value` strings; values are YAML."""
    changes = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            expected = " takes NAME=VALUE, such as seed=1 or distill.tokens=100000"
            raise RecipeError(Argument("changes"), f"{expected}, found {text!r}")
        try:
            changes[name.strip()] = numbers(parse_yaml(value))
        except ParseError as error:
            raise RecipeError(Argument("changes"), f" {text}: {value!r} is no value") from error
    return changes
