"""One run of a comparison on disk: how it is prepared, which settings it was started with, how it is measured.

A comparison's folder:
    runs/NAME/begun.json   the settings that the run was started with
    runs/NAME/converted/   the base with this variant's layers
    runs/NAME/training/    the training run, which `fastweights train --resume` starts and resumes
    runs/NAME/log.txt      what its processes printed
    runs/NAME/process      the lock of the run, with the process that holds it
    results/NAME.json      the result; where it exists, the run is done
    base/                  the copy of a base in a GGUF file (see `base_model`)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastweights.config import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.experiments.base_model import ComparisonBase
from fastweights.experiments.grid import GridError, Variant, result_file
from fastweights.loading import save
from fastweights.results import ResultError, TrainingResult
from fastweights.training import checkpoint as saved
from fastweights.training.recipe import Recipe
from fastweights.training.trainer import TrainConfig
from fastweights.utils.errors import Argument
from fastweights.utils.files import FileLock, LockedError, absolute, make_folder, write_json

MOST_CHANGES = 4


@dataclass(frozen=True)
class Setup:
    """What the runs of a comparison share. `tests` are data sources by their names; `recall` is whether the recall
    probe is run."""

    folder: Path
    model: str
    data: str
    validation: str
    tests: dict[str, str] = field(default_factory=dict)
    recall: bool = False
    limit: int | None = None
    device: str | None = None
    keep: bool = False

    @property
    def measures(self) -> list[str]:
        """What is measured of every trained model: the names of the tests, and recall."""
        return [*self.tests, *(["recall"] if self.recall else [])]

    def with_absolute_paths(self) -> Setup:
        """The same, for a comparison that may be resumed from another working directory."""
        sources: dict[str, Any] = {name: absolute(getattr(self, name)) for name in ("model", "data", "validation")}
        tests = {name: absolute(source) for name, source in self.tests.items()}
        return replace(self, folder=self.folder.absolute(), tests=tests, **sources)


class Job:
    """A variant in the folder of its comparison."""

    def __init__(self, setup: Setup, variant: Variant) -> None:
        self.setup, self.variant, self.name = setup, variant, variant.name
        self.folder = setup.folder / "runs" / self.name
        self.started, self.log = self.folder / "begun.json", self.folder / "log.txt"
        self.converted, self.training = self.folder / "converted", self.folder / "training"
        self.result = result_file(setup.folder, self.name)
        self.lock = FileLock(self.folder / "process")
        self.config = TrainConfig(
            setup.model, setup.data, variant.recipe, None, setup.validation, limit=setup.limit, device=setup.device
        )

    def acquire(self) -> bool:
        """Lock the run; False if another process holds it. A training process inherits the lock, so that nobody
        resumes the run beside it after the comparison was killed."""
        make_folder(self.folder)
        try:
            self.lock.acquire()
        except LockedError:
            return False
        return True

    # Settings

    def settings(self) -> dict[str, Any]:
        """Everything that the outcome of the run depends on."""
        config, training = self.variant.config, self.config.to_dict()
        settings: dict[str, Any] = {"settings": None if config is None else config.to_dict()}
        settings |= {"tests": self.setup.tests, "recall": self.setup.recall}
        return settings | {name: training[name] for name in ("recipe", "model", "data", "validation", "limit")}

    def check_unchanged(self) -> None:
        """Refuse to resume or to reuse a run that was started with other settings.

        A run without a checkpoint starts anew: so one that failed at its start can be corrected.

        Raises:
            GridError: which settings differ, and what to do.
        """
        if not self.is_trained() and saved.was_never_saved(self.training):
            return
        before = self._settings_before()
        now, then = _flat({name: value for name, value in self.settings().items() if name in before}), _flat(before)
        changed = [name for name in {**then, **now} if now.get(name) != then.get(name)]
        if changed:
            shown = [f"{name} is {now.get(name)!r} and was {then.get(name)!r}" for name in changed[:MOST_CHANGES]]
            shown += ["…"] if len(changed) > MOST_CHANGES else []
            paths = " and ".join(str(path) for path in (self.folder, self.result) if path.exists())
            raise GridError(
                f"run {self.name} was started with other settings: {', '.join(shown)}; restore them, give the "
                "run another name, choose another folder (",
                Argument("output"),
                f"), or delete {paths} to start it anew",
            )

    def _settings_before(self) -> dict[str, Any]:
        if self.result.is_file() and not self.started.is_file():  # as when only results were copied
            result = self.read_result()
            found: dict[str, Any] = {"settings": self._as_begun(result.model.settings), "recipe": result.recipe}
        else:
            found = saved.read_run_file(self.started)
            if not isinstance(found, dict) or not {"settings", "recipe"} <= found.keys():
                raise GridError(f"{self.started} must have settings and recipe: restore it, or delete {self.folder}")
        # a setting that an older version did not have gets its default
        config = None if found["settings"] is None else FastWeightsConfig.from_dict(found["settings"]).to_dict()
        return found | {"settings": config, "recipe": Recipe.from_dict(found["recipe"]).to_dict()}

    def _as_begun(self, settings: dict[str, Any] | None) -> dict[str, Any] | None:
        """The settings of a trained model without the wide layers that its conversion chose."""
        config = self.variant.config
        if settings is None or config is None or not config.wide_window or config.wide_layers is not None:
            return settings
        return settings | {"wide_window": settings.get("wide_window") or config.wide_window, "wide_layers": None}

    # Training

    def needs_base(self) -> bool:
        """Whether the run will convert the base: it has not begun yet, and does not train the base itself."""
        return self.variant.config is not None and not self.is_trained() and saved.was_never_saved(self.training)

    def is_trained(self) -> bool:
        """Whether the training is over. The tests may not have been measured yet."""
        return self.result.is_file() or (self.training / saved.RESULT).is_file()

    def prepare(self, base: ComparisonBase, memory_share: float, announce: Callable[[str], None]) -> None:
        """Make `training` ready for `fastweights train --resume`, which starts the run or resumes it.

        Only a run that never had a checkpoint starts anew. One that lost them is refused by `--resume`.

        Args:
            base: The model of the comparison.
            memory_share: Share of the GPU's memory that the run may use.
            announce: Gets a line if the run was started before and starts anew.

        Raises:
            LockedError: Another process trains in the folder.
        """
        make_folder(self.training)
        with FileLock(self.training / saved.LOCK) as lock:
            lock.acquire()
            starts = saved.was_never_saved(self.training)
            if starts and (self.training / saved.RUN).is_file():
                announce(f"{self.name}: no checkpoint was written yet in {self.training}: the run starts at step 0")
            with self.log.open("a") as log:
                print("started" if starts else "resumed", file=log)
            if starts:
                self._start_over(base)
            config = replace(self.config, **self._models(base), memory_share=memory_share)
            saved.write_run(self.training, config.to_dict(), checkpointed=not starts)

    def _models(self, base: ComparisonBase) -> dict[str, Any]:
        """Where the training process loads its model and its teacher from."""
        if self.variant.config is None:
            return {"model": base.quick_source()}
        source = base.quick_source() if self.variant.recipe.needs_teacher else base.source
        # By default the teacher is the model that the converted one names.
        return {"model": str(self.converted), "teacher": None if source == base.source else source}

    def _start_over(self, base: ComparisonBase) -> None:
        """Delete what a run without a checkpoint left, but for the lock, and prepare a new one."""
        left = [path for path in self.training.iterdir() if path.name not in (saved.LOCK, saved.RUN)]
        # run.json last: it says that there was no checkpoint
        for path in (*left, self.training / saved.RUN, self.converted):
            _remove(path)
        write_json(self.started, self.settings())
        if self.variant.config is not None:
            model = convert(base.for_conversion(), self.variant.config)
            model.config.fastweights_base = self.setup.model
            save(model, self.converted, base.tokenizer)

    # Result

    def read_result(self) -> TrainingResult:
        """The result, with the cell that the grid has now."""
        try:
            result = TrainingResult.read(self.result)
        except ResultError as error:
            raise GridError(f"{error}, or delete it: then the run is done again") from error
        if result.cell != self.variant.cell:
            result = replace(result, cell=self.variant.cell)
            result.write(self.result)
        return result

    def measure_arguments(self) -> list[str]:
        """The arguments of the program that measures the trained model and writes the result."""
        setup = self.setup
        arguments = ["measure-run", str(self.training), str(self.result), self.name, "--tests", json.dumps(setup.tests)]
        arguments += ["--recall"] if setup.recall else []
        return arguments + (["--device", setup.device] if setup.device else [])

    def finish(self) -> None:
        """Delete the models of a run whose result is written, and give the result its cell."""
        self.read_result()
        if not self.setup.keep:
            self._remove_models()

    def _remove_models(self) -> None:
        """The log of the steps stays. Without run.json there is no run to resume."""
        old_name = self.folder / "swapped"  # of `converted`, in comparisons that were started earlier
        for path in (*self.training.iterdir(), self.converted, old_name):
            if path.name != saved.LOG:
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Nested settings by dotted names."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {place: value}
    inner = (_flat(part, f"{place}.{name}" if place else str(name)) for name, part in value.items())
    return {name: leaf for part in inner for name, leaf in part.items()}
