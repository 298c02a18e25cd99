"""Training as processes: killed at any moment, asked to stop, out of room, and two sharing one run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.cli import tokenizer
from helpers.training import (
    CHAIN,
    FINETUNE,
    LENGTH,
    ROWS,
    STEP,
    Files,
    Program,
    assert_only_retained_checkpoints,
    assert_same_run,
    command,
    lines_in,
    log_of,
    losses_of,
    make_recipe,
    make_train_config,
    numbers_logged,
    resume_in,
    save_base,
    save_converted,
    train_in,
    training_files,
    two_programs,
    wait_until,
    weights_of,
)
from transformers import AutoModelForCausalLM

from fastweights.data.batches import PackedBatches
from fastweights.data.token_files import prepare
from fastweights.training.recipe import Recipe

MANY = 16
LONG = make_recipe(
    (dict(CHAIN[0], tokens=MANY * STEP), dict(CHAIN[1], tokens=MANY * STEP)),
    checkpoint_every=1,
    validate_every=5,
    dropout=True,
)
# In a row, for two processes: what they learn from transfer, distilling and cross-entropy.
ALL_LOSSES = make_recipe(tuple(dict(stage, tokens=3 * STEP) for stage in (*CHAIN, *FINETUNE)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("processes")) as made:
        yield made


@pytest.fixture(scope="module")
def with_dropout(files: Files) -> Files:
    base = save_base(files.folder / "dropout base", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    return files._replace(converted=save_converted(files.folder / "dropout", base))


@pytest.fixture(scope="module")
def undisturbed(with_dropout: Files) -> Path:
    train_in(with_dropout.folder / "undisturbed", make_train_config(with_dropout, LONG))
    return with_dropout.folder / "undisturbed"


@pytest.fixture(scope="module")
def alone(files: Files) -> Path:
    """All losses in one process."""
    train_in(files.folder / "alone", make_train_config(files, ALL_LOSSES))
    return files.folder / "alone"


def kill_when(happened: Callable[[], Any], program: Program) -> None:
    wait_until(happened, program.running)
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL


def unfinished(folder: Path) -> set[tuple[str, int]]:
    """Checkpoints that are being written, or were when a process was killed."""
    found = set()
    for path in (folder / "checkpoints").glob(".*.tmp"):
        with suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ctime_ns))
    return found


def kill_while_writing(folder: Path, start: Callable[[], Program]) -> None:
    """The process is stopped when it is seen to write a checkpoint, and killed if it still does."""
    before, program = unfinished(folder), start()

    def writing() -> bool:
        return bool(unfinished(folder) - before)

    while True:
        wait_until(writing, program.running)
        os.kill(program.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(program.pid).status() == psutil.STATUS_STOPPED, program.running)
        if writing():
            break
        os.kill(program.pid, signal.SIGCONT)
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL and writing()


def test_resume_after_sigkill_matches_uninterrupted_run(with_dropout: Files, undisturbed: Path) -> None:
    """`python -m fastweights train`, then --resume: killed in its first steps, while it writes a checkpoint, on the
    border between the stages, somewhere in the second, and while it writes there."""
    folder, output = with_dropout.folder / "killed", with_dropout.folder / "killed.txt"
    draw = random.Random(4)
    steps = [draw.randint(2, 5) for _ in range(2)]
    typed = [str(part) for part in command(with_dropout, folder, LONG)]
    first = subprocess.Popen(
        [sys.executable, "-m", "fastweights", *typed],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: lines_in(folder) >= steps[0], lambda: first.poll() is None)
    first.kill()
    assert first.wait() == -signal.SIGKILL

    def resumed() -> Program:
        return Program(output, "train", "--resume", folder)

    kill_while_writing(folder, resumed)
    kill_when(lambda: any((folder / "checkpoints").glob("1-*")), resumed())
    border = lines_in(folder)
    kill_when(lambda: lines_in(folder) >= border + steps[1], resumed())
    kill_while_writing(folder, resumed)
    assert lines_in(folder) < lines_in(undisturbed), "every kill fell into the run"
    assert resumed().wait() == 0
    assert_same_run(folder, undisturbed)
    assert_only_retained_checkpoints(folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_resume_after_sigterm_or_sigint_matches_uninterrupted_run(
    with_dropout: Files, undisturbed: Path, number: signal.Signals, code: int
) -> None:
    folder = with_dropout.folder / number.name
    recipe = Recipe.from_dict(LONG.to_dict() | {"checkpoint_every": 1000})
    program = Program(folder.with_suffix(".txt"), *command(with_dropout, folder, recipe))
    wait_until(lambda: lines_in(folder) >= 4, program.running)
    os.kill(program.pid, number)
    assert program.wait() == code
    assert f"error: stopped by {number.name}; resume with: fastweights train --resume {folder}" in program.output
    last = json.loads((folder / "last" / "progress.json").read_text())["step"]
    assert 0 < last < 2 * MANY and last == len(losses_of(folder)) and not (folder / "result.json").exists()
    resume_in(folder)
    assert log_of(folder) == log_of(undisturbed)
    ours, theirs = weights_of(folder / "last"), weights_of(undisturbed / "last")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("lines", [1, 6, 11])
def test_resume_after_two_sigints_matches_uninterrupted_run(with_dropout: Files, undisturbed: Path, lines: int) -> None:
    """The second one ends the process wherever it is: in a step, or while it saves."""
    folder = with_dropout.folder / f"insisted {lines}"
    program = Program(folder.with_suffix(".txt"), *command(with_dropout, folder, LONG))
    wait_until(lambda: lines_in(folder) >= lines, program.running)
    for _ in range(2):
        os.kill(program.pid, signal.SIGINT)
    assert program.wait() == 130
    resume_in(folder)
    assert_same_run(folder, undisturbed)


def test_resume_after_full_disk_matches_uninterrupted_run(files: Files, tmp_path: Path) -> None:
    """The limit lets models through, and transfer's optimizer, but not that of a whole model."""
    recipe = make_recipe(validate_every=100)
    train_in(tmp_path / "chain", make_train_config(files, recipe))
    folder = tmp_path / "run"
    program = Program(tmp_path / "output", *command(files, folder, recipe), largest_file=200_000)
    assert program.wait() == 2
    assert f"error: cannot write the checkpoint {folder / 'checkpoints' / '1-0000009'}: " in program.output
    assert "the checkpoint of step 6 is complete: free disk space, then fastweights train --resume" in program.output
    assert {"0-0000003", "1-0000006"} <= set(os.listdir(folder / "checkpoints"))
    assert AutoModelForCausalLM.from_pretrained(folder / "last")
    resume_in(folder)
    assert_same_run(folder, tmp_path / "chain")


def test_two_processes_have_different_numbers_of_targets(files: Files) -> None:
    """Or the tests below would not see a loss that is divided by the wrong one."""
    batches = PackedBatches(prepare(files.data, tokenizer(), progress=False), LENGTH, ROWS)
    counts = [[int((batches.batch(step, r, 2)["labels"] != -100).sum()) for r in range(2)] for step in range(3)]
    assert all(ours != theirs for ours, theirs in counts)


@pytest.mark.parametrize(
    "how", [(), ("--shard",), ("--micro-batch", "1"), ("--shard", "--micro-batch", "1")], ids="".join
)
def test_two_processes_match_one_process(files: Files, alone: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    """Losses, gradients and validations of one process with the same batch; checkpoints that one process can load."""
    programs = two_programs(tmp_path / "outputs", *command(files, tmp_path / "run", ALL_LOSSES, *how))
    assert [program.wait() for program in programs] == [0, 0], programs[0].output
    assert "Warning" not in programs[0].output + programs[1].output
    found, expected = numbers_logged(tmp_path / "run"), numbers_logged(alone)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["processes"] == 2
    assert (tmp_path / "run" / "best").readlink() == (alone / "best").readlink()
    with torch.no_grad():
        ids = torch.arange(2, 40)[None]
        logits = [AutoModelForCausalLM.from_pretrained(f / "last")(ids).logits for f in (tmp_path / "run", alone)]
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 1e-5


def test_two_processes_drop_the_windows_of_the_same_rows_as_one(files: Files, tmp_path: Path) -> None:
    windowed = files._replace(converted=save_converted(tmp_path / "converted", files.base, window=4))
    recipe = make_recipe((dict(CHAIN[1], tokens=3 * STEP, window_dropout=0.5),))
    train_in(tmp_path / "alone", make_train_config(windowed, recipe))
    programs = two_programs(tmp_path / "outputs", *command(windowed, tmp_path / "run", recipe))
    assert [program.wait() for program in programs] == [0, 0], programs[0].output
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)


@pytest.mark.parametrize(
    ("how", "number", "signalled", "code"),
    [((), signal.SIGKILL, (0, 1), -signal.SIGKILL), (("--shard",), signal.SIGTERM, (1,), 143)],
    ids=["killed", "sharded, one of them asked to stop"],
)
def test_one_process_resumes_a_run_of_two(
    files: Files, alone: Path, tmp_path: Path, how: tuple[str, ...], number: int, signalled: tuple[int, ...], code: int
) -> None:
    folder = tmp_path / "run"
    recipe = Recipe.from_dict(ALL_LOSSES.to_dict() | {"checkpoint_every": 2})
    programs = two_programs(tmp_path / "outputs", *command(files, folder, recipe, *how))
    wait_until(lambda: lines_in(folder) >= 6, programs[0].running)
    for rank in signalled:
        os.kill(programs[rank].pid, number)
    assert [program.wait() for program in programs] == [code, code], programs[0].output
    assert not (folder / "result.json").exists()
    assert resume_in(folder)["processes"] == 1
    assert losses_of(folder) == pytest.approx(losses_of(alone), rel=1e-5)


def test_sigterm_to_torchrun_saves_a_checkpoint(files: Files, alone: Path, tmp_path: Path) -> None:
    """Both processes save the same step; sharded, that takes both of them."""
    folder = tmp_path / "run"
    recipe = make_recipe(tuple(dict(stage, tokens=300 * STEP) for stage in CHAIN), checkpoint_every=1000)
    typed = [str(part) for part in command(files, folder, recipe, "--shard")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w+") as output:
        program = subprocess.Popen([*torchrun, "fastweights", *typed], env=environment, stdout=output, stderr=output)
        wait_until(lambda: lines_in(folder) >= 4, lambda: program.poll() is None)
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) != 0
        output.seek(0)
        assert "stopped by SIGTERM; resume with: fastweights train --resume" in output.read()
    last = json.loads((folder / "last" / "progress.json").read_text())["step"]
    assert last == len(losses_of(folder)) < 600
