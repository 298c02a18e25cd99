"""What the tests of training share: a small text, tiny models, runs in this process and in others."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from fastweights import FastWeightsConfig
from fastweights.conversion import convert
from fastweights.training.log import CHECKSUM
from fastweights.training.recipe import Recipe
from fastweights.training.trainer import TrainConfig, resume, train
from fastweights.utils.progress import Display
from helpers.cli import tokenizer
from helpers.tiny import config_of, pretrained

LENGTH, ROWS = 32, 4
STEP = LENGTH * ROWS
WORDS = ("the cat", "a dog", "sees", "Hello", "world", "and then", "it rains.", "Why?", "nobody knows")
CHAIN = (
    dict(loss="transfer", tokens=6 * STEP, learning_rate=3e-3),
    dict(loss="distill", tokens=6 * STEP, learning_rate=1e-3),
)
FINETUNE = (dict(loss="finetune", tokens=6 * STEP, learning_rate=1e-3),)
# The best validation is that after step 4, which is not among the other checkpoints, and the last one is the worst.
PEAK = (
    dict(loss="finetune", tokens=6 * STEP, learning_rate=0.15, warmup=1.0, final=1.0),
    dict(loss="distill", tokens=6 * STEP, learning_rate=0.1, warmup=0.0),
)
QUIET = dict(batch_tokens=STEP, length=LENGTH, validation_tokens=4 * LENGTH)


class Files(NamedTuple):
    folder: Path
    base: Path
    converted: Path
    data: Path
    validation: Path


def write_text(path: Path, documents: int, seed: int) -> Path:
    """Documents shorter and longer than a row."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 20))) for _ in range(documents)]
    path.write_text("\n<|endoftext|>\n".join(texts))
    return path


def save_base(folder: Path, family: str = "gpt2", **changes: Any) -> Path:
    model = pretrained(family)
    if changes:
        model = type(model)(config_of(family, **changes))
        model.load_state_dict(pretrained(family).state_dict())
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_converted(folder: Path, base: Path, family: str = "gpt2", **settings: Any) -> Path:
    """As the convert command does it."""
    model = convert(type(pretrained(family)).from_pretrained(base), FastWeightsConfig(**{"m": 4} | settings))
    model.config.fastweights_base = str(base)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def training_files(folder: Path) -> Iterator[Files]:
    """A GPT-2, the same converted, text to train and to validate on."""
    base = save_base(folder / "base")
    converted = save_converted(folder / "converted", base, gate_init="log")
    texts = write_text(folder / "text.txt", 60, seed=0), write_text(folder / "validation.txt", 6, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTWEIGHTS_CACHE", str(folder / "cache"))
        yield Files(folder, base, converted, *texts)


def make_recipe(stages: tuple[dict[str, Any], ...] = CHAIN, **settings: Any) -> Recipe:
    every = dict(validate_every=4, checkpoint_every=3)
    return Recipe.from_dict(QUIET | every | settings | {"stages": list(stages)})


def make_train_config(files: Files, recipe: Recipe | None = None, **settings: Any) -> TrainConfig:
    usual = dict(model=str(files.converted), data=str(files.data), validation=str(files.validation), device="cpu")
    return TrainConfig(recipe=recipe or make_recipe(), **usual | settings)


def command(files: Files, output: Path, recipe: Recipe | None = None, *more: Any) -> tuple[Any, ...]:
    """The same task as it is typed."""
    path = output.with_name(f"{output.name}.yaml")
    path.write_text(yaml.safe_dump((recipe or make_recipe()).to_dict()))
    typed = ("--validation", files.validation, "--device", "cpu", "--recipe", path, "-o", output)
    return ("train", files.converted, "--data", files.data, *typed, *more)


class Crash(Exception):
    pass


class CrashingDisplay(Display):
    """Shows nothing, and ends the run in the middle of it after some steps."""

    def __init__(self, after: int = sys.maxsize, then: Callable[[], None] | None = None) -> None:
        super().__init__(enabled=False)
        self.steps_left, self.then = after, then

    def step(self, loss: float, tokens: int) -> None:
        super().step(loss, tokens)
        self.steps_left -= 1
        if self.steps_left == 0:
            if self.then is None:
                raise Crash
            self.then()


def train_in(folder: Path, config: TrainConfig) -> dict[str, Any]:
    return train(config, folder, display=Display(enabled=False)).to_dict()


def resume_in(folder: Path) -> dict[str, Any]:
    return resume(folder, display=Display(enabled=False)).to_dict()


def crash_after(folder: Path, task: TrainConfig, steps: int) -> None:
    with pytest.raises(Crash):
        train(task, folder, display=CrashingDisplay(steps))


def log_of(folder: Path) -> str:
    return (folder / "log.jsonl").read_text()


def numbers_logged(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log without their checksums."""
    lines = [json.loads(line) for line in log_of(folder).splitlines()]
    return [{name: value for name, value in line.items() if name != CHECKSUM} for line in lines]


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in numbers_logged(folder) if "loss" in line]


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_run(found: Path, expected: Path) -> None:
    """The same losses and the same last and best weights, to the last bit."""
    assert log_of(found) == log_of(expected)
    for name in ("last", "best"):
        assert (found / name).readlink() == (expected / name).readlink()
        ours, theirs = weights_of(found / name), weights_of(expected / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


def assert_only_retained_checkpoints(folder: Path) -> None:
    """The last two checkpoints are whole, of the best ones there is the model, and nothing else is there."""
    from fastweights.utils.manifest import find_damage  # these helpers also serve measurements of older versions

    found = sorted(os.listdir(folder / "checkpoints"), key=lambda name: name.split("-")[::-1])
    recent = found[-2:]
    progress = [json.loads((folder / "checkpoints" / name / "progress.json").read_text()) for name in recent]
    steps = {point["best"]["step"] for point in progress if point["best"] is not None}
    assert all(find_damage(folder / "checkpoints" / name) is None for name in recent)
    assert all(name in recent or int(name.split("-")[1]) in steps for name in found), found
    assert (folder / "last").readlink().name == recent[-1]
    assert int((folder / "best").readlink().name.split("-")[1]) == progress[-1]["best"]["step"]


# Processes start from one that has imported everything: that takes many times longer than the runs.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["fastweights.experiments.runner", "transformers.models.gpt2.modeling_gpt2", "helpers.cli"]
)


def _program(arguments: list[str], environment: dict[str, str], output: Path, largest_file: int | None) -> None:
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)  # a forked process has those of its parent
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    from fastweights.cli import main
    from fastweights.experiments import runner

    runner.launch = launch_forked  # the runs of a comparison must start quickly, too
    sys.argv = ["fastweights", *arguments]
    main()


class Launched:
    """A process as `runner.launch` returns it, forked from one that has imported everything."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.process.start()
        self.pid, self.terminate, self.kill = process.pid, process.terminate, process.kill

    def poll(self) -> int | None:
        return self.process.exitcode


def launch_forked(arguments: list[str], log: Any, lock: Any, threads: int, environment: Any) -> Launched:
    return Launched(
        multiprocessing.get_context("fork").Process(target=_program, args=(arguments, {}, Path(log.name), None))
    )


def launch_from_server(arguments: list[str], log: Any, lock: Any, threads: int, environment: Any) -> Launched:
    """For the process of the tests itself. The parent of what it starts is the fork server, so nobody watches it."""
    unwatched = [part for part in arguments if part not in ("--parent", str(os.getpid()))]
    return Launched(PROCESSES.Process(target=_program, args=(unwatched, {}, Path(log.name), None)))


class Program:
    """`fastweights ARGUMENTS` in a process of its own."""

    def __init__(self, output: Path, *arguments: Any, largest_file: int | None = None, **environment: Any) -> None:
        self.output_file = output
        variables = {name: str(value) for name, value in environment.items()}
        self.process = PROCESSES.Process(
            target=_program, args=([str(a) for a in arguments], variables, output, largest_file)
        )
        self.process.start()
        self.pid = self.process.pid

    @property
    def output(self) -> str:
        """All it printed, without the line breaks of a narrow terminal."""
        return " ".join(self.output_file.read_text().split())

    def running(self) -> bool:
        return self.process.is_alive()

    def wait(self, seconds: float = 60) -> int | None:
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running after {seconds} s: {self.output}"
        return self.process.exitcode


def two_programs(folder: Path, *arguments: Any) -> list[Program]:
    """The same command as two processes of one run, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = dict(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free.getsockname()[1])
    folder.mkdir(exist_ok=True)
    return [Program(folder / f"output-{r}", *arguments, RANK=r, LOCAL_RANK=r, **shared) for r in range(2)]


def wait_until(happened: Callable[[], Any], running: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert running(), "it ended before"
        assert time.monotonic() < end, f"it did not happen in {seconds} s"
        time.sleep(0.001)


def lines_in(folder: Path) -> int:
    path = folder / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0
