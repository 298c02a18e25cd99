"""A training run that is killed, loses its power or gets an I/O error at any of its file operations resumes to the bit.

By default some of the states are resumed, and of all of them it is checked that they can be; `full` resumes all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.crashes import (
    disk_at,
    evenly,
    mutations,
    outcome_of_error,
    outcome_of_image,
    outcome_of_mutation,
    record_run,
    short_run,
)
from helpers.disk import RecordedDisk, write_image
from helpers.training import crash_after, train_in, training_files

from fastweights.training import checkpoint, run_folder
from fastweights.training.log import read_log
from fastweights.training.trainer import TrainConfig

POLICIES = ("kill", "nothing unsynced", "empty files", "random")
SAMPLED = 4
MANY = 100_000


class Recorded(NamedTuple):
    config: TrainConfig
    expected: Path
    crashed: Path
    disk: RecordedDisk


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("crashes")
    with training_files(folder) as files:
        config = short_run(files)
        train_in(folder / "expected", config)
        crash_after(folder / "crashed", config, 4)
        yield Recorded(config, folder / "expected", folder / "crashed", record_run(config, folder / "recorded"))


def test_every_file_operation_is_recorded(recorded: Recorded) -> None:
    assert recorded.disk.operations > 100
    assert all(len(recorded.disk.images[policy]) > 10 for policy in POLICIES)
    assert {reported for reported, _ in recorded.disk.images["kill"]} == {0, 2, 3, 4, "finished"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_state_of_the_disk_has_all_that_was_reported(recorded: Recorded, tmp_path: Path, policy: str) -> None:
    for number, (reported, image) in enumerate(recorded.disk.images[policy]):
        with disk_at(write_image(tmp_path / str(number), image)) as folder:
            if not (folder / checkpoint.RUN).is_file():
                assert reported == 0 and (not folder.exists() or run_folder.is_unused(folder))
                continue
            last = checkpoint.newest_whole(folder, recorded.config.recipe, pytest.fail)
            step = 0 if last is None else checkpoint.read_progress(last).step
            assert step >= (4 if reported == "finished" else reported)
            assert read_log(folder, step)[1] == 0
            assert reported != "finished" or checkpoint.read_run_file(folder / checkpoint.RESULT)["finished"]


@pytest.mark.parametrize("count", [SAMPLED, pytest.param(MANY, marks=pytest.mark.full)])
@pytest.mark.parametrize("policy", POLICIES)
def test_run_resumes_to_the_bit_from_states_of_the_disk(
    recorded: Recorded, tmp_path: Path, policy: str, count: int
) -> None:
    for number, (reported, image) in enumerate(evenly(recorded.disk.images[policy], count)):
        found = outcome_of_image(recorded.config, recorded.expected, tmp_path / str(number), image, reported)
        assert found == "same", (number, reported)


@pytest.mark.parametrize("count", [2 * SAMPLED, pytest.param(MANY, marks=pytest.mark.full)])
def test_run_resumes_to_the_bit_after_io_errors(recorded: Recorded, tmp_path: Path, count: int) -> None:
    for number in evenly(list(range(1, recorded.disk.operations + 1)), count):
        root, lasting = tmp_path / str(number), number % 2 == 0
        assert outcome_of_error(recorded.config, recorded.expected, root, number, lasting) == "same", number


@pytest.mark.parametrize("count", [2 * SAMPLED, pytest.param(500, marks=pytest.mark.full)])
def test_damaged_run_ends_the_same_or_is_refused(recorded: Recorded, tmp_path: Path, count: int) -> None:
    """The checkpoint before a damaged one takes its place."""
    good = {"run.json": ("same", "refused"), "log.jsonl": ("same", "same weights, lines of the log lost")}
    config, expected, crashed, _ = recorded
    for number, mutation in enumerate(evenly(mutations(crashed, 500), count)):
        found = outcome_of_mutation(config, expected, crashed, tmp_path / str(number), *mutation)
        assert found in good.get(mutation[0].name, ("same",)), mutation
