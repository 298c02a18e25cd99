"""What a training run is made of, as run.json records it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fastweights.training.recipe import Recipe
from fastweights.training.run_folder import TrainingError
from fastweights.utils.errors import Argument
from fastweights.utils.files import absolute
from fastweights.utils.settings import check_settings, setting


@dataclass(frozen=True)
class TrainConfig:
    """What is trained on what.

    Attributes:
        model: Folder of the model to train, converted or not.
        data: The text, as `prepare` takes it.
        recipe: How it is trained.
        teacher: Hub id or folder of the teacher; by default the model that `model` was converted from.
        validation: The text to validate on; None for no validation.
        text_field, limit, device, shard, report_to, memory_share: As their descriptions below.

    Raises:
        TrainingError: A value is of the wrong type or out of range.
    """

    model: str
    data: str
    recipe: Recipe
    teacher: str | None = None
    validation: str | None = None
    text_field: str = setting("text", "Field that holds the text in JSON lines, parquet files and data sets.")
    limit: int | None = setting(None, "Tokens to use of each text, at most.", ge=1)
    device: str | None = setting(None, '"cpu" or "cuda"; by default a GPU where there is one.')
    shard: bool = setting(False, "Shard the model over the processes (FSDP) instead of replicating it (DDP).")
    report_to: str | None = setting(None, 'A tracker that accelerate knows, such as "tensorboard".')
    memory_share: float = setting(1.0, "Share of the GPU's memory that this run may use.", gt=0, le=1)

    def __post_init__(self) -> None:
        for name in ("model", "data", "teacher", "validation"):
            value, is_optional = getattr(self, name), name in ("teacher", "validation")
            if not (isinstance(value, str) or (is_optional and value is None)):
                raise TrainingError(Argument(name), f" must be a string, found {value!r}")
        check_settings(self, TrainingError)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for run.json."""
        return asdict(self) | {"recipe": self.recipe.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The settings that `to_dict` returned."""
        return cls(**values | {"recipe": Recipe.from_dict(values["recipe"])})

    def with_absolute_paths(self) -> TrainConfig:
        """The same, for a run that may be resumed from another working directory."""
        sources: dict[str, Any] = {}
        for name in ("model", "data", "teacher", "validation"):
            source = getattr(self, name)
            sources[name] = None if source is None else absolute(source)
        return replace(self, **sources)
