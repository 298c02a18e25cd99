"""A short training run that is interrupted at every file operation, and what becomes of it."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fastweights.training import checkpoint
from fastweights.training.trainer import Diverged, TrainConfig, Trainer, resume, train
from fastweights.utils.errors import FastWeightsError
from fastweights.utils.progress import Display
from helpers.disk import Image, RecordedDisk, failing_disk, write_image
from helpers.training import (
    FINETUNE,
    STEP,
    Files,
    assert_same_run,
    log_of,
    make_recipe,
    make_train_config,
    weights_of,
)


def short_run(files: Files) -> TrainConfig:
    """Four steps, a checkpoint after every second one, a validation after the third."""
    stage = dict(FINETUNE[0], tokens=4 * STEP)
    return make_train_config(files, make_recipe((stage,), checkpoint_every=2, validate_every=3))


def quiet() -> Display:
    return Display(console=Console(file=io.StringIO()))


@contextmanager
def disk_at(root: Path) -> Iterator[Path]:
    """The run's folder on a disk, which also has the token cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTWEIGHTS_CACHE", str(root / "cache"))
        yield root / "run"


def record_run(config: TrainConfig, root: Path) -> RecordedDisk:
    """Train on a recorded disk. `reported` is the step of the newest checkpoint that was written, or "finished"."""
    root.mkdir()
    disk, write = RecordedDisk(root), checkpoint.write_checkpoint
    disk.reported = 0

    def report(*args: Any) -> None:
        write(*args)
        disk.reported = args[-1].step

    with disk_at(root) as folder, pytest.MonkeyPatch.context() as patch, disk.record():
        patch.setattr(checkpoint, "write_checkpoint", report)
        train(config, folder, display=quiet())
        disk.reported = "finished"
    return disk


def outcome_of_image(config: TrainConfig, expected: Path, root: Path, image: Image, reported: Any) -> str:
    """Start or resume the run on an image of the disk, and compare it with one that was not interrupted."""
    write_image(root, image)
    with disk_at(root) as folder:
        if reported == "finished" and not _is_finished(folder):
            return "lost"
        return outcome(config, expected, folder, 0 if reported == "finished" else reported)


def outcome_of_error(config: TrainConfig, expected: Path, root: Path, number: int, lasting: bool) -> str:
    """Train on a disk that fails at an operation; then resume the run on one that works."""
    root.mkdir()
    with disk_at(root) as folder:
        try:
            with failing_disk(root, number, lasting):
                train(config, folder, display=quiet())
        except FastWeightsError:
            pass
        except Exception as error:
            return f"traceback: {type(error).__name__}"
        return outcome(config, expected, folder, 0)


def outcome(config: TrainConfig, expected: Path, folder: Path, reported: int) -> str:
    """Start or resume a run that was interrupted.

    Returns:
        "same": It ends as `expected`, to the last bit.
        "lost": It does so, too, but it resumed before the checkpoint of step `reported`.
        "different": It ends otherwise.
        "refused": It is refused with a message.
        "traceback": Any other error.
    """
    steps: list[int] = []
    run = Trainer.run

    def note(trainer: Trainer) -> Any:
        steps.append(trainer.progress.step)
        return run(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "run", note)
        try:
            if (folder / checkpoint.RUN).is_file():
                resume(folder, display=quiet())
            else:
                train(config, folder, display=quiet())
        except (FastWeightsError, Diverged):
            return "refused"
        except Exception as error:
            return f"traceback: {type(error).__name__}"
    if not is_same_run(folder, expected):
        return "different"
    return "same" if steps[0] >= reported else "lost"


def is_same_run(folder: Path, expected: Path) -> bool:
    try:
        assert_same_run(folder, expected)
    except (AssertionError, OSError, ValueError):
        return False
    return True


def _is_finished(folder: Path) -> bool:
    try:
        return bool(checkpoint.read_run_file(folder / checkpoint.RESULT)["finished"])
    except FastWeightsError:
        return False


def mutations(run: Path, count: int, seed: int = 0) -> list[tuple[Path, str, int]]:
    """Files of a run (relative to it), what to do to each, and a number to do it with: all are equally frequent."""
    draw = random.Random(seed)
    last = Path("checkpoints", (run / "last").readlink().name)
    files = [*(last / path.name for path in sorted((run / last).iterdir())), Path("run.json"), Path("log.jsonl")]
    kinds = ("flip", "truncate", "delete", "digit", "insert")
    return [(files[n % len(files)], kinds[n // len(files) % len(kinds)], draw.randrange(2**30)) for n in range(count)]


def mutate(path: Path, kind: str, number: int) -> None:
    """Damage a file: a flipped bit, a cut, another digit, inserted bytes; or delete it."""
    content = bytearray(path.read_bytes())
    place = number % len(content)
    if kind == "delete":
        path.unlink()
        return
    if kind == "flip":
        content[place] ^= 1 << number % 8
    elif kind == "truncate":
        del content[place:]
    elif kind == "insert":
        content[place:place] = b"7e\n"
    else:
        digits = [i for i, byte in enumerate(content) if byte in b"0123456789"]
        place = digits[number % len(digits)]
        content[place] = b"0123456789"[(content[place] - 48 + 1 + number % 9) % 10]
    path.write_bytes(content)


def outcome_of_mutation(
    config: TrainConfig, expected: Path, crashed: Path, root: Path, file: Path, kind: str, number: int
) -> str:
    """Damage a file of a run that crashed, and resume it. A log with a line less counts as announced, not as another
    result."""
    shutil.copytree(crashed, root, symlinks=True)
    mutate(root / file, kind, number)
    found = outcome(config, expected, root, 0)
    if found == "different" and file.name == checkpoint.LOG and _is_finished(root):
        ours, theirs = (weights_of(folder / "last") for folder in (root, expected))
        known = set(log_of(expected).splitlines())
        if all(torch.equal(ours[name], theirs[name]) for name in theirs) and known.issuperset(
            log_of(root).splitlines()
        ):
            return "same weights, lines of the log lost"
    return found


def evenly(items: list[Any], count: int) -> list[Any]:
    """At most `count` items, spread over all of them."""
    return items[:: max(1, -(-len(items) // count))]
